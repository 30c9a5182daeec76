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
        return SimpleNamespace(models={name: SimpleNamespace(state=_State.READY) for name in self.models})


@asynccontextmanager
async def stand_in(models: Mapping[str, str], observers: Any) -> AsyncIterator[StandIn]:
    async with AsyncExitStack() as stack:
        opened = {}
        for name, path in models.items():
            config = EngineConfig(device="cpu", observer=observers.of(name))
            opened[name] = await stack.enter_async_context(triolet.Engine(path, config=config))
        yield StandIn(opened)
