"""Ends of an engine's block on every host: a good one, an error, a cancellation, a crash; and what becomes of tasks
outside of the block. test_hosts.py says what is checked after each test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest

from triolet import (
    CheckpointError,
    Engine,
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    RunnerCrashed,
)
from triolet.actors.worker import Job
from triolet.core import events

from .hosts import (
    Bench,
    Handle,
    ask,
    crash,
    expected,
    on_bench,
    on_threads_too,
    query,
    release_is_stuck,
)

pytestmark = pytest.mark.real_time

# -- ends of the block -----------------------------------------------------------------------------------------------


async def refused(engine: Engine) -> None:
    with pytest.raises(EngineClosed):
        await ask(engine, 1)


@on_threads_too
@on_bench
async def test_an_exception_in_the_body_leaves_unchanged_and_waits_for_no_drain(bench: Bench) -> None:
    error = KeyError("mine")
    held = bench.hold()
    async with bench.host.group() as group:
        with pytest.raises(KeyError) as caught:
            async with bench.engine(drain_seconds=1e6) as engine:
                group.start(refused, engine)
                await held.reached.wait()
                raise error
    assert caught.value is error
    assert not hasattr(error, "__notes__")
    assert error.__cause__ is None
    assert bench.outcomes() == ["aborted"]


@on_threads_too
@pytest.mark.parametrize("error", [None, KeyError("mine")])
@on_bench
async def test_an_error_of_the_release_leaves_the_block_or_is_in_the_notes_of_the_bodys_own(
    bench: Bench, error: Exception | None
) -> None:
    release_is_stuck(bench)
    with pytest.raises(type(error) if error else EngineTeardownError) as caught:
        async with bench.engine():
            if error:
                raise error
    assert "stuck" in (caught.value.__notes__[0] if error else str(caught.value))


@on_bench
async def test_an_error_of_the_release_leaves_a_body_that_is_cancelled(bench: Bench) -> None:
    release_is_stuck(bench)

    async def body() -> None:
        with pytest.raises(EngineTeardownError, match="stuck"):
            async with bench.engine() as engine:
                await ask(engine, 1)
        ends.append("stuck")

    ends: list[str] = []
    held = bench.hold()
    async with bench.host.group() as group:
        handle = group.start(body)
        await held.reached.wait()
        handle.cancel()
        await handle.ended()
    assert ends == ["stuck"]


@on_bench
async def test_cancelling_again_and_again_does_not_leave_before_the_device_is_released(bench: Bench) -> None:
    async def never() -> None:
        await bench.host.signal().wait()

    held = bench.hold()
    closing = bench.hold(Job.CLOSE, until_teardown=False)

    async def body() -> None:
        async with bench.engine() as engine:
            await ask(engine, 1)

    async with bench.host.group() as group:
        handle = group.start(body)
        await held.reached.wait()
        handle.cancel()
        await closing.reached.wait()
        for _ in range(5):
            handle.cancel()
            await bench.host.within(0.001, never)
        assert bench.executor.is_open
        bench.worker.end_hold(closing)
        await handle.ended()
        assert not bench.executor.is_open
        assert handle.cancelled


@on_bench
async def test_cancelling_while_it_drains_ends_the_drain_and_not_the_order(bench: Bench) -> None:
    held = bench.hold(until_teardown=False)
    entered, leave = bench.host.signal(), bench.host.signal()
    closing, hurried = bench.stage("intake closed"), bench.stage("drain deadline")
    engines: list[Engine] = []

    async def body() -> None:
        async with bench.engine(drain_seconds=1e6) as engine:
            engines.append(engine)
            entered.set()
            await leave.wait()

    async def outsider() -> None:
        with pytest.raises(EngineClosed):
            await ask(engines[0], 1)

    async with bench.host.group() as group:
        handle = group.start(body)
        await entered.wait()
        client = group.start(outsider)
        await held.reached.wait()
        leave.set()
        await closing.wait()
        handle.cancel()
        await hurried.wait()
        bench.worker.end_hold(held)
        await handle.ended()
        assert handle.cancelled
        await client.ended()
    assert bench.outcomes() == ["aborted"]


@pytest.mark.parametrize("hangs", [False, True])
@on_bench
async def test_a_start_that_is_cancelled_closes_what_was_opened_or_leaves_a_load_that_hangs(
    bench: Bench, hangs: bool
) -> None:
    """A thread cannot be stopped."""
    settings = {"stage_seconds": 0.01} if hangs else {}

    loading = bench.hold(Job.OPEN, until_teardown=False)

    async def body() -> None:
        async with bench.engine(**settings):
            raise AssertionError("entered")

    async with bench.host.group() as group:
        handle = group.start(body)
        await loading.reached.wait()
        handle.cancel()
        if not hangs:
            bench.worker.end_hold(loading)
        await handle.ended()
        assert handle.cancelled
    if hangs:
        assert events.StageReached("device call abandoned") in bench.trace
    else:
        assert bench.executor.calls == [Job.OPEN, Job.CLOSE]


@on_bench
async def test_entering_while_cancelled_loads_nothing(bench: Bench) -> None:
    async def body() -> None:
        handles[0].cancel()
        async with bench.engine():
            raise AssertionError("entered")

    handles: list[Handle] = []
    async with bench.host.group() as group:
        handles.append(group.start(body))
    assert handles[0].cancelled
    assert not bench.executor.calls


@on_threads_too
@on_bench
async def test_a_model_that_does_not_load_raises_its_own_error(bench: Bench) -> None:
    error = CheckpointError("no weights")
    bench.executor.fault = lambda job, _: error if job is Job.OPEN else None

    engine = bench.engine()
    with pytest.raises(CheckpointError) as caught:
        async with engine:
            raise AssertionError("entered")
    assert caught.value is error
    with pytest.raises(EngineStateError, match=r"closed: it failed \(CheckpointError: no weights\)"):
        await ask(engine, 1)


# -- a crash of the engine -------------------------------------------------------------------------------------------


async def outsider(engine: Engine, is_first: bool = True) -> None:
    """Asks an engine that crashes. If it is not the first to ask, the engine may have crashed, or stop already."""
    errors, told = (EngineError, "dead") if is_first else ((EngineError, EngineStateError), "dead|is stopping")
    with pytest.raises(errors, match=told):
        await ask(engine, 1)


@pytest.mark.parametrize("asking", [False, True])
@on_bench
async def test_a_crash_cancels_the_body_and_leaves_the_block(bench: Bench, asking: bool) -> None:
    """The task that was cancelled goes on afterwards: the cancellation is taken back."""
    bench.executor.fault = crash

    async with bench.host.group() as group:
        with pytest.raises(RunnerCrashed, match="dead"):
            async with bench.engine() as engine:
                client = group.start(outsider, engine, not asking)
                await (ask(engine, 2) if asking else bench.host.signal().wait())
                raise AssertionError("the body goes on")
        await client.ended()
    assert not await bench.host.within(0.001, bench.host.signal().wait)


@on_bench
async def test_a_crash_is_in_the_notes_of_what_the_body_makes_of_it(bench: Bench) -> None:
    bench.executor.fault = crash

    async with bench.host.group() as group:
        with pytest.raises(KeyError) as caught:
            async with bench.engine() as engine:
                group.start(outsider, engine)
                try:
                    await bench.host.signal().wait()
                finally:
                    raise KeyError("mine")
    assert ["RunnerCrashed" in note and "dead" in note for note in caught.value.__notes__] == [True]
    assert not await bench.host.within(0.001, bench.host.signal().wait)


# -- tasks outside of the block --------------------------------------------------------------------------------------


def outside(bench: Bench, client: Callable[[Engine], Awaitable[None]], held_after: int = 0, **settings: Any) -> None:
    """Runs ``client`` in a task outside of the block, which ends while a step of its request is held."""

    async def main() -> None:
        held = bench.hold(after=held_after)
        async with bench.host.group() as group:
            async with bench.engine(**settings) as engine:
                task = group.start(client, engine)
                await held.reached.wait()
            await task.ended()

    bench.run(main)


@on_threads_too
def test_requests_of_outside_tasks_are_drained_when_the_block_ends(bench: Bench) -> None:
    outside(bench, lambda engine: ask(engine, 1))
    assert bench.outcomes() == ["finished"]


@on_threads_too
def test_what_is_not_drained_in_time_is_aborted_and_told_so(bench: Bench) -> None:
    outside(bench, refused, drain_seconds=0)
    assert bench.outcomes() == ["aborted"]


@on_bench
async def test_who_waits_for_a_permit_when_the_block_ends_is_told_so(bench: Bench) -> None:
    held = bench.hold()

    async with bench.host.group() as group:
        async with bench.engine(max_pending=1) as engine:
            group.start(ask, engine, 1)
            await held.reached.wait()
            group.start(refused, engine)
            while not engine.inside.waiting:
                await bench.host.within(0.001, bench.host.signal().wait)
    assert bench.outcomes() == ["finished"]


@on_threads_too
@pytest.mark.parametrize("drain", [1e6, 0])
@on_bench
async def test_a_stream_can_be_read_after_the_block_to_its_end_or_to_where_it_was_cut_off(
    bench: Bench, drain: float
) -> None:
    held = bench.hold(after=2)
    go_on, found = bench.host.signal(), list[int]()

    async def client(engine: Engine) -> None:
        with nullcontext() if drain else pytest.raises(EngineClosed):
            async with engine.stream(**query(1)) as deltas:
                await go_on.wait()
                async for delta in deltas:
                    found.extend(delta.token_ids)

    async with bench.host.group() as group:
        async with bench.engine(drain_seconds=drain) as engine:
            group.start(client, engine)
            await held.reached.wait()
        go_on.set()
    assert tuple(found) == expected(1)[: None if drain else len(found)]
    assert len(found) >= 2
