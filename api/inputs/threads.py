"""Runs blocking work in a worker thread. After the work has returned or raised, the thread keeps none of its
objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import trio
from attrs import define, field

from ...core.tracebacks import Untraced, clear_frames

_Result = TypeVar("_Result")


async def run_in_thread(
    work: Callable[[], _Result],
    *,
    short: bool = False,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> _Result:
    """Runs ``work()`` in a worker thread; returns its result or raises its error. ``limiter`` and ``abandon_on_cancel``
    are trio's. ``short``: the work takes less time than a thread costs, so it is done at once in the event loop.

    If `trio.to_thread.run_sync` itself raises an error, a frame of the error's own traceback holds it. This reference
    cycle would keep all locals of the frames (images of megabytes, for example) until a garbage collection. The thread
    would keep its work and its answer until it runs again. So both are passed in a `_Call`, which is emptied on the
    way.
    """
    if short:
        return work()
    call = _Call(work)
    del work
    with Untraced(trio.Cancelled):
        await trio.to_thread.run_sync(call.run, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
    if call.errors:
        raise call.errors.pop()
    return call.results.pop()


@define(eq=False)
class _Call(Generic[_Result]):
    work: Callable[[], _Result] | None
    results: list[_Result] = field(factory=list, init=False)  # at most one result or one error
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
