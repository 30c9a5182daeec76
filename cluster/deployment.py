"""What is deployed on Ray Serve, and how: the only place that starts and ends anything there."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import ray
from attrs import evolve, frozen
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..actors.statistics import EngineStatistics
from ..core.config import EngineConfig
from ..core.errors import CallerError, EngineError, EngineTeardownError
from ..core.model import ModelDescription
from .autoscaling import ByDemand
from .content_router import ContentRouter
from .register import Departure, Register, name_of
from .replica import Replica
from .statistics import total

_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
REPLICA = "replica"  # the deployment's name within its application
_ENCODER = "encoder"  # the name of the one that only encodes
_OWN = "local"  # Ray's word for a cluster of its own; without it, it joins any that it finds on this machine
_UP_SECONDS = 5.0  # of demand, before a replica is added
_DOWN_SECONDS = 60.0  # without, before one is taken away
_TELL_SECONDS = 1.0  # between two words of a replica; more often is too much for the controller (docs/fleet.md)


@frozen(kw_only=True)
class Deployment:
    """See `triolet.cluster.cluster.Cluster` for the meanings."""

    name: str
    model: str
    config: EngineConfig
    replicas: int | tuple[int, int]  # the least and the most, by demand
    cpus: float
    gpus: float
    address: str | None
    encoders: int = 0
    most_requests: int = 1_024  # of one replica; the door bounds those of an ingress

    def start(self) -> Running:
        """Deploys, and returns when all replicas are ready. Blocks: call it in a thread.

        Raises:
            CallerError: a replica cannot load the model.
            EngineError: Ray cannot be reached, or cannot start the replicas.
        """
        owns_ray = _connect(self.address)
        register: Any = ray.remote(num_cpus=0)(Register).options(name=name_of(self.name)).remote()
        try:
            handle = self._run()
            encoders = serve.get_deployment_handle(_ENCODER, self.name) if self.encoders else None
            handles = (handle,) if encoders is None else (handle, encoders)
            description, *_ = [_describe(one) for one in handles]
            statistics = total([told for one in handles for told in one.broadcast("statistics").results()])
            return Running(self, handles, description, statistics, register, owns_ray)
        except BaseException:
            serve.delete(self.name)
            ray.kill(register)
            _leave_ray(owns_ray)
            raise

    def _run(self) -> DeploymentHandle[Any]:
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            return serve.run(
                self._application(),
                name=self.name,
                route_prefix=None,
                logging_config=_LOGGING,
                external_scaler_enabled=isinstance(self.replicas, int),
            )
        except RuntimeError as error:
            raise EngineError(f"the replicas cannot be started: {error}") from error

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
                look_back_period_s=2 * _TELL_SECONDS + 10.0,  # Serve's own figures come every ten seconds
            )
        }

    def _application(self) -> Any:
        register, decoders = name_of(self.name), self._deployment(REPLICA, self._count())
        if not self.encoders:
            return decoders.bind(self.model, self.config, register)
        lenders = self._deployment(_ENCODER, {"num_replicas": self.encoders})
        return decoders.bind(
            self.model, self.config, register, lenders.bind(self.model, _only_encodes(self.config), register)
        )

    def _deployment(self, name: str, count: dict[str, Any]) -> Any:
        return serve.deployment(
            Replica,
            name=name,
            **count,
            max_ongoing_requests=self.most_requests,
            graceful_shutdown_timeout_s=self.config.drain_seconds + 3 * self.config.stage_seconds,
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
            logging_config=_LOGGING,
        )


def _describe(handle: DeploymentHandle[Any]) -> ModelDescription:
    told = handle.describe.remote().result()
    if isinstance(told, CallerError):
        raise told
    description: ModelDescription = pickle.loads(told)
    return description


def _only_encodes(config: EngineConfig) -> EngineConfig:
    """Settings of a replica that gets no requests: KV for a single sequence, the least that there is."""
    return evolve(config, max_running=1, self_kv_bytes=0, cross_kv_bytes=0)


@frozen(eq=False)
class Running:
    """A deployment that runs."""

    deployment: Deployment
    handles: tuple[DeploymentHandle[Any], ...]  # of the deployment that takes requests, and of one that only encodes
    description: ModelDescription
    statistics: EngineStatistics
    register: Any  # the handle of a `Register`
    owns_ray: bool  # this process started Ray for it

    @property
    def handle(self) -> DeploymentHandle[Any]:
        """Of the deployment that takes requests."""
        return self.handles[0]

    def scale(self, replicas: int) -> None:
        """Orders more or fewer replicas, and returns at once. Those that leave drain first. Blocks."""
        controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        target = DeploymentID(name=REPLICA, app_name=self.deployment.name)
        ray.get(controller.update_deployment_replicas.remote(target, replicas))

    def end(self, known: int) -> list[Departure]:
        """Drains and releases every replica, in order. Returns the departures from the ``known`` on. Blocks: call it in
        a thread.

        Raises:
            EngineTeardownError: replicas have not ended in their time.
        """
        try:
            serve.delete(self.deployment.name)
            departures: list[Departure] = ray.get(self.register.read.remote(known))
        except TimeoutError as error:
            raise EngineTeardownError(f"replicas have not ended: {error}; see Ray's own logs") from error
        finally:
            ray.kill(self.register)
            _leave_ray(self.owns_ray)
        return departures


def _connect(address: str | None) -> bool:
    """Connects this process to Ray. Returns whether Ray was started for it."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS") or _OWN
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address == _OWN else f"at {address}"
        raise EngineError(f"Ray {where} cannot be reached: {error}") from error
    return address == _OWN


def _leave_ray(owns_ray: bool) -> None:
    if owns_ray:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
