"""`EventLog`: an observer that keeps every event of an engine in a file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from ..core.event_lines import line_of
from ..core.events import Event


class EventLog:
    """Writes each event as a line of JSON.

    ::

        with EventLog("events.jsonl") as log:
            async with Engine("path-or-hub-id", config=EngineConfig(observer=log)) as engine:
                ...

    ``triolet trace events.jsonl -o trace.json`` makes of it what ui.perfetto.dev draws. Every line is in the file when
    the event is over, so that a process that dies leaves its log. A log is of one engine. It holds names of requests
    and texts of errors, which may quote what was asked, and besides no prompt, text or audio.

    Args:
        path: of the file, which is made anew.

    Raises:
        OSError: the file cannot be made. One that cannot be written is an observer that raises: the engine goes on
            without it, and its error leaves the engine's block.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (closed by `close`)

    def __call__(self, event: Event) -> None:
        """Writes ``event``. The engine calls it."""
        self._file.write(f"{line_of(event)}\n")

    def close(self) -> None:
        """Closes the file, behind the engine's block. May be called again."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
