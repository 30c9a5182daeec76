"""Traces as files that ui.perfetto.dev opens: `RecordWriter` and, for the events of a run, `TraceFile`."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
        """Appends ``records``."""
        for record in records:
            self.out.write((",\n" if self._begun else "[\n") + json.dumps(record))
            self._begun = True

    def end(self) -> None:
        """Ends the array."""
        self.out.write("\n]\n" if self._begun else "[]\n")


@define(eq=False)
class TraceFile:
    """The file of ``--trace``, an observer for `EngineConfig`. Only `open` raises; a later error is in `fault`."""

    path: str
    fault: str = field(default="", init=False)
    _timeline: Timeline = field(factory=Timeline, init=False)
    _writer: RecordWriter | None = field(default=None, init=False)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Makes the file anew, and ends the trace after the block, in which the engine runs.

        Raises:
            OutputError: it cannot be made, or another file is there.
        """
        file = open_output(self.path)
        self._writer = RecordWriter(file)
        try:
            yield
        finally:
            self._try(lambda writer: writer.put(self._timeline.end()))
            self._try(lambda writer: writer.end())
            try:
                file.close()
            except OSError as error:
                self._failed(error)

    def __call__(self, event: Event) -> None:
        """Writes the records that ``event`` adds."""
        self._try(lambda writer: writer.put(self._timeline.take(event)))

    def _try(self, write: Callable[[RecordWriter], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except OSError as error:
            self._failed(error)

    def _failed(self, error: OSError) -> None:
        self.fault = self.fault or f"{self.path}: the trace cannot be written ({error.strerror or error})"
        self._writer = None


def open_output(path: str) -> TextIO:
    """A file for a trace, made anew.

    Raises:
        OutputError: it cannot be made, or a file that is no trace is there: a recording, say, whose name was written
            after ``--trace``.
    """
    try:
        if os.path.exists(path) and stat.S_ISREG(os.stat(path).st_mode):
            with open(path, "rb") as found:
                if found.read(1) not in (b"", b"["):
                    raise OutputError(f"{path}: this file is there, and is no trace; give the trace another name")
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path}: the trace cannot be written ({error.strerror or error})") from error
