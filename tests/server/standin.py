"""Stands in for `Engines` until it is there."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import triolet
from triolet.core.config import EngineConfig


class _State(enum.Enum):
    READY = "ready"


class StandIn:
    def __init__(self, models: Mapping[str, Any]) -> None:
        self.models = models

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Any]:
        yield self.models[name]

    def statistics(self) -> Any:
        return SimpleNamespace(models={name: self._of(one) for name, one in self.models.items()})

    def _of(self, engine: Any) -> Any:
        """As `ModelStatistics`, and ``description``: the engine's `ModelDescription` while the model is ready."""
        return SimpleNamespace(
            state=_State.READY,
            users=0,
            waiting=0,
            bytes=engine.statistics().device.total,
            loads=1,
            last_used=None,
            last_error=None,
            engine=engine.statistics(),
            description=engine.model,
        )


@asynccontextmanager
async def stand_in(models: Mapping[str, str], observers: Any) -> AsyncIterator[StandIn]:
    async with AsyncExitStack() as stack:
        opened = {}
        for name, path in models.items():
            config = EngineConfig(device="cpu", observer=observers.of(name))
            opened[name] = await stack.enter_async_context(triolet.Engine(path, config=config))
        yield StandIn(opened)
