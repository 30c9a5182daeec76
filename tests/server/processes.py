"""Processes of tests: what they say is read as it comes, and waited for; none outlives its block."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

from attrs import define, field

from .served import PATIENCE


@define(eq=False)
class Running:
    """A process, and the lines of its stderr so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(factory=list, init=False)
    _told: SimpleQueue[str | None] = field(factory=SimpleQueue, init=False)  # ``None``: there will be no more
    _reader: threading.Thread = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def until(self, words: str) -> str:
        """The next line that has ``words`` in it; others, of warnings say, may come before."""
        while (line := self._told.get(timeout=PATIENCE)) is not None:
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}, with {self.end()}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """The status that it ends with, and all that it has said."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status, "".join(self.lines)

    def _read(self) -> None:
        assert self.process.stderr is not None, "it was asked for"
        for line in self.process.stderr:
            self.lines.append(line)
            self._told.put(line)
        self._told.put(None)


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[Running]:
    """Runs ``command`` in ``folder``, for the block."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            yield Running(process)
        finally:
            process.kill()
