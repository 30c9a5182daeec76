"""``--trace`` and ``triolet trace``: what is written where, and what is told."""

from __future__ import annotations

import errno
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import pytest

import triolet.demo
from triolet import Engine, EngineConfig, EventLog
from triolet.core import events as e
from triolet.core.event_lines import line_of, read_events
from triolet.core.timeline import Record, timeline_of
from triolet_testing import SCENARIOS, simulate
from triolet_testing.trio_tools import Uniform

from ..properties.test_timeline import check_format
from .generating import PaperEngine as PaperWriter
from .paper import Broken, PaperEngine, run

pytestmark = pytest.mark.usefixtures("folder")

TRACE = simulate(SCENARIOS["plain"], Uniform(3)).trace


def told(engine: Any) -> Any:
    """Stands for `Engine`: opens ``engine``, and its observer is told a whole trace."""

    def opened(model: str, config: EngineConfig) -> Any:
        assert config.observer is not None
        for event in TRACE:
            config.observer(event)
        return engine(model, config)

    return opened


def written(path: Path | str) -> list[Record]:
    return json.loads(Path(path).read_text())


# -- --trace ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["transcribe a.wav --model m", "generate m hi", "embed m hi"])
def test_a_command_writes_the_trace_of_its_run(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = PaperEngine() if words.startswith("transcribe") else PaperWriter("a")
    assert run([*words.split(), "--trace", "t.json"], told(engine)) == 0
    records = written("t.json")
    assert records == timeline_of(TRACE)
    check_format(records)
    assert capsys.readouterr().err == ""


def test_a_run_that_fails_leaves_a_whole_trace() -> None:
    """It is then that one looks."""
    assert run(["transcribe", "bad.wav", "--trace", "t.json"], told(PaperEngine())) == 1
    assert written("t.json") == timeline_of(TRACE)
    assert run(["transcribe", "interrupt.wav", "--trace", "t.json"], told(PaperEngine())) == 130
    assert written("t.json") == timeline_of(TRACE)


def test_requests_of_a_trace_are_named_after_their_files() -> None:
    engine = PaperEngine()
    assert run(["transcribe", "sub/a.wav", "--trace", "t.json"], engine) == 0
    assert engine.asked == [("sub/a.wav", {"request_id": "a.wav"})]


def test_a_trace_may_be_written_over_a_trace_and_an_empty_file(folder: Path) -> None:
    for before in ("", "[\n", json.dumps(timeline_of(TRACE))):
        (folder / "t.json").write_text(before)
        assert run(["transcribe", "b.wav", "--trace", "t.json"], told(PaperEngine())) == 0
        assert written("t.json") == timeline_of(TRACE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_costs_the_trace_and_not_the_transcript(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, status 1."""
    assert run(["transcribe", "b.wav", "--trace", "/dev/full"], told(PaperEngine())) == 1
    out, err = capsys.readouterr()
    assert out == "said in b.wav, möglichst.\n"
    assert err == "triolet: /dev/full: the trace cannot be written (No space left on device)\n"


# -- triolet trace ---------------------------------------------------------------------------------------------------


def log(path: Path, events: Sequence[e.Event]) -> Path:
    with EventLog(path) as log:
        for event in events:
            log(event)
    return path


def test_a_log_becomes_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(folder / "events.jsonl", TRACE)
    assert run(["trace", str(path), "-o", "t.json"]) == 0
    assert written("t.json") == timeline_of(TRACE)
    assert run(["trace", str(path)]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == timeline_of(TRACE)
    assert err == ""


def test_a_log_may_come_from_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with log(folder / "events.jsonl", TRACE).open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(["trace", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == timeline_of(TRACE)
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["trace", "-"]) == 1
    assert capsys.readouterr().err.startswith("triolet: standard input: it is closed; pipe events in")


@pytest.mark.parametrize(
    ("events", "cut", "told"),
    [(9, 3, "triolet: warning: the last line is cut short and is left out\n"), (8, 1, ""), (0, 0, "")],
)
def test_an_empty_log_gives_an_empty_trace_and_a_line_that_was_cut_off_is_left_out_with_a_warning(
    events: int, cut: int, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a process leaves it that dies; a last line that lacks its end alone is whole."""
    path = log(folder / "events.jsonl", TRACE[:events])
    path.write_text(path.read_text()[: -cut or None])
    assert run(["trace", str(path), "-o", "t.json"]) == 0
    assert written("t.json") == timeline_of(TRACE[: min(events, 8)])
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("nonsense\n", "line 10: 'nonsense' is not JSON (Expecting value"),
        (
            line_of(e.RequestQueued("r", time=-1.0)) + "\n",
            "line 10 is earlier than the line before it: the log has events of",
        ),
        ("\xff\n", "it is not UTF-8 text; the trace has only"),
    ],
)
def test_what_is_no_event_ends_the_trace_and_is_told(
    line: str, told: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is before it is there, with status 1."""
    path = log(folder / "events.jsonl", TRACE[:9])
    path.write_bytes(path.read_bytes() + line.encode("latin-1"))
    assert run(["trace", str(path), "-o", "t.json"]) == 1
    check_format(written("t.json"))
    err = capsys.readouterr().err
    assert err.startswith(f"triolet: {path}: {told}")
    assert err.endswith("the trace has only the events before this\n")


def test_events_that_cannot_be_read_on_end_the_trace_and_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Torn(io.StringIO):
        def __next__(self) -> str:
            if self.tell() == 0:
                return super().__next__()
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stdin", Torn(line_of(TRACE[0]) + "\n"))
    assert run(["trace", "-", "-o", "t.json"]) == 1
    assert written("t.json") == timeline_of(TRACE[:1])
    told = "triolet: standard input: it cannot be read (Input/output error); the trace has only the events before"
    assert capsys.readouterr().err == f"{told} this\n"


def test_a_reader_that_goes_away_ends_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = log(folder / "events.jsonl", TRACE)
    monkeypatch.setattr(sys, "stdout", Broken(BrokenPipeError()))
    assert run(["trace", str(path)]) == 141


# -- the log ---------------------------------------------------------------------------------------------------------


async def test_a_log_holds_every_event_of_an_engine(folder: Path) -> None:
    """Each is in the file when it is over: here before the log is closed."""
    seen: list[e.Event] = []
    sample = min(triolet.demo.samples(), key=lambda sample: sample.duration)
    with EventLog(folder / "events.jsonl") as log:

        def both(event: e.Event) -> None:
            seen.append(event)
            log(event)

        async with Engine(triolet.demo.checkpoint(), config=EngineConfig(observer=both)) as engine:
            await engine.transcribe(sample.path)
        with (folder / "events.jsonl").open() as file:
            assert lines_of(file) == seen
        assert [event.time for event in seen] == sorted(event.time for event in seen)
    check_format(timeline_of(seen))
    log.close()  # again


def lines_of(file: TextIO) -> list[e.Event]:
    return list(read_events(file))


def test_a_log_that_cannot_be_made_is_an_error_of_the_system(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventLog(folder / "absent" / "events.jsonl")
