"""What is deployed on Ray Serve, and how: the only place that starts and ends anything there."""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any

import ray
from attrs import evolve, frozen
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..core.config import EngineConfig
from ..core.model import ModelDescription
from .content_router import ContentRouter
from .replica import Replica

_ENCODER = "encoder"  # the name of the deployment that only encodes
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
    encoders: int = 0
    most_requests: int = 1_024  # of one replica; the door bounds those of an ingress

    def start(self) -> Running:
        """Deploys, and returns when all replicas are ready. Blocks: call it in a thread."""
        owns_ray = _connect(self.address)
        try:
            serve.start(proxy_location="Disabled", logging_config=_LOGGING)
            handle = serve.run(self._application(), name=self.name, route_prefix=None, logging_config=_LOGGING)
            encoders = serve.get_deployment_handle(_ENCODER, self.name) if self.encoders else None
            return Running(self, handle, encoders, pickle.loads(handle.describe.remote().result()), owns_ray)
        except BaseException:
            _end(self.name, owns_ray=owns_ray)
            raise

    def _application(self) -> Any:
        decoders = self._deployment("replica", self.replicas)
        if not self.encoders:
            return decoders.bind(self.model, self.config)
        lenders = self._deployment(_ENCODER, self.encoders)
        return decoders.bind(self.model, self.config, lenders.bind(self.model, _only_encodes(self.config)))

    def _deployment(self, name: str, replicas: int) -> Any:
        return serve.deployment(
            Replica,
            name=name,
            num_replicas=replicas,
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
        )


def _only_encodes(config: EngineConfig) -> EngineConfig:
    """Settings of a replica that gets no requests: KV for a single sequence, the least that there is."""
    return evolve(config, max_running=1, self_kv_bytes=0, cross_kv_bytes=0)


@frozen(eq=False)
class Running:
    """A deployment that runs."""

    deployment: Deployment
    handle: DeploymentHandle[Any]
    encoders: DeploymentHandle[Any] | None  # of the deployment that only encodes
    description: ModelDescription
    owns_ray: bool  # this process started Ray for it

    @property
    def handles(self) -> tuple[DeploymentHandle[Any], ...]:
        """Of all deployments."""
        return (self.handle,) if self.encoders is None else (self.handle, self.encoders)

    def end(self) -> None:
        """Drains and releases every replica, in order. Blocks: call it in a thread."""
        _end(self.deployment.name, owns_ray=self.owns_ray)


def _connect(address: str | None) -> bool:
    """Connects this process to Ray. Returns whether Ray was started for it."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = address or os.environ.get("RAY_ADDRESS")
    ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    return address is None


def _end(name: str, *, owns_ray: bool) -> None:
    if not owns_ray:
        serve.delete(name)
        return
    serve.shutdown()
    ray.shutdown()
