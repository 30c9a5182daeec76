"""Removal of what errors would keep alive: locals of a failed call, such as tensors, and the frames of those who
wait."""

from __future__ import annotations

import traceback

from attrs import define

from .errors import Left

_OF_PYTHON = (Exception, BaseExceptionGroup, KeyboardInterrupt, SystemExit, GeneratorExit)  # all but cancellations


def without(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Returns ``error`` without its parts of ``kind``, such as cancellations; ``None``: nothing is left. A group with
    one error left becomes that error."""
    if not isinstance(error, BaseExceptionGroup):
        return None if isinstance(error, kind) else error
    rest = error.split(kind)[1]
    return rest.exceptions[0] if rest is not None and len(rest.exceptions) == 1 else rest


@define(eq=False)
class Untraced:
    """A block that an error of ``kind``, a cancellation, leaves without its traceback. trio's frames below lead by
    f_back to a nursery that fails, and so to the group that will hold this same error: a reference cycle, which would
    keep the callers' frames and their requests until a collection."""

    kind: type[BaseException]

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(self, *end: *Left) -> None:
        if isinstance(end[1], self.kind):
            end[1].__traceback__ = None


def raise_kept(holder: object, name: str) -> None:
    """Raises the error that is the attribute ``name`` of ``holder``, and takes it from there; ``None`` raises nothing.
    No frame has the error in a local then: a frame in its own error's traceback would be a reference cycle."""
    error: BaseException | None = getattr(holder, name)
    setattr(holder, name, None)
    try:
        if error is not None:
            raise error
    finally:
        del error


def clear_frames(error: BaseException, *, outer: BaseException | None = None) -> None:
    """Drops the locals of the frames of ``error``, and of its causes and contexts.

    The context of a cancellation is what the canceller handled, such as the error with which a program leaves a
    nursery. It stays as it is: its frames may be suspended, and Python 3.11 would end their coroutines.

    A frame that still runs keeps its locals, and must drop them itself. The closure of a comprehension, lambda or inner
    function stays too, since the frame of Python 3.11 keeps the function. So pass tensors as arguments.

    Args:
        outer: an error that was being handled before. The frames of ``outer`` and of its causes are not changed.
    """
    seen = {id(outer), id(None)}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        traceback.clear_frames(current.__traceback__)
        pending.append(current.__cause__)
        if isinstance(current, _OF_PYTHON):
            pending.append(current.__context__)
        if isinstance(current, BaseExceptionGroup):
            pending += current.exceptions
