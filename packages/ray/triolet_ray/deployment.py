"""The deployment on Ray Serve. No other module starts or ends anything there."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

import ray
from attrs import frozen
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import DeploymentID, ReplicaState
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from triolet.actors.statistics import EngineStatistics
from triolet.core.config import EngineConfig
from triolet.core.errors import EngineError, EngineTeardownError
from triolet.core.model import ModelDescription

from .autoscaling import ByDemand
from .content_router import ContentRouter
from .processes import are_left
from .register import NAMESPACE, Departure, Register, name_of, quarantine_of
from .replica import Replica
from .session import LOGGING, SESSION
from .statistics import total

REPLICA = "replica"  # the deployment's name within its application
_UP_SECONDS = 5.0  # of high demand before a replica is added
_DOWN_SECONDS = 60.0  # of low demand before a replica is removed
_MOST_WATCHERS = 100_000  # replicas that wait at the register
_POLL_SECONDS = 0.1  # between two requests to Serve
_BOOKS_SECONDS = 0.5  # between two looks at Ray's books, which list every actor and process so far
_END_SECONDS = 10.0  # for Serve to report the end
_ASK_SECONDS = 30.0  # for an answer from replicas that are ready
_UNPLACED = "to be scheduled"  # in Serve's message on a replica for which there is no room for long
_LEAVE_SECONDS = 600.0  # for the requests of a replica that is scaled down
_TELL_SECONDS = 1.0  # between two reports of a replica; more often is too much for the controller (docs/fleet.md)

_log = logging.getLogger("triolet_ray")


@frozen(kw_only=True)
class Deployment:
    """The settings of a `triolet_ray.cluster.Cluster`, which describes them."""

    name: str
    model: str
    config: EngineConfig
    replicas: int | tuple[int, int]  # the least and the most, by demand
    cpus: float
    gpus: float
    address: str | None
    most_requests: int = 1_024  # on one replica; the door bounds those of an ingress

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two applications: of the replicas, and of the quarantine."""
        return self.name, quarantine_of(self.name)

    @property
    def least(self) -> int:
        """The least number of ready replicas with which the deployment is ready."""
        return self.replicas if isinstance(self.replicas, int) else self.replicas[0]

    @property
    def stop_seconds(self) -> float:
        """The most seconds that a replica without requests takes to end in order."""
        return 3 * self.config.stage_seconds

    @property
    def end_seconds(self) -> float:
        """The most seconds that a replica takes to drain and end in order."""
        return self.config.drain_seconds + self.stop_seconds

    def begin(self) -> Running:
        """Deploys the replicas, and returns before they are ready. Blocks: call it in a thread.

        Raises:
            EngineError: Ray cannot be reached, or refuses the deployment.
        """
        with SESSION.lock:
            SESSION.join(self.address)
            try:
                return self._begun()
            except BaseException:
                SESSION.leave()
                raise

    def _begun(self) -> Running:
        register = self._new_register()
        try:
            return Running(self, *self._handles(), register)
        except BaseException:
            ray.kill(register)
            raise

    def _new_register(self) -> Any:
        """Starts the `Register`, an actor that every replica can find. It dies with this process or with its
        machine."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        made: Any = ray.remote(num_cpus=0)(Register).options(
            name=name_of(self.name),
            namespace=NAMESPACE,
            scheduling_strategy=here,
            max_restarts=-1,
            max_concurrency=_MOST_WATCHERS,
        )
        try:
            return made.remote()
        except ValueError as error:
            raise EngineError(
                f"another process uses the name {self.name!r} on this Ray ({error}); give another name"
            ) from error

    def _handles(self) -> tuple[DeploymentHandle[Any], DeploymentHandle[Any]]:
        """Starts both applications. Returns their handles: of the replicas, and of the quarantine."""
        targets = [
            serve.RunTarget(
                target=application,
                name=name,
                route_prefix=None,
                logging_config=LOGGING,
                external_scaler_enabled=name == self.name and isinstance(self.replicas, int),
            )
            for name, application in zip(self.names, (self._application(), self._quarantine()), strict=True)
        ]
        try:
            handle, quarantine = serve.run_many(targets, wait_for_applications_running=False)
        except (RuntimeError, ValueError) as error:
            self.delete()
            raise EngineError(f"the replicas cannot be started: {error}") from error
        else:
            return handle, quarantine

    def delete(self, *, blocks: bool = True) -> None:
        """Ends every replica."""
        for name in self.names:
            serve.delete(name, _blocking=blocks)

    def _quarantine(self) -> Any:
        """Makes the application for suspects. It has one replica while there are suspects, and otherwise none."""
        scaling = AutoscalingConfig(
            min_replicas=0,
            max_replicas=1,
            target_ongoing_requests=self.most_requests,
            upscale_delay_s=0.0,
            downscale_delay_s=_DOWN_SECONDS,
        )
        replica = self._deployment({"autoscaling_config": scaling})
        return replica.bind(self.model, self.config, name_of(self.name))

    def _count(self) -> dict[str, Any]:
        if isinstance(self.replicas, int):
            return {"num_replicas": self.replicas}
        least, most = self.replicas
        policy = AutoscalingPolicy.model_validate(
            {"policy_function": ByDemand, "policy_kwargs": {"places": self.config.max_running}}
        )
        return {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                policy=policy,
                upscale_delay_s=_UP_SECONDS,
                downscale_delay_s=_DOWN_SECONDS,
                look_back_period_s=2 * _TELL_SECONDS + 10.0,  # Serve's own figures are made every ten seconds
            )
        }

    def _application(self) -> Any:
        return self._deployment(self._count()).bind(self.model, self.config, name_of(self.name))

    def _deployment(self, count: dict[str, Any]) -> Any:
        return serve.deployment(
            Replica,
            name=REPLICA,
            **count,
            max_ongoing_requests=self.most_requests,
            graceful_shutdown_timeout_s=_LEAVE_SECONDS + self.end_seconds,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            ray_actor_options={"num_cpus": self.cpus, "num_gpus": self.gpus},
            request_router_config=RequestRouterConfig.model_validate(
                {
                    "request_router_class": ContentRouter,
                    "request_router_kwargs": {"places": self.config.max_running},
                    "request_routing_stats_period_s": _TELL_SECONDS,
                }
            ),
            logging_config=LOGGING,
        )


@frozen(eq=False)
class Running:
    """A deployment that is running on Ray Serve."""

    deployment: Deployment
    handle: DeploymentHandle[Any]  # for requests
    quarantine: DeploymentHandle[Any]  # of one replica, or none while there are no suspects
    register: Any  # the handle of a `Register`

    def lacks(self) -> str | None:
        """Returns a text that says which replicas are not ready; ``None``: every replica is ready. Blocks.

        Raises:
            EngineError: Ray has given up starting the replicas.
        """
        found = serve.status().applications.get(self.deployment.name)
        if found is None or found.status == ApplicationStatus.DEPLOY_FAILED:
            raise EngineError(
                f"the replicas cannot be started: {'they were deleted' if found is None else found.message}"
            )
        if found.status == ApplicationStatus.RUNNING:
            return None
        told = [one.message for one in found.deployments.values() if one.message]
        ready = sum(one.replica_states.get(ReplicaState.RUNNING, 0) for one in found.deployments.values())
        return " ".join([f"replicas that are ready: {ready}.", *told])

    def describe(self) -> tuple[ModelDescription, EngineStatistics]:
        """Returns the description of the model, and the first statistics of all replicas together. Blocks.

        Raises:
            CallerError: a replica cannot load the model.
            EngineError: a replica was lost meanwhile.
        """
        try:
            for fault in self._ask("fault"):
                if fault is not None:
                    raise fault
            # Only one replica is asked: Ray 2.60 ends this process if answers to a broadcast lie in the object store.
            described: bytes = self.handle.describe.remote().result(timeout_s=_ASK_SECONDS)
            ray.get(self.register.open.remote(), timeout=_ASK_SECONDS)
            return pickle.loads(described), total(self._ask("statistics"))
        except (RayError, RayServeException, TimeoutError) as error:
            raise EngineError(f"the replicas were ready, but did not answer: {error}") from error

    def _ask(self, question: str) -> list[Any]:
        """Returns the answers of all replicas except the one in quarantine. Waits until there are as many as must be
        ready, since a handle learns of a replica only after Serve reports it as ready.
        """
        end, least = time.monotonic() + _ASK_SECONDS, self.deployment.least
        while time.monotonic() < end:
            try:
                told: list[Any] = self.handle.broadcast(question).results(timeout_s=_ASK_SECONDS)
                if len(told) >= least:
                    return told
            except DeploymentUnavailableError:
                self.lacks()  # raises if there will never be replicas
            time.sleep(_POLL_SECONDS)
        raise TimeoutError(f"{least} replicas were ready, but fewer answered within {_ASK_SECONDS:g} s")

    def quarantine_loads(self) -> bool:
        """True if a replica in quarantine is starting: Ray has found room for it, but it is not ready yet. Blocks."""
        found = serve.status().applications.get(self.deployment.names[1])
        if found is None:
            return False
        starts = any(one.replica_states.get(ReplicaState.STARTING) for one in found.deployments.values())
        return starts and not any(_UNPLACED in one.message for one in found.deployments.values())

    def scale(self, replicas: int) -> None:
        """Orders a new number of replicas, and does not wait for them. Replicas that leave drain first. Blocks."""
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        target = DeploymentID(name=REPLICA, app_name=self.deployment.name)
        ray.get(controller.update_deployment_replicas.remote(target, replicas))

    def end(self) -> list[Departure]:
        """Drains and ends every replica in order. Returns all departures. Blocks: call it in a thread.

        Raises:
            EngineTeardownError: replicas have not ended in time, or Ray is lost.
        """
        seconds = self.deployment.end_seconds + _END_SECONDS
        try:
            if not self._deleted(seconds):
                raise EngineTeardownError(f"replicas have not ended within {seconds:g} s; read Ray's logs")
            departures: list[Departure] = ray.get(self.register.read.remote(0))
        except (RayError, RayServeException) as error:
            raise EngineTeardownError(f"Ray was lost before its replicas ended: {error}") from error
        finally:
            self._leave()
        return departures

    def give_up(self) -> None:
        """Ends replicas of which some were never ready, so that there is nothing to drain. Logs if replicas do not end
        in time, because Ray finds no room for them or they load for too long. Serve ends them later then.
        """
        seconds = self.deployment.stop_seconds + _END_SECONDS
        try:
            if not self._deleted(seconds):
                _log.warning("replicas of %s that were not ready have not ended in %g s", self.deployment.name, seconds)
        finally:
            self._leave()

    def _deleted(self, seconds: float) -> bool:
        """Ends the replicas. Returns whether all of them, and their processes, have ended within ``seconds``."""
        self.deployment.delete(blocks=False)
        end, names = time.monotonic() + seconds, self.deployment.names
        return _until(lambda: serve.status().applications.keys().isdisjoint(names), end, _POLL_SECONDS) and _until(
            lambda: not are_left(names), end, _BOOKS_SECONDS
        )

    def _leave(self) -> None:
        for handle in (self.handle, self.quarantine):
            # A handle reports its requests to the autoscaling, and would start Ray again for that.
            handle.shutdown()  # type: ignore[no-untyped-call]
        ray.kill(self.register)
        SESSION.leave()


def _until(is_so: Callable[[], bool], end: float, pause: float) -> bool:
    """Calls ``is_so`` every ``pause`` seconds until it returns true. False if the time ``end`` comes first."""
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True
