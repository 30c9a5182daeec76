"""``--watch``: what is known of an engine by its events, and what is drawn of it, tested without a terminal."""

from __future__ import annotations

import io
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from attrs import evolve
from rich.console import Console

import triolet.demo
from triolet import Engine, EngineConfig, EngineStatistics
from triolet.api.command_line import terminal
from triolet.api.command_line.watch import MOST_LINES, View, picture
from triolet.core import events as e
from triolet.core.overview import FREEING, HELD, IDLE, Overview
from triolet.testing.sim import SimExecutor, sim_engine
from triolet.testing.sim_model import SimModel

from ..actors.shared import ask
from .paper import Terminal, run
from .threads import press_in_a_callback

QUEUED = e.RequestQueued("r", time=1.0)
STARTED = e.RequestStarted("r", 3, time=3.0)


def fed(*told: e.Event) -> Overview:
    state = Overview()
    for event in told:
        state(event)
    return state


def stage(*told: e.Event) -> str:
    (line,) = fed(QUEUED, *told).first_lines(9)
    return line.stage


def drawn(state: Overview, statistics: EngineStatistics | None, *, most: int = 9, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(picture(state, statistics, 10.0, title="triolet test", most_lines=most))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def statistics() -> EngineStatistics:
    async def served() -> EngineStatistics:
        async with sim_engine() as engine:
            await ask(engine, 1)
            return engine.statistics()

    return trio.run(served, clock=trio.testing.MockClock(autojump_threshold=0))


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], "queued"),
        ([e.EntryAcquired("k", "r/0"), e.EntryReserved("k", 3), e.EncodeDispatched(("k",), 1)], "encoding"),
        ([e.EncoderWaitOver("r")], "ready"),
        ([STARTED], "reading"),
        ([e.StepBegun(0, ("r",), (), (), 1)], "reading"),
        ([STARTED, e.FirstToken("r", time=4.0)], "decoding"),
        ([STARTED, e.RequestPreempted("r", "other")], "preempted"),
        ([STARTED, e.RequestSuspected("r")], "suspected"),
        ([STARTED, e.StepRetried(0, ("r",))], "queued"),
        ([STARTED, e.StepsLost(1)], "queued"),
        ([STARTED, e.RequestPreempted("r", "other"), STARTED], "reading"),
    ],
)
def test_the_stage_of_a_request_is_what_the_events_say(told: list[e.Event], expected: str) -> None:
    assert stage(*told) == expected


def test_a_line_knows_how_long_it_waited_and_how_fast_it_writes() -> None:
    """Tokens are counted by good steps that sample; one that reads the prompt gives none, and a failed one neither."""
    told = [QUEUED, STARTED]
    for number, ok in enumerate((True, True, True, False, True)):
        begun = e.StepBegun(number, ("r",), (), (), 1, ("r",) if number else ())
        told += [begun, e.StepEnded(number, ok=ok, error="" if ok else "E: x", time=3.0 + number)]
    (line,) = fed(*told).first_lines(9)
    assert (line.waited(99.0), line.tokens, line.rate(6.0)) == (2.0, 3, 1.0)


def test_a_beam_search_writes_from_its_first_step_on() -> None:
    """Its tokens are committed at its end; each of its steps is one of them until then."""
    told = [QUEUED, STARTED]
    for number in range(3):
        told += [e.StepBegun(number, ("r",), (), (), 5, ("r",)), e.StepEnded(number, ok=True, time=4.0)]
    (line,) = fed(*told).first_lines(9)
    assert (line.stage, line.tokens) == ("decoding", 3)


def test_those_that_run_come_first_and_the_ended_are_gone() -> None:
    told = [e.RequestQueued(name, time=0.0) for name in "abc"]
    state = fed(*told, e.RequestStarted("c", 3, time=1.0), e.RequestEnded("a", "failed", "E: x"))
    assert [line.request_id for line in state.first_lines(9)] == ["c", "b"]
    assert state.ended == {"failed": 1}


def test_failures_are_counted_and_the_last_one_is_shown(statistics: EngineStatistics) -> None:
    state = fed(
        *(e.StepBegun(0, (), (), (), 0), e.StepBegun(1, (), (), (), 0)),
        *(e.StepEnded(0, ok=False, error="RuntimeError: bo\nom"), e.StepEnded(1, ok=False, skipped=True)),
    )
    assert (state.failures, state.last_failure) == (1, "step 0: RuntimeError: bo om")
    assert "last failure  step 0: RuntimeError: bo om" in drawn(state, statistics)


# -- the encoder cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 5])
async def test_bytes_by_state_are_those_of_the_books(places: int, autojump_clock: Any) -> None:
    """Under pressure, with withdrawals; whenever somebody looks, and at the end nothing is left."""
    state = Overview()
    seen: set[str] = set()
    config = EngineConfig(observer=state, encoder_cache_bytes=100 * places, verify=True)
    async with sim_engine(config=config) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(leave_early if number % 3 == 2 else ask, engine, number % 5)
            for _ in range(100):
                await trio.sleep(0.05)
                books = engine.statistics().encoder_cache
                assert sum(state.bytes_in.values()) == books.taken
                assert min(state.bytes_in.values(), default=0) >= 0
                assert (state.bytes_in[IDLE] > 0) == (books.idle > 0)
                seen |= {name for name, count in state.bytes_in.items() if count}
    assert {HELD, IDLE} <= seen
    assert +state.bytes_in == {}
    left = (state._entries, state._wanted, state._steps, state.running, state.waiting)
    assert not any(left)


async def leave_early(engine: Engine, number: int) -> None:
    with trio.move_on_after(0.4):
        await ask(engine, number)


def test_an_output_goes_through_its_states() -> None:
    told = [e.EntryAcquired("k", "r/0"), e.EntryReserved("k", 3), e.EncodeDispatched(("k",), 1), e.EncodeDone(("k",))]
    held = [e.EntryHeld("k", "r/0"), e.EntryHeld("k", "s/0")]
    assert +fed(*told, *held, e.EntryReleased("k", "r/0")).bytes_in == {HELD: 3}
    idle = [*told, *held, e.EntryReleased("k", "r/0"), e.EntryReleased("k", "s/0")]
    assert +fed(*idle).bytes_in == {IDLE: 3}
    assert +fed(*idle, e.FreeSent(("k",))).bytes_in == {FREEING: 3}
    assert +fed(*idle, e.FreeSent(("k",)), e.EntryFreed(("k",))).bytes_in == {}
    assert +fed(*idle, e.OutputsLost(1)).bytes_in == {"reserved": 3}


# -- the picture -----------------------------------------------------------------------------------------------------


def test_four_hundred_requests_are_the_first_ones_and_how_many_more(statistics: EngineStatistics) -> None:
    """The work of a refresh is bounded: no more lines are made than are shown."""
    state = fed(*(e.RequestQueued(f"request#{number}", time=0.0) for number in range(400)))
    picture_ = drawn(state, statistics, most=MOST_LINES)
    assert picture_.count("request#") == MOST_LINES
    assert f"+{400 - MOST_LINES} more" in picture_
    assert "400 waiting" in picture_


async def test_the_picture_tells_pages_slots_cache_and_speed(statistics: EngineStatistics, autojump_clock: Any) -> None:
    view, done = view_on(Screen()), statistics.requests
    for event in (e.EntryReserved("k", 3 * 2**20), QUEUED, STARTED):
        view.state(event)
    told = [statistics, evolve(statistics, requests=evolve(done, tokens_committed=done.tokens_committed + 50))]
    model = SimpleNamespace(name="folder/paper", device="cpu", dtype="float32")
    with view.of(SimpleNamespace(model=model, statistics=lambda: told.pop(0))):
        view.refresh()
        await trio.sleep(2)
        view.refresh()
    free = f"{done.pages_free - done.pages_cached} free"
    for word in ("paper on cpu, float32", "1 running", "25 tokens/s", free, "3.0 MiB reserved", "reading"):
        assert word in view.console.file.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int, statistics: EngineStatistics) -> None:
    state = fed(*(e.RequestQueued(f"a long name of a file {number}", time=0.0) for number in range(3)))
    assert max(map(len, drawn(state, statistics, width=width).splitlines())) <= width


def test_before_the_engine_is_open_it_says_so() -> None:
    assert "opening the model" in drawn(Overview(), None)


# -- the view --------------------------------------------------------------------------------------------------------


class Screen(Terminal):
    """A terminal for `rich`."""

    encoding = "utf-8"


def view_on(screen: Screen) -> View:
    return View(Console(file=screen, width=100, height=30, force_terminal=True, color_system=None), "triolet test")


async def test_it_is_drawn_eight_times_a_second_and_taken_away_at_the_end(autojump_clock: Any) -> None:
    """The cursor is shown again, whatever ends it."""
    screen = Screen()
    view = view_on(screen)
    async with sim_engine(config=EngineConfig(observer=view.state)) as engine:
        async with trio.open_nursery() as nursery:
            with view.of(engine):
                nursery.start_soon(view.run)
                await ask(engine, 1)
                refreshed = screen.getvalue().count("requests  ")
            nursery.cancel_scope.cancel()
    assert refreshed >= 2
    assert "opening" not in screen.getvalue()
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")
    view.refresh()  # too late: nothing is drawn any more
    assert screen.getvalue().rindex("\x1b[?25h") > screen.getvalue().rindex("\x1b[?25l")


# -- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "refusal"),
    [
        (["transcribe", "--model", "m", "absent.wav"], "absent.wav: there is no such file"),
        (["generate", "m", "hi"], "reads audio; use triolet transcribe"),
        (["embed", "m", "hi"], "use an embedding model"),
    ],
)
def test_without_a_terminal_there_is_nothing_to_watch_and_it_goes_on(
    command: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as a device of paper goes: it has no file and reads nothing but audio, and the command says so."""
    assert run([*command, "--watch"], lambda _, config: sim_engine(SimExecutor(SimModel()), config=config)) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(
        "triolet: --watch needs a terminal on standard error, and there is none; the command goes on"
    )
    assert refusal in second


@pytest.mark.real_time
def test_who_transcribes_at_a_terminal_sees_the_files_as_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole command, on real weights."""
    screen, samples = Screen(), Path(triolet.demo.__file__).parent / "samples"
    monkeypatch.setattr(sys, "stderr", screen)
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(name, value)
    files = [str(samples / name) for name in ("en-many.flac", "de-many.flac")]
    assert run(["transcribe", "--model", "demo", "--watch", *files]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    seen = screen.getvalue()
    assert "cross slots" in seen
    assert "en-many.flac#" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_an_interrupt_that_python_would_lose_is_heard_by_the_command() -> None:
    async def work() -> int:
        press_in_a_callback()
        for _ in range(100):
            await trio.lowlevel.checkpoint()
        return 0

    assert trio.run(terminal.until_interrupted, work) == terminal.INTERRUPTED


@pytest.mark.parametrize("wrong", ["error", "interrupt"])
def test_the_terminal_is_as_it_was_after_an_error_and_after_an_interrupt(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    view = view_on(screen)

    async def work() -> int:
        view.refresh()
        if wrong == "interrupt":
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        raise ValueError("boom")

    if wrong == "interrupt":
        assert trio.run(terminal.until_interrupted, work, view) == terminal.INTERRUPTED
    else:
        with pytest.raises(BaseExceptionGroup, match="nursery"):
            trio.run(terminal.until_interrupted, work, view)
    told = screen.getvalue()
    assert told.rindex("\x1b[?25h") > told.rindex("\x1b[?25l")
    assert "\x1b[2K" in told[told.rindex("opening the model") :]
