"""What the log says of an engine: open and close, and every failure with its error; nothing of what goes well."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable

import pytest
import trio

from triolet import EncodeFailed, EngineTeardownError, PoisonRequest, RunnerCrashed
from triolet.actors.emit import Emit
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.config import EngineConfig
from triolet.core.log_lines import LONGEST, one_line
from triolet.core.trace import TraceChecker
from triolet_testing.sim import SimExecutor, SimWorker, sim_engine

from .shared import Trace, ask

Config = Callable[..., EngineConfig]


class FaultAt:
    """Raises at the calls of ``job`` with these numbers, from 0 on."""

    def __init__(self, job: Job, *numbers: int, error: type[Exception] = RuntimeError) -> None:
        self.job, self.numbers, self.error = job, numbers, error
        self.calls = 0

    def __call__(self, job: Job, _: object) -> Exception | None:
        if job is not self.job:
            return None
        self.calls += 1
        return (
            self.error("CUBLAS_STATUS:\n  the text that an operator needs") if self.calls - 1 in self.numbers else None
        )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Callable[..., list[tuple[int, str]]]:
    caplog.set_level(logging.DEBUG, logger="triolet")

    def lines(level: int = logging.INFO) -> list[tuple[int, str]]:
        assert {record.name for record in caplog.records} <= {"triolet.engine"}
        return [(record.levelno, record.getMessage()) for record in caplog.records if record.levelno >= level]

    return lines


async def test_a_good_day_is_two_lines_however_many_tokens(log, autojump_clock):
    """With what was opened, and what was served and given back."""
    async with sim_engine() as engine:
        for number in range(5):
            await ask(engine, number)
        steps = engine.statistics().requests
    (first_level, first), (last_level, last) = log()
    assert first_level == last_level == logging.INFO
    assert first.startswith("open: sim (SimForConditionalGeneration) on sim, float32; 64 pages of 4 positions, ")
    assert " cross slots; memory " in first
    assert "requests: 5 finished; " in last
    assert f"{steps.tokens_committed} tokens in {steps.steps} steps" in last
    assert " given back" in last
    assert [line for level, line in log(logging.DEBUG) if level == logging.DEBUG] == [
        f"request {name} finished" for name in (f"request#{number}" for number in range(5))
    ]


async def test_a_failed_step_that_is_tried_again_is_told_with_its_error(log, autojump_clock):
    """In one line; the answer is that of a quiet day."""
    async with sim_engine(SimExecutor(fault=FaultAt(Job.STEP, 3))) as engine:
        await ask(engine, 1)
    warnings = log(logging.WARNING)
    assert len(warnings) == 1
    assert warnings[0][1].endswith("RuntimeError: CUBLAS_STATUS: the text that an operator needs")


async def test_a_poisonous_request_is_told(log, autojump_clock):
    async with sim_engine(SimExecutor(fault=FaultAt(Job.STEP, *range(100)))) as engine:
        with pytest.raises(PoisonRequest):
            await ask(engine, 1)
    lines = [line for _, line in log(logging.WARNING)]
    assert any(line.startswith("request request#0 failed as poison: PoisonRequest: ") for line in lines)


async def test_an_encode_that_fails_is_told_and_so_is_who_was_refused(log, autojump_clock):
    async with sim_engine(SimExecutor(fault=FaultAt(Job.ENCODE, *range(9)))) as engine:
        with pytest.raises(EncodeFailed):
            await ask(engine, 1)
    first, *_, last = (line for _, line in log(logging.WARNING))
    assert first.startswith("an encode batch of 1 failed, and is tried again: RuntimeError: CUBLAS_STATUS")
    assert last.startswith("an encoder output is refused to request#0/0: EncodeFailed: ")


async def test_a_restart_is_told_with_its_error(log, autojump_clock):
    config = EngineConfig(encoder_cache_bytes=100)
    async with sim_engine(SimExecutor(fault=FaultAt(Job.FREE, 0)), config=config) as engine:
        for number in range(3):
            await ask(engine, number)
    assert any("restarts" in line and "CUBLAS_STATUS" in line for _, line in log(logging.WARNING))


async def test_a_crash_that_ends_the_engine_is_an_error_of_the_log(log, autojump_clock):
    config = EngineConfig(encoder_cache_bytes=100, restarts=0)
    with pytest.raises(RunnerCrashed):
        async with sim_engine(SimExecutor(fault=FaultAt(Job.FREE, 0)), config=config) as engine:
            for number in range(3):
                await ask(engine, number)
    assert any(level == logging.ERROR and "the runner failed" in line for level, line in log())


async def test_trouble_of_the_teardown_is_told(log, autojump_clock):
    """A call that hangs: it is abandoned, and says so; the last line says what is still held."""
    calls = itertools.count()
    worker = SimWorker(hangs=lambda job: job is Job.STEP and next(calls) == 3)
    with pytest.raises(EngineTeardownError):
        async with sim_engine(worker=worker, config=EngineConfig(stage_seconds=1.0)) as engine:
            with trio.move_on_after(1):
                await ask(engine, 2)
    lines = [line for _, line in log(logging.WARNING)]
    assert any("device call abandoned" in line for line in lines)


async def test_nothing_that_a_user_wrote_is_logged(caplog, autojump_clock):
    """Not even at DEBUG: an error's text may quote it."""
    caplog.set_level(logging.DEBUG, logger="triolet")
    async with sim_engine() as engine:
        await ask(engine, 1)
    secret = events.RequestEnded("r", "failed", "InvalidRequest: prompt='my secret'")
    assert secret.line() == (logging.DEBUG, "request r failed with InvalidRequest")
    assert "[1, 3]" not in caplog.text


async def test_a_handler_that_raises_does_not_stop_the_way_out(executor, autojump_clock):
    """As an observer that does: its error leaves the block, with a note that says whose it is."""

    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError("handler")

    broken, logger = Broken(), logging.getLogger("triolet")
    logger.addHandler(broken)
    logger.setLevel(logging.INFO)
    try:
        with pytest.raises(RunnerCrashed, match="handler") as caught:
            async with sim_engine(executor):
                pass
    finally:
        logger.removeHandler(broken)
        logger.setLevel(logging.NOTSET)
    assert any("handler or filter" in note for note in caught.value.__cause__.__notes__)
    assert not executor.is_open


async def test_every_event_has_its_time_before_anybody_sees_it(trace, config, autojump_clock):
    """Seconds of the engine's own clock, in order; the checker sees it too."""
    async with sim_engine(config=config()) as engine:
        begin = trio.current_time()
        await ask(engine, 1)
        end = trio.current_time()
    times = [event.time for event in trace]
    assert times == sorted(times)
    assert not any(map(math.isnan, times))
    (queued,), (ended,) = trace.of(events.RequestQueued), trace.of(events.RequestEnded)
    assert begin <= queued.time < ended.time <= end


async def test_where_nobody_listens_an_event_without_a_line_is_left_as_it_is(monkeypatch):
    """Two of them a step: no time is asked for, and nothing is looked at."""
    emit = Emit(None, None, trio.Event(), trio.CancelScope())
    event = events.StepBegun(0, ("r",), (), (), 1)
    emit(event)
    assert math.isnan(event.time)
    trace = Trace()
    Emit(trace.append, TraceChecker(), trio.Event(), trio.CancelScope())(events.RequestQueued("r"))
    assert not math.isnan(trace[0].time)


def test_an_error_is_one_line_and_no_novel():
    assert one_line("a\n\tb  c") == "a b c"
    assert one_line("x" * 9999) == "x" * LONGEST + " ..."
    assert one_line("") == "no error was reported"


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (events.StepShrunk(12), "12 tokens"),
        (events.EncodeShrunk(1500), "1500 embeddings"),
        (events.StageReached("runner cut off"), "teardown: runner cut off"),
    ],
)
def test_what_shrinks_or_is_cut_off_is_a_warning(event, text):
    level, line = event.line()
    assert level == logging.WARNING
    assert text in line
