"""Several simulated models behind one `Engines`, and what becomes of their devices."""

from __future__ import annotations

import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio
import trio.testing
from attrs import define, field

from triolet import Engine, EngineConfig, Engines, ModelSpec
from triolet.core.residency import ModelState
from triolet_testing.sim import WEIGHTS, DeviceFault, SimExecutor, SimWorker, sim_engine

OPEN, CLOSE = 1.0, 0.1
"""Virtual seconds that a simulated model takes to load, and to go."""


@define(eq=False)
class Fleet:
    """Models by name, each of so many bytes: its weights, and for the rest its encoder cache. Each load has a device of
    its own."""

    sizes: Mapping[str, int]
    settings: Mapping[str, Any] = field(factory=dict)
    faults: dict[str, DeviceFault] = field(factory=dict)
    make_worker: Callable[[], Any] = SimWorker
    devices: list[tuple[str, SimExecutor]] = field(factory=list)  # in the order of the loads
    keeps_devices: bool = True
    engines_made: list[weakref.ref[Engine]] = field(factory=list)

    def engines(
        self, *, thought: Mapping[str, int] | None = None, specs: Mapping[str, Any] | None = None, **options: Any
    ) -> Engines:
        """``thought``: what models are thought to need, where it is not their size; ``specs``: arguments of theirs."""
        needs, more = {**self.sizes, **(thought or {})}, specs or {}
        make = {name: partial(self.make, name) for name in needs}
        models = {name: ModelSpec.from_parts(make[name], needs[name], **more.get(name, {})) for name in needs}
        return Engines(models, **options)

    def make(self, name: str) -> Engine:
        """An engine of a model, on a device of its own."""
        device = SimExecutor(fault=self.faults.get(name))
        if self.keeps_devices:
            self.devices.append((name, device))
        settings: dict[str, Any] = {"encoder_cache_bytes": self.sizes[name] - WEIGHTS, "verify": True, **self.settings}
        engine = sim_engine(device, config=EngineConfig(**settings), worker=self.make_worker())
        self.engines_made.append(weakref.ref(engine))
        return engine

    @property
    def loads(self) -> str:
        """The names in the order of their loads."""
        return "".join(name for name, _ in self.devices)

    @property
    def open(self) -> str:
        """The names of the models that are on a device now."""
        return "".join(name for name, device in self.devices if device.is_open)

    def check(self) -> None:
        """All is given back."""
        assert self.open == ""
        assert not any(device.outputs for _, device in self.devices)
        assert not any(device.misuses for _, device in self.devices)


def states(engines: Engines) -> str:
    """Of all models, by their first letters."""
    return "".join(one.state.value[0] for one in engines.statistics().values())


def is_ready(engines: Engines, name: str) -> bool:
    return engines.statistics()[name].state is ModelState.READY


class Users:
    """Users of models, each a task with a number; they end when they are told to."""

    def __init__(self, engines: Engines, nursery: trio.Nursery) -> None:
        self.engines, self.nursery = engines, nursery
        self.order: list[str] = []  # who began, in order
        self.errors: dict[str, BaseException] = {}
        self.scopes: dict[str, trio.CancelScope] = {}
        self._ends: dict[str, trio.Event] = {}

    async def come(self, who: str) -> None:
        """A user of the model with its first letter. Returns when nothing more happens at once."""
        self.begin(who)
        await settle()

    def begin(self, who: str) -> None:
        """Has a user come in the next turn."""
        self.scopes[who], self._ends[who] = trio.CancelScope(), trio.Event()
        self.nursery.start_soon(self._use, who)

    async def go(self, who: str) -> None:
        self._ends[who].set()
        await settle()

    async def cancel(self, who: str) -> None:
        self.scopes[who].cancel()
        await settle()

    async def _use(self, who: str) -> None:
        with self.scopes[who]:
            try:
                async with self.engines.use(who[0]):
                    self.order.append(who)
                    await self._ends[who].wait()
            except Exception as error:  # noqa: BLE001  (for the test to look at)
                self.errors[who] = error


async def settle() -> None:
    """Until every task waits for another one, or for time to pass."""
    await trio.testing.wait_all_tasks_blocked()


async def later(seconds: float) -> None:
    """Until ``seconds`` have passed, and what happens then has happened."""
    await trio.sleep(seconds + 0.001)
    await settle()


@asynccontextmanager
async def crowd(fleet: Fleet, **options: Any) -> AsyncIterator[tuple[Engines, Users]]:
    """Engines with a nursery of users outside; at the end all is given back."""
    async with trio.open_nursery() as nursery:
        async with fleet.engines(**options) as engines:
            users = Users(engines, nursery)
            yield engines, users
            for who in users.scopes:
                users._ends[who].set()
            await settle()
    fleet.check()
