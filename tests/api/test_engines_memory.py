"""Nothing is left of a use or of a model that is gone. The garbage collector is off: what dies here dies by reference
count. Real checkpoints are in test_engines_real.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import trio

from triolet import CheckpointError, EngineError, Engines, EngineTeardownError
from triolet.actors.worker import Job

from ..actors.shared import ask
from ..heap import assert_none, expected, garbage, without_collector
from .fleet import Fleet, later

Ending = Callable[[Engines, Fleet], Awaitable[None]]


async def used(engines: Engines, _: Fleet) -> None:
    async with engines.use("a") as engine:
        await ask(engine, 1, max_tokens=3)


async def gives_way(engines: Engines, _: Fleet) -> None:
    await engines.load("a")
    await engines.load("b")


async def unloaded(engines: Engines, _: Fleet) -> None:
    await engines.load("a")
    await engines.unload("a")


async def not_loaded(engines: Engines, fleet: Fleet) -> None:
    await engines.unload("a")
    fleet.faults["a"] = lambda job, _: CheckpointError("torn") if job is Job.OPEN else None
    for _ in range(2):
        with expected(CheckpointError):
            async with engines.use("a"):
                pass
    del fleet.faults["a"]
    await later(20)


async def failed(engines: Engines, fleet: Fleet) -> None:
    await engines.unload("a")
    fleet.faults["a"] = lambda job, _: SystemExit("dead") if job is Job.STEP else None
    with expected(EngineError):
        await used(engines, fleet)
    del fleet.faults["a"]
    await later(1)


async def left_with_an_error(engines: Engines, _: Fleet) -> None:
    with suppress(KeyError):
        async with engines.use("a"):
            raise KeyError("mine")


async def cancelled_in_a_use(engines: Engines, _: Fleet) -> None:
    with trio.move_on_after(5):
        async with engines.use("a"):
            await trio.sleep_forever()


async def cancelled_while_it_waits(engines: Engines, _: Fleet) -> None:
    """Alone, and with a nursery that fails."""
    async with engines.use("a"):
        with trio.move_on_after(0.1):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engines.load, "b")
        with suppress(BaseExceptionGroup):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engines.load, "b")
                await later(0.1)
                raise KeyError("mine")


async def cancelled_while_it_loads(engines: Engines, _: Fleet) -> None:
    await engines.unload("a")
    with trio.move_on_after(0.5):
        await engines.load("a")
    await later(2)


ENDINGS = [
    used,
    gives_way,
    unloaded,
    not_loaded,
    failed,
    left_with_an_error,
    cancelled_in_a_use,
    cancelled_while_it_waits,
    cancelled_while_it_loads,
]


def a_fleet() -> Fleet:
    fleet = Fleet({"a": 2000, "b": 2000}, settings={"verify": False})
    fleet.keeps_devices = False
    return fleet


async def test_an_engine_that_is_gone_is_gone(autojump_clock: object) -> None:
    """However the uses of it have ended."""
    with without_collector():
        for ending in ENDINGS:
            fleet = a_fleet()
            async with fleet.engines(memory_budget=3000) as engines:
                await ending(engines, fleet)
                for name in engines.models:
                    await engines.unload(name)
                await later(1)
                assert fleet.engines_made
                assert not any(made() for made in fleet.engines_made), f"an engine is kept: {ending.__name__}"


async def test_uses_come_and_go_without_garbage_however_they_end(autojump_clock: object) -> None:
    async def life() -> None:
        fleet = a_fleet()
        with suppress(KeyError):
            async with fleet.engines(memory_budget=3000, idle_seconds=1) as engines:
                for ending in ENDINGS:
                    await ending(engines, fleet)
                raise KeyError("mine")
        fleet.faults["a"] = lambda job, _: RuntimeError("stuck") if job is Job.CLOSE else None
        with expected(EngineTeardownError):
            async with fleet.engines() as engines:
                await engines.load("a")
        del fleet.faults["a"]
        with trio.move_on_after(5):
            async with fleet.engines() as engines, engines.use("a"):
                await trio.sleep_forever()

    await life()
    with garbage() as found:
        await life()
        await trio.sleep(1)
    assert_none(found)
