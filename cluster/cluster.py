"""`Cluster`: an `Engine` whose requests run on replicas, on the machines of a Ray cluster."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import asdict, evolve, field, frozen

from ..api.engine import Engine
from ..api.hosts.backend import Backend
from ..api.hosts.trio_engine import TrioEngine
from ..core.checks import Check, Refused, as_integer, by, integer, number, settle
from ..core.config import EngineConfig
from ..core.errors import InvalidRequest
from .register import Departure

if TYPE_CHECKING:
    from .backend import RayBackend


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise Refused
    return value


def _address(value: Any) -> str:
    """Ray's client, ray://, does not stream."""
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
    encoders: int = field(metadata=by(integer(0, _MOST)))
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
    """An engine on many machines. All else is as with `Engine`: the same methods, options and errors.

    ::

        async with Cluster("openai/whisper-small", replicas=3) as engine:
            transcript = await engine.transcribe("speech.wav")

    Each replica is an engine in a process of its own, deployed on Ray Serve for the block. This process prepares
    requests: it decodes audio, finds windows, renders prompts and assembles texts. Each request, a window of audio for
    one, goes to the replica that holds the encoder output of its content, or else to the one that the content's hash
    names, unless they are busy. A long recording's windows so spread over the replicas.

    A request whose replica is lost goes on after its last token elsewhere: nothing is lost, and no token comes twice.
    Since it may be what ended the replica, that is in quarantine: on a replica for suspects alone, which is started
    when there are some. A request that ends replicas gets `PoisonRequest`; one replica that others use has ended then.

    With ``encoders`` so many replicas more only encode, and the others borrow encoder outputs from them. They hold the
    model's encoder alone. What cannot be borrowed, since none of them answers say, is encoded where it is needed: all
    others hold the whole model.

    When the block ends, requests drain, and every replica gives its device back in order.

    Args:
        model: a folder with a transformers checkpoint, the same on every machine, or a hub id.
        config: settings of each replica's engine. ``max_pending`` and ``drain_seconds`` hold for the cluster as a
            whole. An ``observer`` hears nothing: the events are elsewhere.
        replicas: how many engines. With a pair, the least and the most, there are as many as are in demand: by requests
            that wait or run, and by encodings that wait.
        encoders: how many replicas more, that only encode. Their number stays. 0: each replica encodes for itself.
        cpus: cores that Ray reserves for each, those that only encode too.
        gpus: GPUs that Ray reserves for each, in the same way.
        address: of the Ray cluster that this machine is a part of, such as ``head:6379``; ``auto``: the one that runs
            here. By default the one that this process has joined, or ``RAY_ADDRESS``; without either Ray is started on
            this machine for the block (``local``). A process joins one Ray.
        name: of the application on Ray Serve, one for each that lives. By default one of its own.

    Raises (on making one):
        InvalidRequest: a value that is not allowed, or Ray is not installed.

    Raises (on entering):
        InvalidRequest: a setting that the model cannot have, such as ``encoders`` of one that has no encoder.
        CheckpointError: no checkpoint there, or one that a replica cannot load.
        EngineError: Ray cannot be reached, or cannot start the replicas.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        replicas: int | tuple[int, int] = 1,
        encoders: int = 0,
        cpus: float = 1.0,
        gpus: float = 0.0,
        address: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(model, config=config)
        if not self.inside.config.decodes:
            raise InvalidRequest(
                f"a cluster of replicas with part={self.inside.config.part!r}, which run no requests; allowed: "
                "part='whole'. For replicas that only encode, give encoders=..."
            )
        settings = _Settings(replicas=replicas, encoders=encoders, cpus=cpus, gpus=gpus, address=address, name=name)
        check_installed()
        self.inside = TrioEngine(self.inside.config, partial(_backend, str(model), self.inside.config, settings))

    async def scale(self, replicas: int) -> None:
        """Orders ``replicas`` from now on; returns when it is ordered. Replicas that leave end their requests first,
        within ten minutes, and then give their device back in order: see `departures`.

        Raises:
            InvalidRequest: not an integer of 1 or more, or the number follows the demand.
            EngineStateError: not in its block.
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


def check_installed() -> None:
    """Raises `InvalidRequest` where Ray is not installed. Imports nothing of it."""
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise InvalidRequest("a cluster needs Ray, which is not installed; pip install 'triolet[cluster]'")


def _backend(model: str, config: EngineConfig, settings: _Settings) -> Backend:
    from .backend import RayBackend
    from .deployment import Deployment

    deployed = asdict(settings) | {"name": settings.name or _name_of(model)}
    return RayBackend(Deployment(**deployed, model=model, config=evolve(config, observer=None)))


def _name_of(model: str) -> str:
    """A name that no other application has."""
    return f"triolet-{re.sub('[^a-z0-9]+', '-', Path(model).name.lower())}-{uuid4().hex[:8]}"
