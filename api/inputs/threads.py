"""Blocking work in a worker thread, which keeps no object of the work when that returns or raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio
from attrs import define, field

from ...core.frames import clear_frames

_Result = TypeVar("_Result")


async def run_in_thread(
    work: Callable[[], _Result], *, limiter: trio.CapacityLimiter | None = None, abandon_on_cancel: bool = False
) -> _Result:
    """Runs ``work()`` in a worker thread; returns its result or raises its error. ``limiter`` and ``abandon_on_cancel``
    are trio's.

    An error that `trio.to_thread.run_sync` itself raises is held by a frame of its own traceback: a reference cycle,
    which keeps all locals of the frames (images of megabytes, say) until a collection. The thread, too, keeps its work
    and its answer until it next runs. So both travel in a `_Call`, which is emptied on the way.
    """
    call = _Call(work)
    del work
    try:
        await trio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
    except trio.Cancelled as cancelled:
        cancelled.__traceback__ = None  # see `Mailbox.wait`
        raise
    if call.errors:
        raise call.errors.pop()
    return call.results.pop()


@define(eq=False)
class _Call(Generic[_Result]):
    work: Callable[[], _Result] | None
    results: list[_Result] = field(factory=list, init=False)  # at most one; so are the errors
    errors: list[BaseException] = field(factory=list, init=False)

    def run(self) -> None:
        work, self.work = self.work, None
        assert work is not None, "a call is run once"
        try:
            self.results.append(work())
        except BaseException as error:  # noqa: BLE001  (raised by `run_in_thread`)
            del work  # this frame is in the traceback too, and `clear_frames` cannot clear a running frame
            clear_frames(error)
            self.errors.append(error)
