"""Where an engine is in its life, and how messages tell that to its users."""

from __future__ import annotations

import enum

from attrs import frozen

from ...core.errors import EngineStateError
from ...core.log_lines import one_line


class State(enum.Enum):
    """Where an engine is in its life."""

    NEW = "not entered yet"
    OPENING = "still opening"
    OPEN = "open"
    CLOSED = "closed"


@frozen
class Spelling:
    """How users open and close an engine."""

    block: str = "async with Engine(...) as engine"
    close: str = "aclose()"

    def not_open(self, state: State, failure: str | None) -> EngineStateError:
        """The error of callers while the engine is not open. ``failure`` is the type and text of the error that ended
        it, if one did."""
        if state in (State.NEW, State.OPENING):
            return EngineStateError(f"this engine is {state.value}; use it inside its block: {self.block}")
        why = (
            f"its block has ended or {self.close} was called" if failure is None else f"it failed ({one_line(failure)})"
        )
        return EngineStateError(f"this engine is closed: {why}; open a new one: {self.block}")
