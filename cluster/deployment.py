"""What is deployed on Ray Serve, and how: the only place that starts and ends anything there."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import ray
from attrs import frozen
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..actors.supervisor import EngineStatistics
from ..core.config import EngineConfig
from ..core.errors import CallerError, EngineError
from ..core.model import ModelDescription
from .content_router import ContentRouter
from .replica import Replica
from .statistics import total

_LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_TELL_SECONDS = 1.0  # between two words of a replica on what it holds


@frozen(kw_only=True)
class Deployment:
    """See `triolet.cluster.cluster.Cluster` for the meanings."""

    name: str
    model: str
    config: EngineConfig
    replicas: int
    cpus: float
    gpus: float
    address: str | None
    most_requests: int = 1_024  # of one replica; the door bounds those of an ingress

    def start(self) -> Running:
        """Deploys, and returns when all replicas are ready. Blocks: call it in a thread.

        Raises:
            CallerError: a replica cannot load the model.
            EngineError: Ray cannot be reached, or cannot start the replicas.
        """
        owns_ray = _connect(self.address)
        try:
            handle = self._run()
            told = handle.describe.remote().result()
            if isinstance(told, CallerError):
                raise told
            statistics = total(handle.broadcast("statistics").results())
            return Running(self, handle, pickle.loads(told), statistics, owns_ray)
        except BaseException:
            _end(self.name, owns_ray=owns_ray)
            raise

    def _run(self) -> DeploymentHandle[Any]:
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            return serve.run(self._application(), name=self.name, route_prefix=None, logging_config=_LOGGING)
        except RuntimeError as error:
            raise EngineError(f"the replicas cannot be started: {error}") from error

    def _application(self) -> Any:
        return serve.deployment(
            Replica,
            name="replica",
            num_replicas=self.replicas,
            max_ongoing_requests=self.most_requests,
            graceful_shutdown_timeout_s=self.config.drain_seconds + 3 * self.config.stage_seconds,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            ray_actor_options={"num_cpus": self.cpus, "num_gpus": self.gpus},
            request_router_config=RequestRouterConfig(
                request_router_class=ContentRouter,
                request_router_kwargs={"places": self.config.max_running},
                request_routing_stats_period_s=_TELL_SECONDS,
            ),
            logging_config=_LOGGING,
        ).bind(self.model, self.config)


@frozen(eq=False)
class Running:
    """A deployment that runs."""

    deployment: Deployment
    handle: DeploymentHandle[Any]
    description: ModelDescription
    statistics: EngineStatistics
    owns_ray: bool  # this process started Ray for it

    def end(self) -> None:
        """Drains and releases every replica, in order. Blocks: call it in a thread."""
        _end(self.deployment.name, owns_ray=self.owns_ray)


def _connect(address: str | None) -> bool:
    """Connects this process to Ray. Returns whether Ray was started for it."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise EngineError(f"Ray {where} cannot be reached: {error}") from error
    return address is None


def _end(name: str, *, owns_ray: bool) -> None:
    if not owns_ray:
        serve.delete(name)
        return
    serve.shutdown()
    ray.shutdown()
