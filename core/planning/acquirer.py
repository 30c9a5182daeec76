"""The order in which sequences acquire encoder outputs, and the waiting sequences that lack nothing but room.

A waiting sequence *seeks* until it has acquired the encoder outputs that it needs to start. The sequence is *ahead*
from then on, and *ready* once it holds them all. A sequence that needs no encoder output is ready at once. A running
sequence that has read its outputs *wants* its next items.
"""

from __future__ import annotations

from attrs import define, field

from ..ordered import Ordered
from .holds import EncoderHolds
from .limits import PlannerLimits
from .room import Room
from .sequence import Phase, Sequence


@define(eq=False)
class Acquirer:
    """The queues for encoder outputs. ``ready`` has the waiting sequences that lack nothing but room."""

    limits: PlannerLimits
    room: Room
    holds: EncoderHolds
    ready: Ordered[Sequence] = field(factory=Ordered, init=False)
    _seeking: Ordered[Sequence] = field(factory=Ordered, init=False)  # waiting, have not acquired what they need
    _ahead: Ordered[Sequence] = field(factory=Ordered, init=False)  # waiting, have acquired what they need
    _wanting: Ordered[Sequence] = field(factory=Ordered, init=False)  # running, need their next items
    _stale: bool = field(default=False, init=False)  # an acquire may have become possible since the last decision

    def has_what_it_needs(self, sequence: Sequence) -> bool:
        """True if the sequence is still ready. Since it became ready, its cross KV slot may have been evicted, or
        cached pages that made an encoder output unnecessary.
        """
        item = sequence.cross_item
        if item is not None:
            return self.room.slots.resident(item.key) or self.holds.holds_all(sequence)
        if not sequence.placeholders:
            return True
        first = next(sequence.placeholders.needed(self._start(sequence)), None)
        return first is None or first.key in self.holds.held(sequence)

    def _start(self, sequence: Sequence) -> int:
        """Returns the first position of the sequence that must be fed."""
        return len(self.room.cached_pages(sequence)) * self.limits.page_size

    # -- facts -------------------------------------------------------------------------------------------------------

    def granted(self, holder: str) -> None:
        """Notes that ``holder`` holds its encoder output now. An unknown holder has withdrawn its acquire."""
        sequence = self.holds.ready(holder)
        if sequence is not None and sequence.phase is Phase.WAITING:
            self.ready.put(sequence, sequence.key)

    def refused(self, holder: str) -> Sequence | None:
        """Notes that the encoder cache refuses the acquire. Returns the sequence; ``None``: the sequence has withdrawn
        the acquire."""
        self._stale = True
        return self.holds.refused(holder)

    def waits(self, sequence: Sequence) -> None:
        """Puts a waiting sequence into the queues that it belongs to. The sequence keeps an output that it has acquired
        for cross-attention. It releases items with placeholders, since it may need others now.
        """
        if not sequence.request.items:
            self.ready.put(sequence, sequence.key)
            return
        if sequence.placeholders:
            self.release(sequence)
        holds, ready = bool(self.holds.keys(sequence)), self.holds.holds_all(sequence)
        for queue, member in ((self._ahead, holds), (self._seeking, not holds), (self.ready, ready)):
            if member:
                queue.put(sequence, sequence.key)
            else:
                queue.discard(sequence)
        self._stale = True

    def waits_no_more(self, sequence: Sequence) -> None:
        """Removes a sequence that starts, or has ended, from the queues."""
        for queue in (self.ready, self._seeking, self._ahead):
            queue.discard(sequence)
        self._stale = True

    def has_read(self, sequence: Sequence) -> None:
        """Notes that more positions of the sequence are fed or cached. The sequence releases the items that lie before
        these positions."""
        if self.holds.release_read(sequence) and sequence.phase is Phase.RUNNING:
            self._wanting.put(sequence, sequence.key)
        self._stale = True

    def reads_no_more(self, sequence: Sequence) -> None:
        """Notes that the sequence no longer runs."""
        self._wanting.discard(sequence)

    def release(self, sequence: Sequence) -> None:
        """Releases the outputs that the sequence holds, and withdraws its open acquires."""
        if self.holds.keys(sequence):
            self.holds.release_all(sequence)
            self._stale = True

    # -- decisions ---------------------------------------------------------------------------------------------------

    def acquire_next(self) -> None:
        """Acquires the next items of running sequences, then the items that the first waiting sequences need to start,
        in order and while the encoder cache has room. If room is lacking, the last waiting sequences give up their
        outputs for an earlier sequence."""
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
        """Acquires the items that ``sequence`` needs to go on from position ``start``. False if there is no room. A
        waiting sequence that needs no item becomes ready."""
        item = sequence.cross_item
        if item is None:
            items = self.holds.group(sequence.placeholders.needed(start))
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
        """Makes the last waiting sequence give up the outputs that it has acquired, unless ``sequence`` comes after it.
        False if no sequence gives up any."""
        last = self._ahead.last()
        if last is None or (sequence.phase is Phase.WAITING and last.key < sequence.key):
            return False
        self.holds.release_all(last)
        self._ahead.discard(last)
        self.ready.discard(last)
        self._seeking.put(last, last.key)
        return True
