"""`Cluster`: an `Engine` whose requests run on replicas, on the machines of a Ray cluster."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import asdict, evolve, field, frozen

from triolet.api.engine import Engine
from triolet.api.hosts.backend import Backend
from triolet.api.hosts.trio_engine import TrioEngine
from triolet.core.checks import Check, Refused, as_integer, by, integer, number, settle
from triolet.core.config import EngineConfig

from .register import Departure

if TYPE_CHECKING:
    from .backend import RayBackend


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused
    return value


def _address(value: Any) -> str:
    """Returns the address; refuses a ray:// address, since Ray's client cannot stream."""
    if "://" in _text(value):
        raise Refused
    return str(value)


_MOST = 10_000
_COUNT = integer(1, _MOST)


def _count(value: Any) -> int | tuple[int, int]:
    several = isinstance(value, tuple | list)
    least, most = (as_integer(one) for one in (value if several else (value, value)))
    if not 1 <= least <= most <= _MOST:
        raise Refused
    return (least, most) if several else least


@frozen(kw_only=True)
class _Settings:
    replicas: int | tuple[int, int] = field(
        metadata=by(Check(_count, "an integer of 1 or more, or two: the least and the most"))
    )
    cpus: float = field(metadata=by(number(0, math.inf)))
    gpus: float = field(metadata=by(number(0, math.inf)))
    address: str | None = field(
        metadata=by(
            Check(_address, "host:port, such as head:6379, auto or local").or_none("that of RAY_ADDRESS, or local")
        )
    )
    name: str | None = field(metadata=by(Check(_text, "a text").or_none("one of its own")))

    def __attrs_post_init__(self) -> None:
        settle(self)


class Cluster(Engine):
    """An engine on many machines, with the methods, options and errors of `Engine`.

    ::

        async with Cluster("openai/whisper-small", replicas=3) as engine:
            transcript = await engine.transcribe("speech.wav")

    Each replica is an engine in a process of its own, deployed on Ray Serve for the block. This process prepares
    requests: it decodes audio, finds windows, renders prompts and assembles texts. Each request, such as a window of
    audio, goes to the replica that holds the encoder output of its content, or else to the replica that the hash of the
    content selects. Busy replicas are avoided. In this way the windows of a long recording spread over the replicas.

    If a replica is lost, its requests go on elsewhere after their last tokens: no token is lost, and none comes twice.
    Since one of them may have caused the loss, they go on in quarantine: on a replica that runs only suspects and is
    started when there are some. A request that ends replicas fails with `PoisonRequest`. Only the first of these
    replicas had other requests than suspects.

    At the end of the block, requests drain, and every replica frees its device in order.

    Args:
        model: a folder with a transformers checkpoint, the same on every machine, or a hub id.
        config: settings of each replica's engine. ``max_pending`` and ``drain_seconds`` hold for the cluster as a
            whole. An ``observer`` gets no events, since they happen in other processes.
        replicas: the number of engines. A pair is the least and the most: the number then follows the demand, which is
            the requests that wait or run and the encodings that wait.
        cpus: the cores that Ray reserves for each replica.
        gpus: the GPUs that Ray reserves for each replica.
        address: the address of the Ray cluster that this machine is a part of, such as ``head:6379``; ``auto``: the
            cluster that runs on this machine; ``local``: Ray is started on this machine for the block. The default is
            the cluster that this process has joined, or ``RAY_ADDRESS``, or else ``local``. A process can join only one
            Ray cluster.
        name: the name of the application on Ray Serve. Clusters that run at the same time need different names. The
            default is a new name.

    Raises (on making one):
        InvalidRequest: a value that is not allowed, or Ray is not installed.

    Raises (on entering):
        InvalidRequest: a setting that the model does not allow.
        CheckpointError: there is no checkpoint, or a replica cannot load it.
        EngineError: Ray cannot be reached, or cannot start the replicas.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        replicas: int | tuple[int, int] = 1,
        cpus: float = 1.0,
        gpus: float = 0.0,
        address: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(model, config=config)
        settings = _Settings(replicas=replicas, cpus=cpus, gpus=gpus, address=address, name=name)
        self.inside = TrioEngine(self.inside.config, partial(_backend, str(model), self.inside.config, settings))

    async def scale(self, replicas: int) -> None:
        """Orders a new number of replicas, and returns without waiting for them. Replicas that leave end their requests
        first, within ten minutes, and then free their devices in order: see `departures`.

        Raises:
            InvalidRequest: ``replicas`` is not an integer of 1 or more, or the number of replicas follows the demand.
            EngineStateError: the cluster is not in its block.
        """
        wanted = _COUNT.of("replicas", replicas)
        await self._reached().call(partial(self._ray().scale, wanted))

    @property
    def departures(self) -> tuple[Departure, ...]:
        """The departures of the replicas that have left in order since the block began, the latest last."""
        return () if self.inside.backend is None else tuple(self._ray().departures)

    def _ray(self) -> RayBackend:
        from .backend import RayBackend

        backend = self.inside.backend
        assert isinstance(backend, RayBackend), "a cluster's backend is Ray's"
        return backend


def _backend(model: str, config: EngineConfig, settings: _Settings) -> Backend:
    from .backend import RayBackend
    from .deployment import Deployment

    deployed = asdict(settings) | {"name": settings.name or _name_of(model)}
    return RayBackend(Deployment(**deployed, model=model, config=evolve(config, observer=None)))


def _name_of(model: str) -> str:
    """Returns a name for the application of ``model`` that no other application has."""
    return f"triolet-{re.sub('[^a-z0-9]+', '-', Path(model).name.lower())}-{uuid4().hex[:8]}"
