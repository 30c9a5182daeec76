"""How an engine's block ends, on four hosts: well, by an error, by cancellation, by a crash; and what becomes of tasks
outside of it. See test_hosts.py for what is checked after each test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from triolet import CheckpointError, Engine, EngineClosed, EngineError, EngineTeardownError, RunnerCrashed
from triolet.actors.worker import Job
from triolet.core import events

from .hosts import Bench, Handle, ask, expected, query, release_is_stuck

pytestmark = pytest.mark.real_time

# -- ends of the block -----------------------------------------------------------------------------------------------


def test_an_exception_in_the_body_leaves_unchanged(bench: Bench) -> None:
    async def main() -> None:
        error = KeyError("mine")
        with pytest.raises(KeyError) as caught:
            async with bench.engine() as engine:
                await ask(engine, 1)
                raise error
        assert caught.value is error
        assert not hasattr(error, "__notes__")
        assert error.__cause__ is None

    bench.run(main)


def test_an_exception_in_the_body_does_not_wait_for_a_drain(bench: Bench) -> None:
    async def main() -> None:
        held = bench.hold()

        async def outsider(engine: Engine) -> None:
            with pytest.raises(EngineClosed):
                await ask(engine, 1)

        async with bench.host.group() as group:
            with pytest.raises(KeyError):
                async with bench.engine(drain_seconds=1e6) as engine:
                    group.start(outsider, engine)
                    await held.reached.wait()
                    raise KeyError("mine")

    bench.run(main)
    assert bench.outcomes() == ["aborted"]


def test_an_error_of_the_release_is_in_the_notes_of_the_bodys_own(bench: Bench) -> None:
    async def main() -> None:
        with pytest.raises(KeyError) as caught:
            async with bench.engine():
                raise KeyError("mine")
        assert "stuck" in caught.value.__notes__[0]

    release_is_stuck(bench)
    bench.run(main)


@pytest.mark.parametrize("cancelled", [False, True])
def test_an_error_of_the_release_leaves_a_body_that_ends_well_or_is_cancelled(bench: Bench, cancelled: bool) -> None:
    async def main() -> None:
        async def body() -> None:
            with pytest.raises(EngineTeardownError, match="stuck"):
                async with bench.engine() as engine:
                    if cancelled:
                        await ask(engine, 1)
            ends.append("stuck")

        ends: list[str] = []
        held = bench.hold()
        async with bench.host.group() as group:
            handle = group.start(body)
            if cancelled:
                await held.reached.wait()
                handle.cancel()
            await handle.ended()
        assert ends == ["stuck"]

    release_is_stuck(bench)
    bench.run(main)


def test_the_block_in_a_timeout_ends_in_order(bench: Bench) -> None:
    async def main() -> None:
        async def body() -> None:
            async with bench.engine() as engine:
                await ask(engine, 1)

        bench.hold()
        assert not await bench.host.within(0.05, body)

    bench.run(main)


def test_cancelling_again_and_again_does_not_leave_before_the_device_is_released(bench: Bench) -> None:
    async def main() -> None:
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

    async def never() -> None:
        await bench.host.signal().wait()

    bench.run(main)


def test_cancelling_while_it_drains_ends_the_drain_and_not_the_order(bench: Bench) -> None:
    async def main() -> None:
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

    bench.run(main)
    assert bench.outcomes() == ["aborted"]


def test_cancelling_the_start_closes_what_was_opened(bench: Bench) -> None:
    async def main() -> None:
        loading = bench.hold(Job.OPEN, until_teardown=False)

        async def body() -> None:
            async with bench.engine():
                raise AssertionError("entered")

        async with bench.host.group() as group:
            handle = group.start(body)
            await loading.reached.wait()
            handle.cancel()
            bench.worker.end_hold(loading)
            await handle.ended()
            assert handle.cancelled

    bench.run(main)
    assert bench.executor.calls == [Job.OPEN, Job.CLOSE]


def test_a_start_whose_load_hangs_can_be_cancelled(bench: Bench) -> None:
    """The load is left behind, as a thread cannot be stopped."""

    async def main() -> None:
        loading = bench.hold(Job.OPEN, until_teardown=False)

        async def body() -> None:
            async with bench.engine(stage_seconds=0.01):
                raise AssertionError("entered")

        async with bench.host.group() as group:
            handle = group.start(body)
            await loading.reached.wait()
            handle.cancel()
            await handle.ended()
            assert handle.cancelled

    bench.run(main)
    assert events.StageReached("device call abandoned") in bench.trace


def test_entering_while_cancelled_loads_nothing(bench: Bench) -> None:
    async def main() -> None:
        async def body() -> None:
            handles[0].cancel()
            async with bench.engine():
                raise AssertionError("entered")

        handles: list[Handle] = []
        async with bench.host.group() as group:
            handles.append(group.start(body))
        assert handles[0].cancelled

    bench.run(main)
    assert not bench.executor.calls


def test_a_model_that_does_not_load_raises_its_own_error(bench: Bench) -> None:
    error = CheckpointError("no weights")
    bench.executor.fault = lambda job, _: error if job is Job.OPEN else None

    async def main() -> None:
        with pytest.raises(CheckpointError) as caught:
            async with bench.engine():
                raise AssertionError("entered")
        assert caught.value is error

    bench.run(main)


# -- a crash of the engine -------------------------------------------------------------------------------------------


async def outsider(engine: Engine) -> None:
    with pytest.raises(EngineError):
        await ask(engine, 1)


def crash(job: Job, _: object) -> BaseException | None:
    return SystemExit("dead") if job is Job.STEP else None


def test_a_crash_cancels_the_body_and_leaves_the_block(bench: Bench) -> None:
    """What was cancelled goes on afterwards: the cancellation is taken back."""
    bench.executor.fault = crash

    async def main() -> None:
        async with bench.host.group() as group:
            with pytest.raises(RunnerCrashed, match="dead"):
                async with bench.engine() as engine:
                    client = group.start(outsider, engine)
                    await bench.host.signal().wait()
                    raise AssertionError("the body goes on")
            await client.ended()
        assert not await bench.host.within(0.001, bench.host.signal().wait)

    bench.run(main)


def test_a_crash_reaches_a_body_that_waits_for_its_request(bench: Bench) -> None:
    bench.executor.fault = crash

    async def main() -> None:
        with pytest.raises(RunnerCrashed, match="dead"):
            async with bench.engine() as engine:
                await ask(engine, 1)
                raise AssertionError("the body goes on")

    bench.run(main)


def test_a_crash_is_in_the_notes_of_what_the_body_makes_of_it(bench: Bench) -> None:
    bench.executor.fault = crash

    async def main() -> None:
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

    bench.run(main)


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


def test_requests_of_outside_tasks_are_drained_when_the_block_ends(bench: Bench) -> None:
    outside(bench, lambda engine: ask(engine, 1))
    assert bench.outcomes() == ["finished"]


def test_what_is_not_drained_in_time_is_aborted_and_told_so(bench: Bench) -> None:
    async def client(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1)

    outside(bench, client, drain_seconds=0)
    assert bench.outcomes() == ["aborted"]


def test_who_waits_for_a_permit_when_the_block_ends_is_told_so(bench: Bench) -> None:
    async def main() -> None:
        held = bench.hold()

        async def refused(engine: Engine) -> None:
            with pytest.raises(EngineClosed):
                await ask(engine, 2)

        async with bench.host.group() as group:
            async with bench.engine(max_pending=1) as engine:
                group.start(ask, engine, 1)
                await held.reached.wait()
                group.start(refused, engine)
                while not engine.inside.waiting:
                    await bench.host.within(0.001, bench.host.signal().wait)

    bench.run(main)
    assert bench.outcomes() == ["finished"]


def test_a_stream_that_was_drained_can_be_read_to_its_end_after_the_block(bench: Bench) -> None:
    async def main() -> None:
        held = bench.hold(after=2)
        go_on, found = bench.host.signal(), list[int]()

        async def client(engine: Engine) -> None:
            async with engine.stream(**query(1)) as deltas:
                found.extend((await anext(deltas)).token_ids)
                await go_on.wait()
                async for delta in deltas:
                    found.extend(delta.token_ids)

        async with bench.host.group() as group:
            async with bench.engine() as engine:
                group.start(client, engine)
                await held.reached.wait()
            go_on.set()
        assert tuple(found) == expected(1)

    bench.run(main)


def test_a_stream_that_was_cut_off_says_so_where_it_ends(bench: Bench) -> None:
    async def main() -> None:
        held = bench.hold(after=2)
        go_on, found = bench.host.signal(), list[int]()

        async def client(engine: Engine) -> None:
            with pytest.raises(EngineClosed):
                async with engine.stream(**query(1)) as deltas:
                    await go_on.wait()
                    async for delta in deltas:
                        found.extend(delta.token_ids)

        async with bench.host.group() as group:
            async with bench.engine(drain_seconds=0) as engine:
                group.start(client, engine)
                await held.reached.wait()
            go_on.set()
        assert tuple(found) == expected(1)[: len(found)]
        assert len(found) >= 2

    bench.run(main)
