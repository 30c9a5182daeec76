"""Traces that ui.perfetto.dev opens: the command ``triolet trace``, and the file of ``--trace``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TextIO

import click
from attrs import define, field

from ...core.errors import InvalidRequest
from ...core.event_lines import event_of, read_events
from ...core.events import Event
from ...core.timeline import Record, Timeline
from .given import STDIN, check_readable, opened_stdin, shown
from .pages import FILE, HelpPage, files
from .terminal import FAILED, OutputError, complain, stdout

_EXAMPLES = (
    ("triolet trace events.jsonl -o trace.json", ""),
    ("ssh server cat events.jsonl | triolet trace - -o trace.json", ""),
    ("triolet transcribe talk.mp3 --model base --trace trace.json", "the trace of a run, without a log"),
)


@click.command(cls=HelpPage, examples=_EXAMPLES, short_help="Make a trace of an event log, for ui.perfetto.dev.")
@click.argument("log", metavar="EVENTS", shell_complete=files)
@click.option("--output", "-o", default="-", **FILE, help="Write the trace into FILE. Default: standard output.")
def trace(log: str, output: str) -> int:
    """Make a trace of EVENTS, a log that triolet.EventLog has written. - is standard input.

    The trace is in Chrome's Trace Event Format; ui.perfetto.dev and chrome://tracing show it. It has a track for the
    stages of each request, one for the steps and one for the encode batches. Counters show requests, pages and the
    bytes of the encoder cache. The commands transcribe, generate and embed write a trace themselves with --trace FILE.
    """
    check_readable(log)
    with ExitStack() as stack:
        out = stdout() if output == "-" else stack.enter_context(open_output(output))
        try:
            fault = _convert(_lines(log), RecordWriter(out))
            out.flush()
        except BrokenPipeError:  # `main` maps it to an exit status
            raise
        except OSError as error:
            raise OutputError(f"the trace cannot be written ({error.strerror or error})") from error
    if fault:
        complain(f"{shown(log)}: {fault}; the trace has only the events before this")
    return FAILED if fault else 0


def _convert(lines: Iterable[str], writer: RecordWriter) -> str:
    """Writes the trace. Returns the reason why the trace lacks the end of the log; empty if it is complete."""
    timeline, fault = Timeline(), ""
    try:
        for event in read_events(lines):
            writer.put(timeline.take(event))
    except InvalidRequest as error:
        fault = str(error)
    except UnicodeDecodeError:
        fault = "it is not UTF-8 text"
    writer.put(timeline.end())
    writer.end()
    return fault


def _lines(name: str) -> Iterator[str]:
    """The lines of the log, without a last line that was cut off when the engine's process died. Raises
    `InvalidRequest` if the log cannot be read: an OSError would look like an error of writing the trace."""
    try:
        with ExitStack() as stack:
            file = opened_stdin("events") if name == STDIN else stack.enter_context(open(name, encoding="utf-8"))
            for line in file:
                if not line.endswith("\n"):
                    try:
                        event_of(line)
                    except InvalidRequest:
                        complain("warning: the last line is cut short and is left out")
                        return
                yield line
    except OSError as error:
        raise InvalidRequest(f"it cannot be read ({error.strerror or error})") from error


# ---- files -----------------------------------------------------------------------------------------------------------


@define(eq=False)
class RecordWriter:
    """Writes records to ``out`` as one JSON array. The file can be read at any time, since readers of traces accept an
    array whose end is missing.

    `put` and `end` raise the errors of ``out``.
    """

    out: TextIO
    _begun: bool = field(default=False, init=False)

    def put(self, records: Iterable[Record]) -> None:
        """Appends ``records``."""
        for record in records:
            self.out.write((",\n" if self._begun else "[\n") + json.dumps(record))
            self._begun = True

    def end(self) -> None:
        """Ends the array."""
        self.out.write("\n]\n" if self._begun else "[]\n")


@define(eq=False)
class TraceFile:
    """The file of ``--trace``: an observer for `EngineConfig`. Only `open` raises; later errors are kept in `fault`."""

    path: str
    fault: str = field(default="", init=False)
    _timeline: Timeline = field(factory=Timeline, init=False)
    _writer: RecordWriter | None = field(default=None, init=False)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Creates or empties the file for a block in which the engine runs. The end of the block ends the trace.

        Raises:
            OutputError: the file cannot be made, or a file that is not a trace has its name.
        """
        file = open_output(self.path)
        self._writer = RecordWriter(file)
        try:
            yield
        finally:
            self._put(self._timeline.end(), last=True)
            with suppress(OSError):  # the error is in `fault`
                file.close()

    def __call__(self, event: Event) -> None:
        """Writes the records that ``event`` adds."""
        self._put(self._timeline.take(event))

    def _put(self, records: Iterable[Record], *, last: bool = False) -> None:
        if self._writer is None:
            return
        try:
            self._writer.put(records)
            if last:
                self._writer.end()
                self._writer.out.flush()
        except OSError as error:
            self.fault = f"{self.path}: the trace cannot be written ({error.strerror or error})"
            self._writer = None


def open_output(path: str) -> TextIO:
    """Opens an empty file for a trace.

    Raises:
        OutputError: the file cannot be made, or a file that is not a trace has its name, such as a recording whose name
            was given after ``--trace`` by mistake.
    """
    try:
        if os.path.isfile(path):
            with open(path, "rb") as found:
                if found.read(1) not in (b"", b"["):
                    raise OutputError(f"{path}: this file exists and is not a trace; give the trace another name")
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: the trace cannot be written ({error.strerror or error})") from error
