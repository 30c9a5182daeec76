"""The door of an engine: the bound on pending requests, and the order in which requests are admitted."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator

import trio
from attrs import define, field

from ...core.errors import Overloaded
from ...core.order import order_of
from ...core.tracebacks import Untraced

_Waiter = tuple[int, int, trio.lowlevel.Task]  # order, arrival, the waiting task


@define(eq=False)
class Door:
    """A door that admits at most ``places`` requests at a time. Waiting requests are admitted in the order of
    `order_of` (priority and arrival).

    A place that becomes free is given to the first waiting request at once. No place is therefore free while a request
    waits, and a later request cannot take it, not even with ``wait=False``."""

    places: int
    free: int = field(init=False)
    _waiting: list[_Waiter] = field(factory=list, init=False)
    _arrivals: Iterator[int] = field(factory=itertools.count, init=False)

    @free.default
    def _all(self) -> int:
        return self.places

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    async def enter(self, priority: int) -> None:
        """Waits for a place and takes it. The caller gives the place back with `leave`. A caller that is cancelled has
        no place."""
        with Untraced(trio.Cancelled):
            await trio.lowlevel.checkpoint_if_cancelled()
            arrival = next(self._arrivals)
            if self.free:
                self.free -= 1
                await trio.lowlevel.cancel_shielded_checkpoint()
            else:
                await self._wait(order_of(priority, arrival), arrival)

    def enter_nowait(self) -> None:
        """Takes a place if one is free.

        Raises:
            Overloaded: no place is free.
        """
        if not self.free:
            raise Overloaded(
                f"{self.places} requests are pending already, the most that are allowed; wait (wait=True), retry "
                "later, or give a larger EngineConfig(max_pending=...)"
            )
        next(self._arrivals)
        self.free -= 1

    def leave(self) -> None:
        """Gives a place back."""
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop(0)[2])  # the waiter has the place now, even if it is cancelled
            return
        assert self.free < self.places, "a place is given back twice"
        self.free += 1

    async def _wait(self, order: int, arrival: int) -> None:
        waiter = (order, arrival, trio.lowlevel.current_task())
        insort(self._waiting, waiter)

        def withdraw(_: object) -> trio.lowlevel.Abort:
            self._waiting.remove(waiter)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(withdraw)
