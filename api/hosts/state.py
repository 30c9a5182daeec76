"""The states of an engine's life, and the errors that tell its users."""

from __future__ import annotations

import enum

from attrs import frozen

from ...core.errors import EngineStateError
from ...core.log_lines import one_line


class State(enum.Enum):
    """The states of an engine, in the order of its life."""

    NEW = "not entered yet"
    OPENING = "still opening"
    OPEN = "open"
    CLOSED = "closed"


@frozen
class Spelling:
    """The words by which users open and close an engine."""

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


def foreign(way: str, plain: str) -> EngineStateError:
    """The error of a caller in another loop or thread. ``way`` is the call that leads to the engine's loop for what is
    awaited, ``plain`` the one for all else."""
    return EngineStateError(
        f"the engine was used outside of the event loop that it was entered in; allowed: tasks of that loop. From "
        f"another thread ask it by {way}, and by {plain} for what is not awaited, as statistics(); in another loop "
        f"open an engine of its own"
    )
