"""`Cluster`: an `Engine` whose requests run on replicas, on the machines of a Ray cluster."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from attrs import evolve

from ..api.engine import Engine
from ..api.hosts.trio_engine import TrioEngine
from ..core.config import EngineConfig
from .backend import RayBackend
from .deployment import Deployment


class Cluster(Engine):
    """``async with Cluster(model, replicas=3) as engine``: an engine on many machines.

    With ``encoders`` so many replicas more only encode, and the others borrow encoder outputs from them. What cannot be
    borrowed, since an encoder is lost say, is encoded where it is needed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        config: EngineConfig | None = None,
        replicas: int = 1,
        encoders: int = 0,
        cpus: float = 1.0,
        gpus: float = 0.0,
        name: str = "triolet",
        address: str | None = None,
    ) -> None:
        super().__init__(model, config=config)
        config = config or EngineConfig()
        deployment = Deployment(
            name=name,
            model=str(model),
            config=evolve(config, observer=None),
            replicas=replicas,
            encoders=encoders,
            cpus=cpus,
            gpus=gpus,
            address=address,
        )
        self.inside = TrioEngine(config, partial(RayBackend, deployment))
