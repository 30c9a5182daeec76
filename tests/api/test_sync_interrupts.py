"""^C in programs without an event loop: what waits in the main thread is withdrawn, and the block ends in order."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import triolet
from triolet import EngineClosed, EngineError, EngineStateError, InvalidRequest, Word
from triolet.actors.worker import Job
from triolet.api.hosts.thread_host import Interrupts, Wait
from triolet_testing.sim import SimExecutor

from ..heap import assert_none, expected, garbage
from ..tracer import Tracer
from . import hosts
from .hosts import SpeakingModel, on_bench, query
from .test_hosts import ALL_OF_IT
from .threads import (
    END,
    PATIENCE,
    Signal,
    SyncBench,
    ask,
    loops,
    ours,
    press_after,
    press_in_a_callback,
    run_program,
    until,
)

pytestmark = pytest.mark.real_time


@pytest.fixture(autouse=True)
def pythons_own_handler() -> Iterator[None]:
    """Shells have background jobs ignore ^C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "a handler of ours is left"
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def bench() -> SyncBench:
    return SyncBench()


def waits() -> bool:
    """The main thread is in a call of ours, which holds ^C back."""
    return isinstance(signal.getsignal(signal.SIGINT), Interrupts)


@on_bench
def test_a_call_is_withdrawn_and_has_ended_when_the_interrupt_is_raised(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine goes on."""
    ended: list[bool] = []

    held = bench.hold()
    with bench.engine() as engine:
        generate = engine.inside.generate

        async def watched(*arguments: Any, **more: Any) -> Any:
            try:
                return await generate(*arguments, **more)
            finally:
                ended.append(True)

        with monkeypatch.context() as patch:
            patch.setattr(engine.inside, "generate", watched)
            press_after(held.reached.wait)
            with pytest.raises(KeyboardInterrupt):
                ask(engine, 1)
            assert ended
        bench.worker.end_hold(held)
        ask(engine, 2)
    assert bench.outcomes() == ["aborted", "finished"]


@on_bench
def test_an_interrupt_does_not_wait_for_the_callers_aligner(bench: SyncBench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    asked, answered = Signal(), Signal()

    class Slow:
        def align(self, _: Any, text: str, language: str | None = None) -> list[Word]:
            asked.set()
            answered.wait()
            raise InvalidRequest(f"{text} {language}")

    with bench.engine() as engine:
        press_after(asked.wait)
        with pytest.raises(KeyboardInterrupt):
            engine.transcribe(np.ones(16_000, np.float32), **ALL_OF_IT, timestamps="word", aligner=Slow())
        answered.set()


@on_bench
def test_interrupts_while_it_closes_end_the_drain_and_not_the_order(bench: SyncBench) -> None:
    held = bench.hold(until_teardown=False)
    closing, hurried = bench.stage("intake closed"), bench.stage("drain deadline")

    def again() -> None:
        for _ in range(3):
            press_after(hurried.wait).join()
        bench.worker.end_hold(held)

    def refused() -> None:
        with pytest.raises(EngineClosed):
            ask(engine, 1)

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt), bench.engine(drain_seconds=1e6) as engine:
            call = pool.submit(refused)
            held.reached.wait()
            pressing = press_after(closing.wait, again)
        call.result()
        pressing.join()
    assert not bench.executor.is_open
    assert bench.outcomes() == ["aborted"]


@on_bench
def test_an_interrupt_while_it_loads_closes_what_was_opened(bench: SyncBench) -> None:
    loading = bench.hold(Job.OPEN, until_teardown=False)
    press_after(loading.reached.wait, lambda: bench.worker.end_hold(loading))
    with pytest.raises(KeyboardInterrupt), bench.engine():
        raise AssertionError("entered")
    assert bench.executor.calls == [Job.OPEN, Job.CLOSE]


@on_bench
def test_an_interrupt_in_a_stream_loses_none_of_it(bench: SyncBench) -> None:
    held = bench.hold(after=3)
    found: list[int] = []

    def read_on() -> None:
        for delta in deltas:
            found.extend(delta.token_ids)

    with bench.engine() as engine, engine.stream(**query(1)) as deltas:
        press_after(lambda: until(lambda: len(found) == 3 and waits()))
        with pytest.raises(KeyboardInterrupt):
            read_on()
        bench.worker.end_hold(held)
        read_on()
    assert tuple(found) == hosts.expected(1)


@pytest.mark.parametrize("inside", [True, False], ids=["pool inside", "pool outside"])
def test_an_interrupt_of_a_thousand_requests_gives_everything_back(bench: SyncBench, inside: bool) -> None:
    """A pool inside of the block lets its running calls finish; one outside hears that the engine is closed. ^C comes
    in a call of the main thread's: in the middle of a pool's lines Python may lose it, or leave a pool's lock taken."""
    outcomes: Counter[str] = Counter()

    def one(number: int) -> None:
        try:
            ask(engine, number % 50, 3)
            outcomes["answered"] += 1
        except (EngineError, EngineStateError) as error:
            outcomes[type(error).__name__] += 1

    def work(pool: ThreadPoolExecutor) -> None:
        try:
            for number in range(1000):
                pool.submit(one, number)
            held.reached.wait()
            press_after(lambda: until(waits))
            ask(engine, 50, 3)
            raise AssertionError("it was not heard")
        except KeyboardInterrupt:
            bench.worker.end_hold(held)
            pool.shutdown(wait=inside, cancel_futures=True)
            if inside:
                told = engine.statistics().requests
                assert (told.waiting, told.running, engine.inside.pending) == (0, 0, 0)
            raise

    def main() -> None:
        nonlocal engine
        engine = bench.engine(verify=False)
        if inside:
            with engine, ThreadPoolExecutor(32) as pool:
                work(pool)
        else:
            with ThreadPoolExecutor(32) as pool, engine:
                work(pool)

    engine: Any = None
    held = bench.hold(after=30)  # of three for each request, 32 of which run at once
    with pytest.raises(KeyboardInterrupt):
        bench.run(main)
    until(lambda: not loops())
    bench.check()
    assert 0 < outcomes["answered"] < 1000
    assert inside == (set(outcomes) == {"answered"})


@on_bench
def test_another_handler_that_raises_is_treated_alike(bench: SyncBench) -> None:
    """The handler may be one for an alarm, or that of another library's loop."""

    class Alarm(Exception):
        pass

    def alarm(_: int, frame: FrameType | None) -> None:
        sleeps = frame is not None and frame.f_code is Interrupts._sleep.__code__
        heard.put(sleeps)
        if sleeps:
            raise Alarm

    def press_until_it_sleeps() -> None:
        held.reached.wait()
        ident = threading.main_thread().ident
        assert ident is not None
        while True:
            signal.pthread_kill(ident, signal.SIGINT)
            with contextlib.suppress(queue.Empty):  # Python handles a signal that comes right before a sleep after it
                if heard.get(timeout=1):
                    return

    held = bench.hold()
    heard: queue.SimpleQueue[bool] = queue.SimpleQueue()

    signal.signal(signal.SIGINT, alarm)
    with ThreadPoolExecutor(1) as pool:
        pressing = pool.submit(press_until_it_sleeps)
        with pytest.raises(Alarm), bench.engine(drain_seconds=1e6) as engine:
            ask(engine, 1)
        pressing.result()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert bench.outcomes() == ["aborted"]


@pytest.mark.parametrize("closing", [False, True])
@on_bench
def test_what_another_handler_raises_between_two_waits_withdraws_the_call_or_ends_the_engine(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch, closing: bool
) -> None:
    """Without waiting for it, since the coroutine is thrown away."""

    def interrupted(self: Interrupts, _: Wait) -> None:
        monkeypatch.undo()
        raise KeyError("mine")

    bench.hold()
    engine = bench.engine()
    engine.open()
    monkeypatch.setattr(Interrupts, "wait", interrupted)
    with pytest.raises(KeyError, match="mine"):
        if closing:
            engine.close()
        else:
            ask(engine, 1)
    if not closing:
        until(lambda: engine.inside.pending == 0)
        engine.close()
    until(lambda: not loops())
    assert set(bench.outcomes()) <= {"aborted"}


def test_an_interrupt_that_nothing_waits_for_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as caught, Interrupts():
        signal.raise_signal(signal.SIGINT)
        raise KeyError("mine")
    assert isinstance(caught.value.__context__, KeyError)


@on_bench
def test_an_interrupt_that_python_would_lose_is_heard_in_a_call(
    bench: SyncBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler raises nothing there that a callback of the collector could swallow."""
    sleep = Interrupts._sleep

    def pressed(self: Interrupts, bell: Any, wait: Wait) -> None:
        monkeypatch.undo()
        held.reached.wait()
        press_in_a_callback()
        sleep(self, bell, wait)

    held = bench.hold()

    with pytest.raises(KeyboardInterrupt), bench.engine() as engine:
        monkeypatch.setattr(Interrupts, "_sleep", pressed)
        ask(engine, 1)
    assert bench.outcomes() == ["aborted"]


def test_an_interrupt_makes_no_garbage(bench: SyncBench) -> None:
    def one() -> None:
        bench = SyncBench()
        held = bench.hold()
        pressing = press_after(held.reached.wait)
        with expected(KeyboardInterrupt), bench.engine() as engine:
            ask(engine, 1)
        pressing.join()

    one()
    with garbage() as found:
        one()
    assert_none(ours(found))


# -- between any two lines -------------------------------------------------------------------------------------------

OURS = (str(Path(triolet.api.engine.__file__).parent),)


def session(bench: SyncBench) -> None:
    """A request that is waited for, a stream that is read to its end, and one that is left early."""
    with bench.engine() as engine:
        engine.generate(**query(1, 1))
        with engine.stream(**query(2, 2)) as deltas:
            for _ in deltas:
                pass
        with engine.stream(**query(3)) as deltas:
            next(deltas)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3))])
def test_an_interrupt_at_any_line_gives_everything_back(first: int) -> None:
    """At each fourth moment; a thorough run has the others. Between the last line of a user's block and the first one
    of its ``__exit__`` Python itself has a gap. There the engine ends when it is thrown away."""
    plain = Tracer(OURS)
    assert plain.follow(partial(session, SyncBench())) is None
    assert len(plain.seen) > 200, "the lines are not followed"
    first_of_exit = min(line for line in plain.seen if line.function == "SyncEngine.__exit__")
    broken: list[str] = []
    for line, time in plain.moments(__file__)[first::4]:
        bench, tracer = SyncBench(), Tracer(OURS, line, time)
        error = tracer.follow(partial(session, bench))
        heard = tracer.seen.get(line, 0) >= time  # how often a thread sleeps is not the same each time
        is_open = bool(loops())
        for thread in loops():
            thread.join(PATIENCE)
        bench.check()
        if type(error) is not (KeyboardInterrupt if heard else type(None)) or hasattr(error, "__notes__"):
            broken.append(f"{line}, time {time}: {error!r}")
        if is_open and line != first_of_exit:
            broken.append(f"{line}, time {time}: the block left the engine open")
    assert not broken, "\n".join(broken[:20])


# -- programs of their own -------------------------------------------------------------------------------------------


def test_interrupts_from_outside_while_it_waits_and_while_it_closes_end_it_in_order() -> None:
    lines, status, errors = run_program(
        """
        came, signals = os.pipe()
        os.set_blocking(signals, False)
        signal.set_wakeup_fd(signals)  # has a byte for each signal, whether or not Python has run its handler

        first = iter([True])

        def hold(job, _):
            if job is Job.STEP and next(first, False):
                print("a step", flush=True)
                os.read(came, 1)
                os.read(came, 1)

        with make(SyncEngine, hold) as engine:
            ask(engine)
        """,
        "a step",
        "intake closed",
    )
    assert status == -signal.SIGINT
    assert [line for line in lines if line in ("a step", "intake closed", *END)] == ["a step", "intake closed", *END]
    assert errors.rstrip().endswith("KeyboardInterrupt")


def test_a_process_that_ends_with_an_open_engine_releases_the_device_and_its_forks_do_not_wait() -> None:
    lines, status, errors = run_program(
        """
        import warnings

        warnings.simplefilter("ignore")  # from Python 3.12 on, of forks beside threads
        engine = make(SyncEngine)
        engine.open()
        ask(engine)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
        print("the end", flush=True)
        """
    )
    assert (status, errors) == (0, "")
    assert lines == [
        *("device taken", "accepting", "the end", "the end"),
        *("intake closed", "scheduler stopped", "encoder cache stopped", *END),
    ]
