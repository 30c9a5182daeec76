"""Several models on every host: trio, asyncio, and anyio on both."""

from __future__ import annotations

import asyncio
import gc
import math
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import anyio.lowlevel
import pytest
from attrs import define, field

from triolet import (
    Engine,
    EngineClosed,
    EngineConfig,
    EngineError,
    Engines,
    EngineStateError,
    ModelSpec,
)
from triolet.actors.worker import Job
from triolet.api.hosts.current import current_task
from triolet.api.residents import Resident
from triolet.core import events
from triolet_testing.sim import WEIGHTS, DeviceFault, SimExecutor

from .hosts import (
    HOSTS,
    UNHURRIED,
    GatedWorker,
    Handle,
    Hold,
    Host,
    _threads,
    ask,
    on_bench,
)

pytestmark = pytest.mark.real_time

SIZE = 5000
ONE, TWO = SIZE, 2 * SIZE  # budgets


@define(eq=False)
class Gates:
    """Models over gated devices, and the checks that everything came back."""

    host: Host
    faults: dict[str, DeviceFault] = field(factory=dict)
    holds: dict[str, list[Hold]] = field(factory=dict)
    devices: list[tuple[str, SimExecutor]] = field(factory=list)
    workers: dict[str, GatedWorker] = field(factory=dict)  # the last of each model

    def engines(self, *names: str, settings: dict[str, Any] | None = None, **options: Any) -> Engines:
        return Engines(
            {name: ModelSpec.from_parts(partial(self._make, name, settings or {}), SIZE) for name in names}, **options
        )

    def _make(self, name: str, settings: dict[str, Any]) -> Engine:
        device, worker = SimExecutor(fault=self.faults.get(name)), GatedWorker(self.holds.get(name, []))
        self.devices.append((name, device))
        self.workers[name] = worker

        def observe(event: events.Event) -> None:
            if event == events.StageReached("intake closed"):
                worker.teardown_begins()

        config = EngineConfig(
            **{**UNHURRIED, "verify": True, "observer": observe, "encoder_cache_bytes": SIZE - WEIGHTS, **settings}
        )
        return Engine.from_parts(lambda: device, lambda: worker, config=config)

    def hold(self, name: str, job: Job, *, until_teardown: bool = True) -> Hold:
        """Call it in the host's loop, before the model is loaded."""
        hold = Hold(job, self.host.signal(), 0, until_teardown)
        self.holds.setdefault(name, []).append(hold)
        return hold

    def end_hold(self, name: str, hold: Hold) -> None:
        self.workers[name].end_hold(hold)

    def run(self, main: Callable[[], Awaitable[Any]]) -> None:
        before = _threads()
        self.host.run(main)
        assert _threads() == before, "a thread of ours is left"
        for _, device in self.devices:
            assert not device.is_open
            assert not device.outputs
            assert not device.misuses

    @property
    def loads(self) -> str:
        return "".join(name for name, _ in self.devices)


@pytest.fixture(params=HOSTS, ids=lambda host: host.name)
def gates(request: pytest.FixtureRequest) -> Gates:
    return Gates(request.param)


async def use(engines: Engines, name: str, number: int = 1) -> None:
    async with engines.use(name) as engine:
        await ask(engine, number)


def state(engines: Engines, name: str) -> str:
    return engines.statistics()[name].state.value


# -- loading ---------------------------------------------------------------------------------------------------------


@on_bench
async def test_models_take_turns_under_a_budget_that_holds_one(gates: Gates) -> None:
    async with gates.engines("a", "b", memory_budget=ONE) as engines:
        for name in "abab":
            await use(engines, name)
        assert state(engines, "a") == "absent"
        assert engines.statistics()["b"].bytes == SIZE
        await engines.unload("b")
        assert state(engines, "b") == "absent"
    assert gates.loads == "abab"


@on_bench
async def test_an_idle_model_goes_of_its_own_accord(gates: Gates) -> None:
    async with gates.engines("a", idle_seconds=0.001) as engines:
        await engines.load("a")
        while state(engines, "a") != "absent":
            await anyio.lowlevel.checkpoint()


@on_bench
async def test_a_use_keeps_its_task_apart_from_later_ones_and_does_not_outlast_it(gates: Gates) -> None:
    """The task has ended before its use: a task that is kept shares its id with no other one."""
    tasks: list[weakref.ref[Any]] = []

    async def opens(engines: Engines, stack: AsyncExitStack) -> None:
        tasks.append(weakref.ref(current_task()))
        await stack.enter_async_context(engines.use("a"))

    async def ended(engines: Engines, stack: AsyncExitStack) -> None:
        async with gates.host.group() as group:
            group.start(opens, engines, stack)

    async with gates.engines("a") as engines:
        async with AsyncExitStack() as stack:
            await ended(engines, stack)
            gc.collect()
            assert tasks[0]() is not None
        gc.collect()
        assert tasks[0]() is None


# -- failures --------------------------------------------------------------------------------------------------------


@on_bench
async def test_an_engine_that_fails_fails_its_users_and_neither_the_body_nor_the_others(
    gates: Gates, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine cancels, on asyncio, the task that entered it, which is its keeper."""
    crashes = [SystemExit("dead")]
    gates.faults["a"] = lambda job, _: crashes.pop() if job is Job.STEP and crashes else None

    async with gates.engines("a", "b", settings={"verify": False}) as engines:
        await engines.load("b")
        with pytest.raises(EngineError):
            await use(engines, "a")
        await use(engines, "b")
        await use(engines, "a")
        assert "RunnerCrashed" in str(engines.statistics()["a"].last_error)
        assert engines.statistics()["b"].last_error is None
    assert any(
        record.getMessage().startswith("a: failed while it was open: RunnerCrashed: ") for record in caplog.records
    )
    assert gates.loads == "baa"


# -- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loading", [False, True], ids=["in a use", "while it waits for a load"])
@on_bench
async def test_a_body_that_is_cancelled_ends_all_engines(gates: Gates, loading: bool) -> None:
    held = gates.hold("b", Job.OPEN)
    handles: list[Handle] = []
    ready = gates.host.signal()

    async def body() -> None:
        async with gates.engines("a", "b") as engines:
            await engines.load("a")
            if loading:
                await use(engines, "b")
            async with engines.use("a"):
                ready.set()
                await gates.host.signal().wait()

    async with gates.host.group() as group:
        handles.append(group.start(body))
        await (held.reached if loading else ready).wait()
        handles[0].cancel()
        if loading:
            gates.end_hold("b", held)
    assert handles[0].cancelled


@on_bench
async def test_a_use_that_is_cancelled_while_its_model_loads_gives_the_load_up(gates: Gates) -> None:
    held = gates.hold("a", Job.OPEN)
    async with gates.engines("a", "b", memory_budget=ONE) as engines:
        async with gates.host.group() as group:
            handle = group.start(use, engines, "a")
            await held.reached.wait()
            handle.cancel()
            await handle.ended()
            assert handle.cancelled
        gates.end_hold("a", held)
        await use(engines, "b")
        assert state(engines, "a") == "absent"
    assert gates.loads == "ab"


@on_bench
async def test_aclose_without_a_drain_begins_none(gates: Gates, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of asyncio has a thread of its own, which its keeper's cancellation may reach late, or here never."""
    monkeypatch.setattr(Resident, "hurry", lambda _: None)

    held = gates.hold("a", Job.STEP)

    async def client(engines: Engines) -> None:
        with pytest.raises(EngineClosed):
            await use(engines, "a")

    async with gates.host.group() as group:
        async with gates.engines("a", settings={"drain_seconds": math.inf}) as engines:
            group.start(client, engines)
            await held.reached.wait()
            await engines.aclose(drain=0)


@on_bench
async def test_a_loop_of_another_thread_is_told_where_engines_belong(gates: Gates) -> None:
    async with gates.engines("a") as engines:

        async def elsewhere() -> None:
            with pytest.raises(EngineStateError, match="outside of the event loop"):
                engines.statistics()

        def without_a_loop() -> None:
            with pytest.raises(EngineStateError, match="no event loop"):
                engines.statistics()
            gates.host.run(elsewhere)

        thread = threading.Thread(target=without_a_loop)
        thread.start()
        thread.join()


# -- only on asyncio -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loading", [False, True])
def test_a_program_that_ends_while_the_block_is_open_closes_all_engines(loading: bool) -> None:
    """`asyncio.run` cancels every task that is left, keepers too, and waits for them."""
    gates = Gates(next(host for host in HOSTS if host.name == "asyncio"))
    tasks: list[asyncio.Task[None]] = []

    async def body(engines: Engines, entered: Callable[[], object]) -> None:
        async with engines:
            await engines.load("a")
            entered()
            await engines.load("b")
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        entered, held = asyncio.Event(), gates.hold("b", Job.OPEN) if loading else None
        engines = gates.engines("a", "b")
        tasks.append(asyncio.create_task(body(engines, entered.set)))
        await entered.wait()
        if held is not None:
            await held.reached.wait()
            loop = asyncio.get_running_loop()
            loop.call_soon(loop.call_soon, lambda: gates.end_hold("b", held))  # in the turn that cancels the tasks

    before = _threads()
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert _threads() == before
    assert not any(device.is_open for _, device in gates.devices)


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="^C is not heard here")
def test_a_control_c_ends_all_engines_and_comes_out() -> None:
    gates = Gates(next(host for host in HOSTS if host.name == "asyncio"))

    async def main() -> None:
        async with gates.engines("a", "b") as engines:
            await engines.load("b")
            async with engines.use("a"):
                signal.raise_signal(signal.SIGINT)
                await asyncio.get_running_loop().create_future()

    before = _threads()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert _threads() == before
    assert not any(device.is_open for _, device in gates.devices)
