"""`EventLog`: an observer that writes every event of an engine to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from ..core.event_lines import line_of
from ..core.events import Event


class EventLog:
    """An observer that writes each event of one engine to a file, as a line of JSON.

    ::

        with EventLog("events.jsonl") as log:
            async with Engine("path-or-hub-id", config=EngineConfig(observer=log)) as engine:
                ...

    ``triolet trace events.jsonl -o trace.json`` turns the log into a trace that ui.perfetto.dev shows. Each line is
    written at once, so that the log survives if the process dies. The log has the names of requests and the texts of
    errors, which may quote a request. Apart from these quotes it has no prompt, text or audio.

    Args:
        path: the path of the file. An existing file is overwritten.

    Raises:
        OSError: the file cannot be created. If a later write fails, the engine continues without this observer, and the
            error leaves the engine's block.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115  (closed by `close`)

    def __call__(self, event: Event) -> None:
        """Writes ``event``. The engine calls it."""
        self._file.write(f"{line_of(event)}\n")

    def close(self) -> None:
        """Closes the file. Call this after the engine's block; a second call does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
