"""The command ``triolet trace``: makes a trace of an event log."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import TextIO

import click

from ...core.errors import InvalidRequest
from ...core.event_lines import event_of, read_events
from ...core.timeline import Timeline
from .given import check_readable
from .pages import Page, files
from .terminal import FAILED, STDIN, OutputError, WrongFile, complain, shown, stdout
from .trace_file import RecordWriter, open_output

_EXAMPLES = (
    ("triolet trace events.jsonl -o trace.json", ""),
    ("ssh server cat events.jsonl | triolet trace - -o trace.json", ""),
    ("triolet transcribe talk.mp3 --model base --trace trace.json", "without a log: the trace of this run"),
)


@click.command(cls=Page, examples=_EXAMPLES, short_help="Make a trace of an event log, for ui.perfetto.dev.")
@click.argument("log", metavar="EVENTS", shell_complete=files)
@click.option(
    "--output",
    "-o",
    default="-",
    metavar="FILE",
    shell_complete=files,
    help="Where to write it. Default: standard output.",
)
def trace(log: str, output: str) -> int:
    """Make a trace of EVENTS, which triolet.EventLog has written; - reads standard input.

    The trace is in Chrome's Trace Event Format: open it in ui.perfetto.dev or chrome://tracing. It has a track for each
    request with its stages, one of the steps and one of the encode batches, and counters of requests, pages and bytes
    of the encoder cache. transcribe, generate and embed write the trace of a run themselves, with --trace FILE.
    """
    check_readable(log)
    with ExitStack() as stack:
        out = stdout() if output == "-" else stack.enter_context(open_output(output))
        lines = _stdin() if log == STDIN else stack.enter_context(_opened(log))
        try:
            fault = _convert(lines, RecordWriter(out))
            out.flush()
        except BrokenPipeError:  # `main` gives it its status
            raise
        except OSError as error:
            raise OutputError(f"the trace cannot be written ({error.strerror or error})") from error
    if fault:
        complain(f"{shown(log)}: {fault}")
    return FAILED if fault else 0


def _convert(lines: Iterable[str], writer: RecordWriter) -> str:
    """Writes the trace. Returns the reason why it ends before its events do; empty: it does not."""
    timeline, fault = Timeline(), ""
    try:
        for event in read_events(_whole(_read(lines))):
            writer.put(timeline.take(event))
    except InvalidRequest as error:
        fault = f"{error}; the trace has what is before it"
    except UnicodeDecodeError:
        fault = "it is no UTF-8 text; the trace has what is before it"
    writer.put(timeline.end())
    writer.end()
    return fault


def _read(lines: Iterable[str]) -> Iterator[str]:
    """The lines. An error of the system here is one of the events, not of the trace."""
    try:
        yield from lines
    except OSError as error:
        raise InvalidRequest(f"it cannot be read ({error.strerror or error})") from error


def _whole(lines: Iterable[str]) -> Iterator[str]:
    """The lines, without a last one that was cut off when its process died."""
    for line in lines:
        if not line.endswith("\n"):
            try:
                event_of(line)
            except InvalidRequest:
                complain("warning: the last line is cut off, and left out")
                return
        yield line


def _opened(name: str) -> TextIO:
    try:
        return open(name, encoding="utf-8")
    except OSError as error:
        raise WrongFile(f"{name}: it cannot be read ({error.strerror or error})") from error


def _stdin() -> Iterable[str]:
    if sys.stdin is None or sys.stdin.closed:
        raise WrongFile(f"{shown(STDIN)}: it is closed; pipe events in, or redirect them from a file (< FILE)")
    return sys.stdin
