"""Errors without the locals of the frames they came through: those would keep a failed call's tensors alive."""

from __future__ import annotations

import traceback


def without(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """``error`` without what is of ``kind``, as a cancellation is; a group of one is what it holds."""
    if not isinstance(error, BaseExceptionGroup):
        return None if isinstance(error, kind) else error
    rest = error.split(kind)[1]
    return rest.exceptions[0] if rest is not None and len(rest.exceptions) == 1 else rest


def clear_frames(error: BaseException, *, outer: BaseException | None = None) -> None:
    """Drops the locals of the frames that ``error`` came through, and of those it was raised from.

    A frame that still runs stays as it is; it drops its own names. What a comprehension, lambda or inner function takes
    from the function around it stays as well, since (in Python 3.11) its frame keeps the function and so the closure:
    where tensors are about, hand them over as arguments.

    Args:
        outer: an error that was being handled before; it and what is behind it are somebody else's.
    """
    seen = {id(outer), id(None)}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
