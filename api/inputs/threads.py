"""Blocking work in a worker thread that keeps nothing of it, whether it returns or raises."""

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
    """What ``work()`` returns or raises, in a worker thread; ``limiter`` and ``abandon_on_cancel`` are trio's.

    An error that comes through `trio.to_thread.run_sync` itself is held by a frame of its own traceback: a reference
    cycle, in which all that the frames know (images of megabytes, say) waits for a collection. And the thread holds
    what it was given, and its answer, until it is next run. So both travel in a call that is emptied on the way.
    """
    call = _Call(work)
    del work
    try:
        await trio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
    except trio.Cancelled as cancelled:
        cancelled.__traceback__ = None  # see `Mailbox.__anext__`
        raise
    if call.errors:
        raise call.errors.pop()
    return call.results.pop()


@define(eq=False)
class _Call(Generic[_Result]):
    work: Callable[[], _Result] | None
    results: list[_Result] = field(factory=list, init=False)  # one at most, as of errors
    errors: list[BaseException] = field(factory=list, init=False)

    def run(self) -> None:
        work, self.work = self.work, None
        assert work is not None, "a call is run once"
        try:
            self.results.append(work())
        except BaseException as error:  # noqa: BLE001  (raised by `run_in_thread`)
            del work  # this frame is in the traceback too, and still runs: nobody else clears it
            clear_frames(error)
            self.errors.append(error)
