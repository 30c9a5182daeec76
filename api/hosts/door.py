"""The door of an engine: how many requests may be inside, and who comes in next."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Iterator

import trio
from attrs import define, field

from ...core.errors import Overloaded
from ...core.order import order_of

_Waiter = tuple[int, int, trio.lowlevel.Task]  # order, arrival, who waits


@define(eq=False)
class Door:
    """At most ``places`` requests are inside. Those that wait come in by `order_of` (priority and arrival), and a place
    that becomes free is handed to the first of them at once: while somebody waits no place is free, so nobody who comes
    later can take it, ``wait=False`` or not."""

    places: int
    free: int = field(init=False)
    _waiting: list[_Waiter] = field(factory=list, init=False)
    _arrivals: Iterator[int] = field(factory=itertools.count, init=False)

    @free.default
    def _all(self) -> int:
        return self.places

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    async def enter(self, priority: int) -> None:
        """Returns with a place, for the caller to give back by `leave`. Who is cancelled has none."""
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            arrival = next(self._arrivals)
            if self.free:
                self.free -= 1
                await trio.lowlevel.cancel_shielded_checkpoint()
            else:
                await self._wait(order_of(priority, arrival), arrival)
        except trio.Cancelled as cancelled:
            cancelled.__traceback__ = None  # see `Mailbox.wait`
            raise

    def enter_nowait(self) -> None:
        """Takes a place if one is free.

        Raises:
            Overloaded: none is.
        """
        if not self.free:
            raise Overloaded(
                f"{self.places} requests are pending already, the most that are allowed; wait (wait=True), retry "
                "later, or raise EngineConfig(max_pending=...)"
            )
        next(self._arrivals)
        self.free -= 1

    def leave(self) -> None:
        """Gives a place back."""
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.pop(0)[2])  # from here on it has the place, cancelled or not
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
