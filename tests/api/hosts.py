"""Three event loops and plain threads with one face, so that a test's body is written once; and a device that waits to
be told.

Nothing here depends on time: a test that wants something to happen in the middle of a request holds a call of the
device, waits until it is held, and lets it go.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial, wraps
from typing import Any

import anyio
import numpy as np
import pytest
import trio
from attrs import define, evolve, field, frozen

from triolet import Engine, EngineConfig, SamplingParams, SyncEngine
from triolet.actors.switch_interval import SwitchInterval
from triolet.actors.worker import Call, Deliver, Job, run_call
from triolet.api.inputs.audio import Samples, content_key
from triolet.core import events
from triolet.core.model import ModelDescription
from triolet.models.speech.whisper_speech import special_tokens, with_whisper
from triolet_testing.sim import SimExecutor, SimInterpreter
from triolet_testing.sim_model import EOS, SimModel, expected_tokens

PATIENCE = 300.0
"""Seconds after which a test that hangs fails; nothing is expected to take long."""

UNHURRIED = {"stage_seconds": 86_400.0, "drain_seconds": 86_400.0}
"""Settings of an engine whose stages are not cut off where the machine stops a thread for a while."""

Main = Callable[[], Awaitable[Any]]


def audio(number: int) -> Samples:
    return np.full(1600, number / 100, np.float32)


def query(number: int, max_tokens: int = 20) -> dict[str, Any]:
    """Arguments of `Engine.generate` and `Engine.stream`."""
    sampling = SamplingParams(max_tokens=max_tokens)
    return {"prompt_token_ids": [1, 2 + number], "audio": audio(number), "sampling": sampling}


def expected(number: int, max_tokens: int = 20) -> tuple[int, ...]:
    tokens = expected_tokens([1, 2 + number], content_key(audio(number), "sim"), max_tokens)
    return tokens[:-1] if tokens[-1] == EOS else tokens


async def ask(engine: Engine, number: int, max_tokens: int = 20, **more: Any) -> None:
    """One request, whose tokens must be those it would have had alone."""
    completion = await engine.generate(**query(number, max_tokens), **more)
    assert completion.token_ids == expected(number, max_tokens)


async def cancel_one_of_two(bench: Bench, ask: Callable[..., Any]) -> None:
    """The first of two calls of ``ask(engine, number)`` is cancelled in its first step, and the other one ends."""
    hold = bench.hold(Job.STEP)
    async with bench.engine() as engine, bench.host.group() as group:
        handle = group.start(ask, engine, 1)
        await hold.reached.wait()
        other = group.start(ask, engine, 2)
        handle.cancel()
        await handle.ended()
        bench.worker.end_hold(hold)
        await other.ended()
    assert handle.cancelled


async def read(engine: Engine, number: int, into: list[int]) -> None:
    async with engine.stream(**query(number)) as deltas:
        async for delta in deltas:
            into += delta.token_ids


# -- hosts -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class Signal:
    """An event that any thread may set. ``event`` belongs to the loop that ``call`` reaches from any thread."""

    call: Callable[[Callable[[], object]], object]
    event: trio.Event | asyncio.Event

    def set(self) -> None:
        self.call(self.event.set)

    async def wait(self) -> None:
        await self.event.wait()


@define(eq=False)
class _ScopedHandle:
    """A task in a cancel scope of its own."""

    scope: anyio.CancelScope = field(factory=anyio.CancelScope)
    event: anyio.Event = field(factory=anyio.Event)
    cancelled: bool = False

    def cancel(self) -> None:
        self.scope.cancel()

    async def ended(self) -> None:
        await self.event.wait()

    async def run(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        try:
            with self.scope:
                await function(*arguments)
            self.cancelled = self.scope.cancelled_caught
        finally:
            self.event.set()


@define(eq=False)
class _ScopedGroup:
    tasks: Any

    def start(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Handle:
        handle = _ScopedHandle()
        self.tasks.start_soon(handle.run, function, *arguments)
        return handle


@define(eq=False)
class _TaskHandle:
    task: asyncio.Task[Any]

    @property
    def cancelled(self) -> bool:
        return self.task.cancelled()

    def cancel(self) -> None:
        self.task.cancel()

    async def ended(self) -> None:
        await asyncio.wait([self.task])


@define(eq=False)
class _TaskGroup:
    group: asyncio.TaskGroup

    def start(self, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Handle:
        return _TaskHandle(self.group.create_task(function(*arguments)))


Handle = _ScopedHandle | _TaskHandle
Group = _ScopedGroup | _TaskGroup


class TrioHost:
    """trio's loop, run by anyio and with anyio's scopes, which are trio's own there."""

    name = "trio"

    def run(self, main: Main) -> Any:
        """Runs ``main`` in a loop of its own; afterwards no task is left."""
        return anyio.run(_anyio_guarded, main, backend="trio")

    def signal(self) -> Signal:
        return Signal(trio.lowlevel.current_trio_token().run_sync_soon, trio.Event())

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Group]:
        """Tasks that have ended when the block is left. An error of one cancels the others."""
        async with anyio.create_task_group() as tasks:
            yield _ScopedGroup(tasks)

    async def within(self, seconds: float, function: Main) -> bool:
        """Returns whether ``function`` ended in time, under the host's timeout."""
        with anyio.move_on_after(seconds) as scope:
            await function()
        return not scope.cancelled_caught


class AnyioOnAsyncioHost(TrioHost):
    name = "anyio/asyncio"

    def run(self, main: Main) -> Any:
        async def counted() -> Any:
            result = await main()
            _no_task_is_left()
            return result

        return anyio.run(_anyio_guarded, counted, backend="asyncio")

    def signal(self) -> Signal:
        return Signal(asyncio.get_running_loop().call_soon_threadsafe, asyncio.Event())


class AsyncioHost(AnyioOnAsyncioHost):
    """asyncio with its own groups and timeouts, which cancel once."""

    name = "asyncio"

    def run(self, main: Main) -> Any:
        async def guarded() -> Any:
            async with asyncio.timeout(PATIENCE):
                result = await main()
            _no_task_is_left()
            return result

        return asyncio.run(guarded())

    @asynccontextmanager
    async def group(self) -> AsyncIterator[Group]:
        async with asyncio.TaskGroup() as group:
            yield _TaskGroup(group)

    async def within(self, seconds: float, function: Main) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await function()
        except TimeoutError:
            return False
        return True


async def _anyio_guarded(main: Main) -> Any:
    with anyio.fail_after(PATIENCE):
        return await main()


def _no_task_is_left() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks are left: {left}"
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling(), "a cancellation was not taken back"


class ThreadsHost(TrioHost):
    """Threads without an event loop, whose calls of a `SyncEngine` the tasks of the test wait for."""

    name = "threads"


async def in_thread(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    return await trio.to_thread.run_sync(partial(function, *arguments, **more))


@define(eq=False)
class SyncStreamInThreads:
    block: AbstractContextManager[Any]
    parts: Any = None

    async def __aenter__(self) -> SyncStreamInThreads:
        self.parts = await in_thread(self.block.__enter__)
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await in_thread(self.block.__exit__, *raised)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parts, name)

    def __aiter__(self) -> SyncStreamInThreads:
        return self

    async def __anext__(self) -> Any:
        part = await in_thread(next, self.parts, None)
        if part is None:
            raise StopAsyncIteration
        return part


@define(eq=False)
class SyncEngineInThreads:
    """Has the methods of `Engine`, each of which a thread of its own calls."""

    engine: SyncEngine

    async def __aenter__(self) -> SyncEngineInThreads:
        await in_thread(self.engine.__enter__)
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        return await in_thread(self.engine.__exit__, *raised)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.engine, name)
        if name in {"inside", "model", "statistics"}:
            return found
        if name.startswith("stream"):
            return lambda *arguments, **more: SyncStreamInThreads(found(*arguments, **more))
        return partial(in_thread, found)


Host = TrioHost
HOSTS: tuple[Host, ...] = (TrioHost(), AsyncioHost(), AnyioOnAsyncioHost())


def on_bench(test: Callable[..., Any]) -> Callable[..., None]:
    """The bench, a test's first argument, runs its body, and then checks that everything came back."""
    first = next(iter(inspect.signature(test).parameters))

    @wraps(test)
    def run(**fixtures: Any) -> None:
        fixtures[first].run(partial(test, **fixtures))

    return run


on_threads_too = pytest.mark.parametrize("bench", [*HOSTS, ThreadsHost()], indirect=True, ids=lambda host: host.name)
"""Marks tests that cancel nothing: threads cannot be cancelled."""


# -- the device ------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class SpeakingModel(SimModel):
    """Most of its tokens are text, so that transcripts have words."""

    def describe(self) -> ModelDescription:
        described = SimModel.describe(self)
        return evolve(described, **with_whisper(described, evolve(special_tokens(described), start_id=60)))


@define(eq=False)
class Hold:
    """Calls of ``job`` wait, but for the first ``after``; ``reached`` is set when one does. `GatedWorker.end_hold` lets
    them go, and so does the beginning of the teardown, if it may."""

    job: Job
    reached: Signal
    after: int
    until_teardown: bool
    gate: trio.Event = field(factory=trio.Event)


@define(eq=False)
class GatedWorker:
    """Implements `triolet.actors.worker.Worker`: takes no time, but for the calls that are held."""

    holds: list[Hold] = field(factory=list)
    switch_interval: SwitchInterval = field(factory=lambda: SimInterpreter().owner(), init=False)
    _calls: trio.MemorySendChannel[tuple[Any, ...]] = field(init=False)
    _token: trio.lowlevel.TrioToken = field(init=False)
    _scope: trio.CancelScope = field(factory=lambda: trio.CancelScope(shield=True), init=False)

    def start(self, nursery: trio.Nursery, deliver: Deliver) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._calls, calls = trio.open_memory_channel[tuple[Any, ...]](2**31)
        nursery.start_soon(self._serve, calls, deliver, name="gated worker")

    def submit(self, job: Job, call: Call, *args: Any) -> None:
        self._calls.send_nowait((job, call, *args))

    def stop(self) -> None:
        self._calls.close()

    def abandon(self, last: Call) -> None:
        self._scope.cancel()

    def end_hold(self, hold: Hold) -> None:
        """Lets the calls of ``hold`` go on; any thread may call it."""
        self._token.run_sync_soon(hold.gate.set)

    def crash_loop(self) -> None:
        """Has trio call a function that raises, which ends its loop."""
        self._token.run_sync_soon(lambda: 1 // 0)

    def teardown_begins(self) -> None:
        """In the engine's loop."""
        for hold in self.holds:
            if hold.until_teardown:
                hold.gate.set()

    async def _serve(self, calls: trio.MemoryReceiveChannel[tuple[Any, ...]], deliver: Deliver) -> None:
        with self._scope, calls:
            async for submitted in calls:
                await trio.lowlevel.checkpoint()
                for hold in self.holds:
                    if hold.job is submitted[0]:
                        await self._wait(hold)
                deliver(run_call(*submitted))
                del submitted

    async def _wait(self, hold: Hold) -> None:
        if hold.after > 0:
            hold.after -= 1
        elif not hold.gate.is_set():
            hold.reached.set()
            await hold.gate.wait()


@define(eq=False)
class Bench:
    """One engine on one host over a gated device, and the checks that everything came back."""

    host: Host
    executor: SimExecutor = field(factory=SimExecutor)
    worker: GatedWorker = field(factory=GatedWorker)
    trace: list[events.Event] = field(factory=list)
    made: Engine | None = None
    stages: dict[str, Signal] = field(factory=dict)

    def engine(self, **settings: Any) -> Any:
        if self.host.name == "threads":
            return SyncEngineInThreads(self.make(SyncEngine, settings))
        self.made = self.make(Engine, settings)
        return self.made

    def make(self, kind: Any, settings: dict[str, Any]) -> Any:
        config = EngineConfig(**{**UNHURRIED, "verify": True, "observer": self._observe, **settings})
        return kind.from_parts(lambda: self.executor, lambda: self.worker, config=config)

    def _observe(self, event: events.Event) -> None:
        self.trace.append(event)
        if isinstance(event, events.StageReached) and event.stage in self.stages:
            self.stages[event.stage].set()
        if event == events.StageReached("intake closed"):
            self.worker.teardown_begins()

    def hold(self, job: Job = Job.STEP, *, after: int = 0, until_teardown: bool = True) -> Hold:
        """Call it in the host's loop, before the engine is entered."""
        hold = Hold(job, self.host.signal(), after, until_teardown)
        self.worker.holds.append(hold)
        return hold

    def stage(self, name: str) -> Signal:
        """Set when the engine gets there. Call it in the host's loop, before that."""
        return self.stages.setdefault(name, self.host.signal())

    def run(self, main: Main) -> Any:
        before = _threads()
        result = self.host.run(main)
        assert _threads() == before, "a thread of ours is left"
        self.check()
        return result

    def check(self) -> None:
        """Everything came back, and everybody heard an end."""
        assert not self.executor.is_open, "the device was not released"
        assert not self.executor.outputs
        assert not self.executor.misuses
        assert self.made is None or not self.made.inside.pending, "permits of the queue did not come back"
        accepted = [event.request_id for event in self.trace if isinstance(event, events.RequestQueued)]
        ends = [event.request_id for event in self.trace if isinstance(event, events.RequestEnded)]
        assert sorted(ends) == sorted(accepted)

    def outcomes(self) -> list[str]:
        """Returns the ends of requests, in order."""
        return [event.outcome for event in self.trace if isinstance(event, events.RequestEnded)]


def crash(job: Job, _: object) -> BaseException | None:
    """A fault that ends the runner at its first step."""
    return SystemExit("dead") if job is Job.STEP else None


def release_is_stuck(bench: Bench) -> None:
    """The device is given back all the same, as a real one is, and says that something is wrong."""

    def fault(job: Job, _: object) -> Exception | None:
        if job is not Job.CLOSE:
            return None
        bench.executor.is_open = False
        bench.executor.outputs.clear()
        return RuntimeError("stuck")

    bench.executor.fault = fault


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name in {"triolet-loop", "triolet-runner"}}
