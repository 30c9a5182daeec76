"""The engine for threads without an event loop: calls, streams, ends and failures. ^C is in test_sync_interrupts.py.

After each test, `SyncBench.run` checks that the device is released, that no thread is left, that every admission permit
came back and every request heard its one end.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from triolet import (
    Delta,
    Engine,
    EngineClosed,
    EngineError,
    EngineStateError,
    EngineTeardownError,
    InvalidRequest,
    RunnerCrashed,
    SyncEngine,
    demo,
)
from triolet.actors.scheduler import Scheduler
from triolet.actors.worker import Job
from triolet.api.hosts.trio_thread import TrioThread
from triolet.api.inputs.audio import load_audio
from triolet.core import events
from triolet_testing.sim import SimExecutor

from ..heap import assert_none, garbage
from .hosts import (
    SpeakingModel,
    audio,
    crash,
    on_bench,
    query,
    release_is_stuck,
)
from .threads import PATIENCE, SyncBench, ask, loops, ours, read, until

pytestmark = pytest.mark.real_time


@pytest.fixture
def bench() -> SyncBench:
    return SyncBench()


# -- what is asked is answered ---------------------------------------------------------------------------------------


def test_it_has_the_names_and_arguments_of_the_engine() -> None:
    """And no docstring speaks of what only event loops have."""
    names = {name for name in vars(Engine) if not name.startswith("_")} - {"aclose"}
    assert names <= {name for name in vars(SyncEngine) if not name.startswith("_")}
    for name in ("generate", "stream", "embed", "score", "classify", "transcribe", "stream_transcription", "live"):
        plain = getattr(SyncEngine, name)
        assert inspect.signature(plain) == inspect.signature(getattr(Engine, name))
        assert plain.__qualname__ == f"SyncEngine.{name}"
        assert plain.__doc__
        assert "await " not in plain.__doc__
        assert "async " not in plain.__doc__


@on_bench
def test_a_live_session_is_fed_by_one_thread_and_read_by_another(bench: SyncBench) -> None:
    samples = load_audio(next(sample for sample in demo.samples() if sample.path.stem == "en-many").path)[:128_000]

    def feed(session: Any) -> None:
        for start in range(0, len(samples), 8_000):
            session.feed(samples[start : start + 8_000])
        session.finish()

    bench.executor = SimExecutor(SpeakingModel())

    with bench.engine() as engine, ThreadPoolExecutor(1) as pool:
        with engine.live(no_speech_threshold=None) as session:
            fed = pool.submit(feed, session)
            updates = list(session)
            fed.result()
        assert any(update.stable for update in updates)
        assert updates[-1].ends_utterance


@on_bench
def test_a_stream_that_is_read_without_its_block_says_how(bench: SyncBench) -> None:
    with bench.engine() as engine:
        for make in (lambda: engine.stream(**query(1)), engine.live, lambda: engine.stream_transcription(audio(1))):
            with pytest.raises(EngineStateError, match=r"allowed: with engine\.\w+\(\.\.\.\) as parts: for part"):
                list(make())
            with pytest.raises(EngineStateError, match="read before it was opened"):
                next(make())


# -- open and close --------------------------------------------------------------------------------------------------


@on_bench
def test_it_is_opened_once_used_while_it_is_open_and_closed_again_and_again(bench: SyncBench) -> None:
    engine = bench.engine()
    assert repr(engine) == "<SyncEngine of parts of its maker's on auto: not entered yet>"
    for use in (lambda: ask(engine, 1), engine.close, engine.statistics):
        with pytest.raises(EngineStateError, match=r"not entered yet.*: with SyncEngine\(\.\.\.\) as engine"):
            use()
    engine.open()
    with pytest.raises(EngineStateError, match="open, and an engine can be entered only once"):
        engine.open()
    with pytest.raises(EngineStateError, match="open, and an engine can be entered only once"), engine:
        raise AssertionError("entered")
    ask(engine, 1)
    engine.close()
    engine.close()
    assert "closed" in repr(engine)
    for use in (lambda: ask(engine, 1), lambda: read(engine, 1), engine.statistics, lambda: engine.model):
        with pytest.raises(EngineStateError, match=r"closed: its block has ended or close\(\) was called. Open a new"):
            use()


@on_bench
def test_any_thread_may_close_it_and_those_that_wait_are_told(bench: SyncBench) -> None:
    held = bench.hold()
    with bench.engine() as engine, ThreadPoolExecutor(3) as pool:

        def close() -> None:
            held.reached.wait()
            engine.close(drain=0)

        closing = [pool.submit(close) for _ in range(3)]
        with pytest.raises(EngineClosed):
            ask(engine, 1)
        for one in closing:
            one.result()
        assert not loops()


@on_bench
def test_it_may_be_closed_by_another_thread_the_moment_it_is_open(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the thread that opens it is awake."""
    enter = TrioThread.open

    async def slowly(portal: TrioThread) -> None:
        await enter(portal)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(engine.close).result()

    engine = bench.engine()

    monkeypatch.setattr(TrioThread, "open", slowly)
    with engine, pytest.raises(EngineStateError, match="closed"):
        ask(engine, 1)


@pytest.mark.parametrize("stuck", [False, True])
@on_bench
def test_an_engine_that_is_thrown_away_ends_and_the_hook_of_threads_hears_its_errors(
    bench: SyncBench, stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: heard.append(told.exc_type))
    if stuck:
        release_is_stuck(bench)

    engine = bench.engine()
    engine.open()
    ask(engine, 1)
    (thread,) = loops()
    del engine
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert heard == [EngineTeardownError] * stuck


# -- the engine fails ------------------------------------------------------------------------------------------------


@on_bench
def test_a_crash_ends_every_call_that_waits_and_leaves_the_block(bench: SyncBench) -> None:
    """The body goes on all the same: a thread cannot be cancelled."""
    bench.executor.fault = crash

    def refused(number: int) -> None:
        with pytest.raises(EngineError, match="dead"):
            ask(engine, number)

    with pytest.raises(RunnerCrashed, match="dead"), ThreadPoolExecutor(8) as pool:
        held = bench.hold()
        with bench.engine() as engine:
            calls = [pool.submit(refused, number) for number in range(8)]
            held.reached.wait()
            until(lambda: engine.inside.pending == 8)
            bench.worker.end_hold(held)
            for call in calls:
                call.result()
            until(lambda: not loops())
            with pytest.raises(EngineStateError, match=r"closed: it failed \(RunnerCrashed: .*dead"):
                ask(engine, 1)


@on_bench
def test_the_error_of_a_call_that_a_crash_ends_is_the_bodys_own(bench: SyncBench) -> None:
    bench.executor.fault = crash

    with pytest.raises(RunnerCrashed, match="cannot go on") as caught, bench.engine() as engine:
        ask(engine, 1)
    assert "the engine's end failed too: RunnerCrashed" in caught.value.__notes__[0]


def test_whatever_part_fails_the_calls_that_wait_are_told_which(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scheduler: Scheduler) -> None:
        if scheduler._clients:
            raise RuntimeError("a bug")

    monkeypatch.setattr(Scheduler, "_dispatch", broken)
    engine = bench.engine(verify=False)
    engine.open()
    with pytest.raises(RunnerCrashed, match=r"failed before the call had ended \(RuntimeError: a bug\)"):
        ask(engine, 1)
    with pytest.raises(RunnerCrashed, match="a bug"):
        engine.close()
    engine.close()


# -- where nobody can wait -------------------------------------------------------------------------------------------


def test_an_observer_may_ask_for_statistics_and_for_nothing_that_waits(bench: SyncBench) -> None:
    told: list[object] = []

    def observe(event: events.Event) -> None:
        bench._observe(event)
        if isinstance(event, events.RequestEnded) and not told:
            told.append(engine.statistics().requests.running)
            for use in (lambda: ask(engine, 2), lambda: engine.stream(**query(2)), engine.sleep, engine.close):
                with pytest.raises(EngineStateError, match="in its own thread"):
                    use()

    def main() -> None:
        nonlocal engine
        with bench.engine(observer=observe) as engine:
            ask(engine, 1)

    engine: SyncEngine
    bench.run(main)
    assert len(told) == 1


@on_bench
def test_blocks_that_the_collector_leaves_in_the_engines_own_thread_do_not_wait(bench: SyncBench) -> None:
    """It runs in any thread: generators that nobody closed end there."""
    opened: list[Any] = []

    def tokens(engine: SyncEngine) -> Iterator[Delta]:
        with engine.stream(**query(1)) as deltas:
            yield from deltas

    def observe(event: events.Event) -> None:
        bench._observe(event)
        while opened and isinstance(event, events.RequestQueued):
            opened.pop().close()
            bench.worker.end_hold(held)

    held = bench.hold(after=3)

    with bench.engine(observer=observe) as engine:
        generator = tokens(engine)
        next(generator)
        opened.append(generator)
        del generator
        ask(engine, 2)
        assert not opened
    assert sorted(bench.outcomes()) == ["aborted", "finished"]


@on_bench
def test_an_engine_that_the_collector_ends_in_its_own_thread_ends(bench: SyncBench) -> None:
    opened: list[Any] = []

    def session() -> Iterator[SyncEngine]:
        with bench.engine(observer=observe) as engine:
            yield engine

    def observe(event: events.Event) -> None:
        bench._observe(event)
        while opened and isinstance(event, events.RequestQueued):
            opened.pop().close()

    generator = session()
    engine = next(generator)
    opened.append(generator)
    (thread,) = loops()
    with pytest.raises(EngineError):
        ask(engine, 1)
    del generator, engine
    thread.join(PATIENCE)
    assert not thread.is_alive()


# -- memory ----------------------------------------------------------------------------------------------------------


def test_engines_come_and_go_without_garbage() -> None:
    """But for what a loop of trio leaves of itself."""

    def one() -> None:
        bench = SyncBench()
        with bench.engine() as engine:
            ask(engine, 1)
            read(engine, 2)
            with engine.stream(**query(3)) as deltas:
                next(deltas)
            with pytest.raises(InvalidRequest):
                engine.generate()
            bench.executor.fault = lambda job, _: RuntimeError("boom") if job is Job.ENCODE else None
            with pytest.raises(EngineError):
                ask(engine, 4)

    one()
    with garbage() as found:
        one()
    assert found
    assert_none(ours(found))
