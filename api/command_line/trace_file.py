"""Traces as files that ui.perfetto.dev opens: `write_records` and, for the events of a run, `TraceFile`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from typing import TextIO

from attrs import define, field

from ...core.events import Event
from ...core.timeline import Record, Timeline
from .terminal import OutputError


@define(eq=False)
class RecordWriter:
    """Writes records as one JSON array to ``out``, which can be read at any time: the array's end may be missing.

    `put` and `end` raise the errors of ``out``.
    """

    out: TextIO
    _begun: bool = field(default=False, init=False)

    def put(self, records: Iterable[Record]) -> None:
        """Writes ``records`` behind the others."""
        for record in records:
            self.out.write(",\n" if self._begun else "[\n")
            self.out.write(json.dumps(record))
            self._begun = True

    def end(self) -> None:
        """Ends the array."""
        self.out.write("\n]\n" if self._begun else "[]\n")


@define(eq=False)
class TraceFile:
    """The file of ``--trace``, an observer for `EngineConfig`. It never raises: what went wrong is in `fault`."""

    path: str
    fault: str = field(default="", init=False)
    _timeline: Timeline = field(factory=Timeline, init=False)
    _file: TextIO | None = field(default=None, init=False)
    _writer: RecordWriter | None = field(default=None, init=False)

    def open(self) -> None:
        """Makes the file anew.

        Raises:
            OutputError: it cannot be made, or another file is there.
        """
        self._file = open_output(self.path)
        self._writer = RecordWriter(self._file)

    def __call__(self, event: Event) -> None:
        """Writes what ``event`` adds. The engine calls it."""
        self._put(self._timeline.take(event))

    def close(self) -> None:
        """Ends the trace, behind the engine's block."""
        self._put(self._timeline.end())
        try:
            if self._writer is not None:
                self._writer.end()
            if self._file is not None:
                self._file.close()
        except OSError as error:
            self._failed(error)

    def _put(self, records: Iterable[Record]) -> None:
        if self._writer is None:
            return
        try:
            self._writer.put(records)
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.fault = self.fault or f"{self.path}: the trace cannot be written ({error.strerror or error})"
        self._writer = None


def open_output(path: str) -> TextIO:
    """A file for a trace, made anew.

    Raises:
        OutputError: it cannot be made, or a file that is no trace is there: a recording, say, whose name was written
            behind ``--trace``.
    """
    try:
        if os.path.exists(path) and stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as found:
                if found.read(1) not in (b"", b"["):
                    raise OutputError(f"{path}: this file is there, and is no trace; give the trace another name")
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: the trace cannot be written ({error.strerror or error})") from error
