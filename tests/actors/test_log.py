"""What the log says of an engine: open and close, and every failure with its error; nothing of what goes well."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import trio

from triolet import EncodeFailed, PoisonRequest, RunnerCrashed
from triolet.actors.emit import Emit
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.config import EngineConfig
from triolet.core.log_lines import LONGEST, one_line
from triolet.core.trace import TraceChecker
from triolet_testing.sim import SimExecutor, sim_engine

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


ALWAYS = range(100)
TOLD = "RuntimeError: CUBLAS_STATUS: the text that an operator needs"


@pytest.mark.parametrize(
    ("job", "calls", "restarts", "error", "told"),
    [
        (Job.STEP, [3], 3, None, [rf"step \d+ failed: {TOLD}"]),
        (Job.STEP, ALWAYS, 3, PoisonRequest, ["request request#0 failed as poison: PoisonRequest: "]),
        (
            Job.ENCODE,
            ALWAYS,
            3,
            EncodeFailed,
            [
                f"an encode batch of 1 failed, and is tried again: {TOLD}",
                "an encoder output is refused to request#0/0: EncodeFailed: ",
            ],
        ),
        (Job.FREE, [0], 3, None, [rf"the runner restarts \(restart 1\): {TOLD}"]),
        (Job.FREE, [0], 0, RunnerCrashed, [f"the runner failed, the engine is being stopped: {TOLD}"]),
    ],
    ids=["a step that is tried again", "poison", "an encode batch", "a restart", "a crash"],
)
async def test_a_failure_is_told_in_one_line_with_its_error(job, calls, restarts, error, told, log, autojump_clock):
    """What ends the engine is an error of the log, all else a warning."""
    config = EngineConfig(encoder_cache_bytes=100, restarts=restarts)
    with nullcontext() if error is None else pytest.raises(error):
        async with sim_engine(SimExecutor(fault=FaultAt(job, *calls)), config=config) as engine:
            for number in range(3):
                await ask(engine, number)
    lines = [line for _, line in log(logging.WARNING)]
    assert all(any(re.match(one, line) for line in lines) for one in told), lines
    assert (logging.ERROR in [level for level, _ in log()]) == (error is RunnerCrashed)


async def test_nothing_that_a_user_wrote_is_logged(caplog, autojump_clock):
    """Not even at DEBUG: an error's text may quote it."""
    caplog.set_level(logging.DEBUG, logger="triolet")
    async with sim_engine() as engine:
        await ask(engine, 1)
    secret = events.RequestEnded("r", "failed", "InvalidRequest: prompt='my secret'")
    assert secret.line() == (logging.DEBUG, "request r failed with InvalidRequest")
    assert "[1, 3]" not in caplog.text


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("whose")


class BrokenObserver(Trace):
    def __call__(self, event: events.Event) -> None:
        self.append(event)
        raise ValueError("whose")


@pytest.mark.parametrize(
    ("observer", "handlers", "note"),
    [(None, [Broken()], "a handler or filter of the log"), (BrokenObserver(), [], "EngineConfig(observer=...)")],
)
async def test_who_listens_and_raises_does_not_stop_the_way_out(
    observer, handlers, note, executor, monkeypatch, autojump_clock
):
    """Its error leaves the block, with a note that says whose it is. An observer hears no more."""
    logger = logging.getLogger("triolet")
    monkeypatch.setattr(logger, "handlers", handlers)
    monkeypatch.setattr(logger, "level", logging.INFO)
    with pytest.raises(RunnerCrashed, match="whose") as caught, trio.fail_after(60):
        async with sim_engine(executor, config=EngineConfig(observer=observer)):
            pass
    assert any(note in one for one in caught.value.__cause__.__notes__)
    assert observer is None or len(observer) == 1
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
        (events.StageReached("device call abandoned"), "teardown: device call abandoned"),
    ],
)
def test_what_shrinks_or_is_cut_off_is_a_warning(event, text):
    level, line = event.line()
    assert level == logging.WARNING
    assert text in line
