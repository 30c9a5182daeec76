"""Presses ^C before a chosen line of our code."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

from attrs import define, field


class Line(NamedTuple):
    file: str
    function: str
    number: int


@define
class Tracer:
    """Follows the lines of the files that begin with one of ``ours``, and presses ^C before the line ``target``, the
    ``time``-th time it is reached."""

    ours: tuple[str, ...]
    target: Line | None = None
    time: int = 1
    seen: dict[Line, int] = field(factory=dict)

    def called(self) -> Callable[[FrameType, str, Any], Any]:
        """Returns what Python calls at each call of a function, of which most are not followed: it knows them again by
        their code's identity, and keeps the code."""
        known: dict[int, tuple[Any, CodeType]] = {}

        def call(frame: FrameType, event: str, _: Any) -> Any:
            code = frame.f_code
            if id(code) not in known:
                known[id(code)] = (self.line if self._follows(code) else None, code)
            return known[id(code)][0]

        return call

    def _follows(self, code: CodeType) -> bool:
        if self.target is not None and (code.co_filename, code.co_qualname) != self.target[:2]:
            return False
        return code.co_filename.startswith(self.ours)

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = Line(frame.f_code.co_filename, frame.f_code.co_qualname, frame.f_lineno)
            self.seen[line] = self.seen.get(line, 0) + 1
            if line == self.target and self.seen[line] == self.time:
                sys.settrace(None)  # what comes now is not followed, and takes less time
                signal.raise_signal(signal.SIGINT)
        return self.line

    def follow(self, program: Callable[[], object]) -> BaseException | None:
        """Returns the error that ``program`` ends with."""
        before = sys.gettrace()
        sys.settrace(self.called())
        try:
            program()
        except BaseException as error:  # noqa: BLE001  (judged by the test)
            return error.with_traceback(None)
        finally:
            sys.settrace(before)
        return None

    def moments(self, user: str) -> list[tuple[Line, int]]:
        """Returns every line that was reached, with the first time and the last one. Between the last line of an
        ``async with`` in the file ``user`` and its ``__aexit__`` Python itself has a gap, for trio's own nurseries too
        (PEP 419 would have closed it): that moment is left out."""

        def is_gap(line: Line, time: int) -> bool:
            text = linecache.getline(line.file, line.number).lstrip()
            return time > 1 and line.file == user and text.startswith("async with")

        return sorted((line, time) for line, n in self.seen.items() for time in {1, n} if not is_gap(line, time))


def alone(error: BaseException | None) -> BaseException | None:
    """Returns the one error in a group of groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
