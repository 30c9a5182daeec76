"""`Emit`: passes every event to the checker, the user's observer and the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import trio
from attrs import define, field

from ..core import events
from ..core.errors import InvariantViolation
from ..core.log_lines import Line
from ..core.trace import TraceChecker


@define(eq=False)
class Emit:
    """Passes events to the checker, the observer and the log. An observer that raises gets no more events. Its error is
    raised at the end of the engine's block, so that the error cannot cut a stage of the teardown short. A broken
    promise stops the engine."""

    observer: Callable[[events.Event], None] | None
    checker: TraceChecker | None
    stop: trio.Event
    body: trio.CancelScope
    error: BaseException | None = None
    ended: Counter[str] = field(factory=Counter, init=False)  # requests by outcome
    _log: logging.Logger | None = field(factory=lambda: logging.getLogger("triolet.engine"), init=False)

    @property
    def is_followed(self) -> bool:
        """True if a checker or an observer gets the events."""
        return self.observer is not None or self.checker is not None

    def __call__(self, event: events.Event) -> None:
        line = event.line()
        if line is None and not self.is_followed:
            return
        # changed in place: the event was made for this call, and nothing else has read it yet
        object.__setattr__(event, "time", trio.current_time())
        if self.checker is not None:
            self._check(lambda checker: checker(event))
        if self.observer is not None:
            self._observe(self.observer, event)
        self.write(line)
        if isinstance(event, events.RequestEnded):
            self.ended[event.outcome] += 1

    def write(self, line: Line | None) -> None:
        """Writes a line to the log. A user's log handler that raises is treated as an observer that raises."""
        if line is None or self._log is None:
            return
        try:
            self._log.log(*line)
        except BaseException as error:  # noqa: BLE001  (raised at the end of the block)
            error.add_note("raised by a handler or filter of the log 'triolet.engine', which must not raise")
            self.error, self._log = self.error or error, None

    def mute(self) -> None:
        """Drops all further events, and forgets an error."""
        self.observer = self.checker = self._log = self.error = None

    def end(self) -> None:
        """Lets the checker check the end of the engine."""
        if self.checker is not None:
            self._check(TraceChecker.end)

    def _observe(self, observer: Callable[[events.Event], None], event: events.Event) -> None:
        try:
            observer(event)
        except BaseException as error:  # noqa: BLE001  (raised at the end of the block)
            error.add_note("raised by EngineConfig(observer=...), which must not raise")
            self.error, self.observer = self.error or error, None

    def _check(self, check: Callable[[TraceChecker], None]) -> None:
        assert self.checker is not None, "nobody checks"
        try:
            check(self.checker)
        except InvariantViolation as violation:
            self.error, self.checker = violation, None  # further violations would follow from this one
            self.stop.set()
            self.body.cancel()
