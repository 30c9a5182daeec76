"""Things that only asyncio can do to an engine: loops that end under it, ^C, edge-triggered cancellation.

What holds on every host is in test_hosts.py and test_hosts_ends.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from unittest.mock import AsyncMock

import anyio
import pytest
import trio

from triolet import Engine, EngineClosed, EngineStateError, RunnerCrashed, Segment, Transcript
from triolet.actors.worker import Job
from triolet.api.hosts.asyncio_host import TaskPortal
from triolet.api.hosts.portal_stream import PortalLive, PortalSegments
from triolet.api.outputs.results import Progress

from .hosts import (
    HOSTS,
    PATIENCE,
    AsyncioHost,
    Bench,
    Host,
    audio,
    crash,
    expected,
    on_bench,
    query,
)
from .speech import segment
from .threads import END, loops, run_program

pytestmark = pytest.mark.real_time


@pytest.fixture
def bench() -> Bench:
    return Bench(AsyncioHost())


async def hold_open(engine: Engine, entered: Callable[[], object]) -> None:
    async with engine:
        entered()
        await asyncio.get_running_loop().create_future()


# -- loops that end --------------------------------------------------------------------------------------------------


def test_a_program_that_ends_while_the_engines_task_still_runs_closes_it_in_order(bench: Bench) -> None:
    """`asyncio.run` cancels what is left, and waits for it."""

    async def main() -> None:
        entered = asyncio.Event()
        tasks.append(asyncio.create_task(hold_open(bench.engine(), entered.set)))
        await entered.wait()

    tasks: list[asyncio.Task[None]] = []
    asyncio.run(main())
    assert tasks[0].cancelled()
    assert not loops()
    bench.check()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_loop_that_is_closed_under_the_engine_takes_it_along(bench: Bench, busy: bool) -> None:
    """Busy: the engine hears of it where it wants to answer. Idle: when its block is thrown away unfinished."""
    loop = asyncio.new_event_loop()

    async def body(engine: Engine, entered: Callable[[], object]) -> None:
        async with engine:
            entered()
            await engine.generate(**query(1))

    async def main() -> None:
        held = bench.hold(until_teardown=False)
        entered = asyncio.Event()
        coroutine = (body if busy else hold_open)(bench.engine(), entered.set)
        tasks.append(loop.create_task(coroutine))
        await (held.reached if busy else entered).wait()
        holds.append(held)

    holds: list[Any] = []
    tasks: list[asyncio.Task[None]] = []
    loop.run_until_complete(main())
    loop.close()
    (thread,) = loops()
    bench.worker.end_hold(holds[0])
    if not busy:
        tasks.clear()
        gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    bench.check()
    tasks.clear()
    gc.collect()


@on_bench
async def test_a_trio_loop_that_does_not_start_raises_its_own_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError("no more descriptors")

    def run(*_: object) -> None:
        raise error

    monkeypatch.setattr(trio, "run", run)

    with pytest.raises(OSError) as caught:
        async with bench.engine():
            raise AssertionError("entered")
    assert caught.value is error


# -- programs of their own -------------------------------------------------------------------------------------------


def test_a_second_interrupt_while_it_closes_does_not_leave_before_the_device_is_released() -> None:
    lines, status, errors = run_program(
        """
        def tell(event):
            if isinstance(event, StageReached):
                print(event.stage, flush=True)
                if event.stage == "intake closed":
                    signal.raise_signal(signal.SIGINT)

        async def main():
            async with make(Engine):
                signal.raise_signal(signal.SIGINT)
                await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    assert lines[-3:] == END
    assert status == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_interrupts_while_the_process_ends_do_not_leave_before_the_device_is_released() -> None:
    """Each is sent to the main thread, which waits in the interpreter's exit, and heard before the engine goes on."""
    lines, status, errors = run_program(
        """
        heard = threading.Event()

        def interrupt(*_):
            heard.set()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)

        def tell(event):
            if isinstance(event, StageReached) and threading.current_thread().name == "triolet-loop":
                print(event.stage, flush=True)
                if event.stage in ("intake closed", "encoder cache stopped", "device released"):
                    heard.clear()
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    heard.wait()

        engine = make(Engine)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(engine.__aenter__())
        """
    )
    assert (status, errors) == (0, "")
    assert lines[-3:] == END


@pytest.mark.parametrize("hanging", ["ask(engine)", "engine.aclose()"])
def test_a_process_ends_though_a_call_of_the_device_hangs(hanging: str) -> None:
    """It hangs before the exit, which waits for four stages and no longer, wherever the engine's thread is by then.
    Nothing says that the device was released."""
    lines, status, errors = run_program(
        f"""
        hung = threading.Event()

        def hang(job, _):
            if job in (Job.STEP, Job.CLOSE):
                hung.set()
                threading.Event().wait()

        engine = make(Engine, hang, stage_seconds=0.1)

        async def main():
            global hanging
            await engine.__aenter__()
            hanging = asyncio.ensure_future({hanging})
            await asyncio.to_thread(hung.wait)
            print("it hangs", flush=True)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        """
    )
    assert status == 0, errors
    assert lines[:2] == ["device taken", "accepting"]
    assert "it hangs" in lines
    assert "device released" not in lines


def test_a_process_ends_though_the_engines_loop_stands_still() -> None:
    """An observer that blocks, which it must not do, and does so before the exit: that waits its time and goes on."""
    told = run_program(
        """
        stands = threading.Event()

        def tell(event):
            if event == StageReached("accepting"):
                stands.set()
                threading.Event().wait()

        engine = make(Engine, stage_seconds=0.05)

        async def main():
            global opening
            opening = asyncio.ensure_future(engine.__aenter__())
            await asyncio.to_thread(stands.wait)
            print("it stands still", flush=True)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        """
    )
    assert told == (["it stands still"], 0, "")


# -- cancellation ----------------------------------------------------------------------------------------------------


def test_a_crash_does_not_hide_the_cancellation_of_others(bench: Bench) -> None:
    """Both while the body runs: as with `asyncio.timeout`, who cancelled hears of it; the crash is in the notes."""
    bench.executor.fault = crash

    async def body() -> None:
        closing = bench.stage("intake closed")
        async with bench.engine() as engine:
            try:
                await engine.generate(**query(1))
            except asyncio.CancelledError:  # the engine's
                await closing.wait()
                task.cancel()
                raise

    async def main() -> None:
        nonlocal task
        task = asyncio.create_task(body())
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert task.cancelling() == 1
        assert any("RunnerCrashed" in note for note in caught.value.__notes__)

    task: asyncio.Task[None]
    bench.run(main)


@on_bench
async def test_a_crash_in_a_cancelled_scope_of_anyio_is_a_cancellation_for_anyio(bench: Bench) -> None:
    """anyio knows its own cancellations; ours, left to it, would end the task."""
    bench.executor.fault = crash

    notes: list[str] = []
    with anyio.CancelScope() as scope:
        try:
            async with bench.engine() as engine:
                try:
                    await engine.generate(**query(1))
                finally:
                    scope.cancel()
        except asyncio.CancelledError as error:
            notes += error.__notes__
            raise
    assert scope.cancelled_caught
    assert "RunnerCrashed" in notes[0]
    await asyncio.sleep(0)


@on_bench
async def test_a_crash_is_told_where_the_body_swallows_its_cancellation(bench: Bench) -> None:
    bench.executor.fault = crash

    with pytest.raises(RunnerCrashed, match="dead"):
        async with bench.engine() as engine:
            with contextlib.suppress(asyncio.CancelledError):
                await engine.generate(**query(1))


@on_bench
async def test_a_cancelled_call_has_ended_when_the_cancellation_is_raised(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may be cancelled more than once: nothing of it goes on, and every cancellation is counted."""
    held = bench.hold()
    ended = False
    async with bench.engine() as engine:
        generate = engine.inside.generate

        async def watched(*arguments: Any, **more: Any) -> Any:
            nonlocal ended
            try:
                return await generate(*arguments, **more)
            finally:
                ended = True

        monkeypatch.setattr(engine.inside, "generate", watched)
        task = asyncio.create_task(engine.generate(**query(1)))
        await held.reached.wait()
        for _ in range(3):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelling() == 3
        assert ended
        bench.worker.end_hold(held)


@on_bench
async def test_an_item_that_was_taken_when_its_reader_was_cancelled_is_kept(bench: Bench) -> None:
    """The item is on its way when the task is cancelled, in the same turn of the loop."""
    held = bench.hold(after=1)
    found: list[int] = []
    async with bench.engine() as engine, engine.stream(**query(1)) as deltas:

        async def turn() -> None:
            found.extend((await anext(deltas)).token_ids)

        await turn()
        task = asyncio.create_task(turn())
        await asyncio.sleep(0)  # it waits for its turn
        await held.reached.wait()
        bench.worker.end_hold(held)
        while engine.statistics().requests.tokens_committed < 5:  # this loop stands still meanwhile
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(found) == 1
        async for delta in deltas:
            found += delta.token_ids
    assert tuple(found) == expected(1)


def test_a_wait_in_a_cancelled_scope_of_anyio_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """anyio cancels a task of a cancelled scope again in every turn of the loop, unless it is shielded."""
    counted = AsyncMock(wraps=asyncio.wait)
    monkeypatch.setattr(asyncio, "wait", counted)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await TaskPortal.outlast(lambda: loop.call_later(0.01, future.set_result, None), future)
        assert scope.cancelled_caught

    anyio.run(main, backend="asyncio")
    assert counted.await_count == 2


def bare_portal(failed: Callable[[], object], seconds: float = 0.0) -> TaskPortal:
    """A portal that holds nothing."""
    return TaskPortal(
        resource=contextlib.nullcontext(),
        refuse=lambda: EngineStateError("closed"),
        failed=failed,
        seconds=seconds,
    )


def test_what_is_left_of_a_stream_is_handed_over_after_the_turn_that_still_runs() -> None:
    """The windows of a transcription must be asked for one after another."""

    class Source:
        def __init__(self) -> None:
            self.items = iter(range(5))
            self.busy = False

        def __aiter__(self) -> Source:
            return self

        async def __anext__(self) -> int:
            assert not self.busy, "two turns at once"
            self.busy = True
            await portal.on_trio_ending.wait()
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            self.busy = False
            for item in self.items:
                return item
            raise StopAsyncIteration

    async def main() -> list[int]:
        nonlocal portal
        portal = bare_portal(lambda: None, PATIENCE)
        await portal.open()
        stream: Any = PortalLive(portal, lambda: contextlib.nullcontext(Source()))
        await stream.__aenter__()
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await portal.close(drain=True)
        return [await first, *[item async for item in stream]]

    portal: TaskPortal
    assert asyncio.run(main()) == [0, 1, 2, 3, 4]


def test_the_text_ahead_is_kept_when_the_engine_ends_before_the_stream() -> None:
    """However many segments are still read after the end."""

    class Source:
        """Two segments, then an error, and one more segment that is never given out."""

        def __init__(self) -> None:
            self.given = iter("ab")

        async def __anext__(self) -> Segment:
            await portal.on_trio_ending.wait()
            for text in self.given:
                return segment(text)
            raise EngineClosed("the engine has ended")

        def progress(self, whole: bool = False) -> Progress:
            so_far = Transcript(text="", language="en", language_probability=None, duration=9.0, segments=())
            return Progress(so_far=so_far, duration=9.0, position=2.0, ahead=(segment("c"),) if whole else ())

    async def main() -> set[str]:
        nonlocal portal
        portal = bare_portal(lambda: None, PATIENCE)
        await portal.open()
        segments = await PortalSegments(portal, lambda: contextlib.nullcontext(Source())).__aenter__()
        await portal.close(drain=True)
        texts = {segments.transcript().text}
        with pytest.raises(EngineClosed, match="has ended"):
            async for _ in segments:
                texts.add(segments.transcript().text)
        return {*texts, segments.transcript().text}

    portal: TaskPortal
    assert asyncio.run(main()) == {"abc"}


@pytest.mark.parametrize("drain", [True, False])
def test_a_call_that_does_not_end_with_the_engine_is_cut_off(drain: bool) -> None:
    """No call of an engine is like that; should one be, its caller must not hang."""
    failures: list[str] = []

    async def main() -> None:
        portal = bare_portal(lambda: failures.append("failed"))
        await portal.open()
        call = asyncio.create_task(portal.call(trio.sleep_forever))
        await asyncio.sleep(0)
        await portal.close(drain=drain)
        assert portal.joined() is None
        with pytest.raises(EngineClosed, match="ended before the call did"):
            await call
        with pytest.raises(EngineStateError, match="closed"):
            await portal.call(trio.sleep_forever)
        with pytest.raises(EngineStateError, match="closed"):
            portal.read(int)

    asyncio.run(main())
    assert not failures
    assert not loops()


def test_a_trio_loop_that_crashes_is_told_to_the_body_and_to_every_caller(bench: Bench) -> None:
    """It would be a bug of ours or of trio's, and nobody could give the device back. Nobody must hang either."""

    async def main() -> None:
        held = bench.hold()
        async with asyncio.TaskGroup() as group:
            with pytest.raises(trio.TrioInternalError):
                async with bench.engine() as engine:
                    call = group.create_task(refused(engine))
                    await held.reached.wait()
                    bench.worker.crash_loop()
                    await asyncio.get_running_loop().create_future()
            await call

    async def refused(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await engine.generate(**query(1))

    asyncio.run(main())
    assert not loops()


# -- who enters, and who leaves --------------------------------------------------------------------------------------


def test_only_a_generator_that_somebody_closes_may_wait() -> None:
    """A coroutine that is thrown away must not, not even in the generator of a context manager that it is in."""
    told: list[bool] = []

    class Block:
        async def __aenter__(self) -> None:
            pass

        async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
            told.append(TaskPortal.may_wait(error))

    async def generator() -> AsyncIterator[None]:
        async with Block():
            yield

    async def nested() -> AsyncIterator[None]:
        async with contextlib.asynccontextmanager(generator)():
            yield

    async def coroutine() -> None:
        async with Block():
            await asyncio.get_running_loop().create_future()

    async def managed() -> None:
        async with contextlib.asynccontextmanager(generator)():
            await asyncio.get_running_loop().create_future()

    async def main() -> None:
        for make in (generator, nested):
            closed: Any = make()
            await anext(closed)
            await closed.aclose()
        for thrown_away in (coroutine(), managed()):
            thrown_away.send(None)
            thrown_away.close()

    asyncio.run(main())
    assert told == [True, True, False, False]
    assert TaskPortal.may_wait(None)
    assert TaskPortal.may_wait(ValueError())
    assert not TaskPortal.may_wait(GeneratorExit()), "no task runs here"


@on_bench
async def test_a_cancellation_is_not_lost_in_a_generator_that_is_closed(bench: Bench) -> None:
    """``aclose()`` swallows its own `GeneratorExit`, and must not swallow more."""

    async def session() -> AsyncIterator[Engine]:
        async with bench.engine() as engine:
            yield engine

    held = bench.hold(Job.CLOSE, until_teardown=False)
    generator: Any = session()
    await anext(generator)
    task = asyncio.create_task(generator.aclose())
    await held.reached.wait()
    task.cancel()
    await asyncio.sleep(0)
    bench.worker.end_hold(held)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not bench.executor.is_open


@pytest.mark.parametrize("host", HOSTS[:2], ids=lambda host: host.name)
@on_bench
async def test_a_stream_belongs_to_the_loop_of_its_engine(bench: Bench, host: Host) -> None:
    """A use in another loop is refused: a future of this loop would never wake a task of that one."""
    async with bench.engine() as engine:
        entered, left = engine.stream(**query(1)), engine.stream(**query(2))
        await left.__aenter__()
        async with engine.stream(**query(3)) as deltas:

            async def elsewhere() -> None:
                with pytest.raises(EngineStateError, match="open another engine"):
                    await entered.__aenter__()
                with pytest.raises(EngineStateError, match="open another engine"):
                    await anext(deltas)
                with pytest.raises(EngineStateError, match="open another engine"):
                    await left.__aexit__(None, None, None)

            await asyncio.to_thread(host.run, elsewhere)
            assert tuple([token async for delta in deltas for token in delta.token_ids]) == expected(3)
        await left.__aexit__(None, None, None)


@on_bench
async def test_a_block_may_be_left_by_another_task(bench: Bench) -> None:
    """Fixtures of test frameworks do so."""
    engine = bench.engine()
    await asyncio.create_task(engine.__aenter__())
    assert (await engine.generate(**query(1))).token_ids == expected(1)
    await asyncio.create_task(engine.__aexit__(None, None, None))


def test_a_closed_engine_of_another_loop_says_that_it_is_closed(bench: Bench) -> None:
    async def session() -> None:
        async with bench.engine():
            pass

    async def later(use: Coroutine[Any, Any, object]) -> None:
        with pytest.raises(EngineStateError, match="closed"):
            await use
        await engine.aclose()

    bench.run(session)
    engine = bench.made
    assert engine is not None
    asyncio.run(later(engine.transcribe(audio(1))))
