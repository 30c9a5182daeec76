"""The states of an engine's life, and the errors for calls that the state does not allow."""

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
    """The code with which users open and close an engine, for error messages."""

    block: str = "async with Engine(...) as engine"
    close: str = "aclose()"

    def not_open(self, state: State, failure: str | None) -> EngineStateError:
        """Returns the error for calls while the engine is not open. ``failure`` is the type and text of the error that
        ended the engine, if there is one."""
        if state in (State.NEW, State.OPENING):
            return EngineStateError(f"this engine is {state.value}; use it inside its block: {self.block}")
        why = (
            f"its block has ended or {self.close} was called" if failure is None else f"it failed ({one_line(failure)})"
        )
        return EngineStateError(f"this engine is closed: {why}. Open a new engine: {self.block}")


def foreign(way: str, plain: str) -> EngineStateError:
    """Returns the error for a caller in another loop or thread.

    Args:
        way: the call by which other threads run coroutines in the engine's loop.
        plain: the call by which they run plain functions there.
    """
    return EngineStateError(
        "the engine was used outside of the event loop that it was entered in; allowed: tasks of that loop. From "
        f"another thread, use {way} for coroutines and {plain} for plain functions such as statistics(). In another "
        "loop, open another engine"
    )
