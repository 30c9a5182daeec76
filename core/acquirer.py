"""Who acquires encoder outputs next, and who of those that wait lacks nothing but room.

A waiting sequence *seeks* until it has acquired what it needs to start; then it is *ahead*, and *ready* when it may
read all of it. One that needs no encoder output is ready at once. A running sequence that has read what it held *wants*
its next items.
"""

from __future__ import annotations

from attrs import define, field

from .holds import EncoderHolds
from .limits import PlannerLimits
from .ordered import Ordered
from .room import Room
from .sequence import Phase, Sequence


@define(eq=False)
class Acquirer:
    """The queues for encoder outputs. ``ready``: they wait, and lack nothing but room."""

    limits: PlannerLimits
    room: Room
    holds: EncoderHolds
    ready: Ordered[Sequence] = field(factory=Ordered, init=False)
    _seeking: Ordered[Sequence] = field(factory=Ordered, init=False)  # they wait, and have not acquired what they need
    _ahead: Ordered[Sequence] = field(factory=Ordered, init=False)  # that have acquired, and wait
    _wanting: Ordered[Sequence] = field(factory=Ordered, init=False)  # running, in need of their next items
    _stale: bool = field(default=False, init=False)  # something happened by which somebody may acquire

    def has_what_it_needs(self, sequence: Sequence) -> bool:
        """Whether what made it ready is there still: its cross KV may have lost its slot, and the cached pages that
        covered some of its items may have been taken."""
        item = sequence.cross_item
        if item is not None:
            return self.room.slots.resident(item.key) or self.holds.holds_all(sequence)
        if not sequence.placed:
            return True
        first = next(sequence.placed.needed(self._start(sequence)), None)
        return first is None or first.key in self.holds.held(sequence)

    def _start(self, sequence: Sequence) -> int:
        """The first position that it must have fed."""
        return len(self.room.cached_pages(sequence)) * self.limits.page_size

    # -- facts -------------------------------------------------------------------------------------------------------

    def granted(self, holder: str) -> None:
        """``holder`` may read its encoder output. An unknown holder has withdrawn meanwhile."""
        sequence = self.holds.ready(holder)
        if sequence is not None and sequence.phase is Phase.WAITING:
            self.ready.put(sequence, sequence.key)

    def refused(self, holder: str) -> Sequence | None:
        """The encoder cache will not give the output. Whose acquire it was; ``None``: withdrawn meanwhile."""
        self._stale = True
        return self.holds.refused(holder)

    def waits(self, sequence: Sequence) -> None:
        """Looks at a waiting sequence anew: whether it lacks nothing but room. One that has acquired keeps that, except
        placed items, of which it may need others now."""
        if not sequence.request.items:
            self.ready.put(sequence, sequence.key)
            return
        if sequence.placed:
            self.release(sequence)
        holds, ready = bool(self.holds.keys(sequence)), self.holds.holds_all(sequence)
        for queue, member in ((self._ahead, holds), (self._seeking, not holds), (self.ready, ready)):
            if member:
                queue.put(sequence, sequence.key)
            else:
                queue.discard(sequence)
        self._stale = True

    def waits_no_more(self, sequence: Sequence) -> None:
        """It starts, or has ended."""
        for queue in (self.ready, self._seeking, self._ahead):
            queue.discard(sequence)
        self._stale = True

    def has_read(self, sequence: Sequence) -> None:
        """More of its positions are fed, or found in cached pages: it gives back the items that lie there."""
        if self.holds.release_read(sequence) and sequence.phase is Phase.RUNNING:
            self._wanting.put(sequence, sequence.key)
        self._stale = True

    def reads_no_more(self, sequence: Sequence) -> None:
        """It runs no longer."""
        self._wanting.discard(sequence)

    def release(self, sequence: Sequence) -> None:
        """It gives back what it holds, and withdraws what it waits for."""
        if self.holds.keys(sequence):
            self.holds.release_all(sequence)
            self._stale = True

    # -- decisions ---------------------------------------------------------------------------------------------------

    def acquire_next(self) -> None:
        """Running sequences acquire their next items, and those at the head of the queue what they need to start, in
        order and as far as there is room; for an earlier one the latest that wait give up theirs."""
        if not self._stale:
            return
        self._stale = False
        while (sequence := self._wanting.first()) is not None:
            if not self._try_acquire(sequence, sequence.fed):
                return
            self._wanting.discard(sequence)
        while (sequence := self._seeking.first()) is not None:
            last = self._ahead.last()
            if last is not None and len(self._ahead) >= self.limits.acquire_ahead and last.key < sequence.key:
                return
            if not self._try_acquire(sequence, self._start(sequence)):
                return
            self._seeking.discard(sequence)

    def _try_acquire(self, sequence: Sequence, start: int) -> bool:
        """Acquires what ``sequence`` needs to go on from position ``start``; one that waits and needs nothing is
        ready."""
        item = sequence.cross_item
        if item is None:
            items = self.holds.group(sequence.placed.needed(start))
        else:
            items = [] if self.room.slots.resident(item.key) else [item]
        while not self.holds.fits(items):
            if not self._withdraw_for(sequence):
                return False
        if items:
            self.holds.acquire(sequence, items)
        if sequence.phase is Phase.WAITING:
            (self._ahead if items else self.ready).put(sequence, sequence.key)
        return True

    def _withdraw_for(self, sequence: Sequence) -> bool:
        """The last one that has acquired and waits gives that up, if ``sequence`` runs or comes before it."""
        last = self._ahead.last()
        if last is None or (sequence.phase is Phase.WAITING and last.key < sequence.key):
            return False
        self.holds.release_all(last)
        self._ahead.discard(last)
        self.ready.discard(last)
        self._seeking.put(last, last.key)
        return True
