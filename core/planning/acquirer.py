"""The encoder outputs that sequences acquire and hold, and the rule that keeps sequences from waiting for each other.

To *acquire* is to request an output from the encoder cache, to *hold* is to have it, and to *release* is to give it
back or to withdraw the acquire.

A waiting sequence *seeks* until it has acquired the encoder outputs that it needs to start. The sequence is *ahead*
from then on, and *ready* once it holds them all. A sequence that needs no encoder output is ready at once. A running
sequence that has read its outputs *wants* its next items.

The planner checks for room before it acquires an output: all acquired outputs fit the encoder cache together. So no
acquire waits for the release of another. The order in which the encoder cache serves acquires would not suffice: a
waiting sequence could hold the room that a running one needs to go on, and wait for the place of that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attrs import define, field

from ..events import EncoderWaitOver
from ..ordered import Ordered
from ..request import EncoderItem
from .actions import Acquire, Action, Release
from .limits import PlannerLimits
from .room import Room
from .sequence import EncoderHold, Phase, Sequence


@define(eq=False)
class Acquirer:
    """The queues for encoder outputs, and the room that acquired outputs take in the encoder cache. ``ready`` has the
    waiting sequences that lack nothing but room. Acquires and releases are appended to ``actions``."""

    limits: PlannerLimits
    room: Room
    actions: list[Action]
    ready: Ordered[Sequence] = field(factory=Ordered, init=False)
    _seeking: Ordered[Sequence] = field(factory=Ordered, init=False)  # waiting, have not acquired what they need
    _ahead: Ordered[Sequence] = field(factory=Ordered, init=False)  # waiting, have acquired what they need
    _wanting: Ordered[Sequence] = field(factory=Ordered, init=False)  # running, need their next items
    _stale: bool = field(default=False, init=False)  # an acquire may have become possible since the last decision
    _holds: dict[str, tuple[Sequence, EncoderHold]] = field(factory=dict, init=False)  # by holder
    _users: Counter[str] = field(factory=Counter, init=False)  # how many sequences have acquired each key
    _taken: int = field(default=0, init=False)  # bytes of all acquired keys
    _acquired: int = field(default=0, init=False)  # the number of acquires so far; it numbers the holders

    def has_what_it_needs(self, sequence: Sequence) -> bool:
        """True if the sequence is still ready. Since it became ready, its cross KV may have lost its slot, or cached
        pages that made an encoder output unnecessary may have been evicted."""
        item = sequence.cross_item
        if item is not None:
            return self.room.slots.resident(item.key) or sequence.holds_all
        if not sequence.placeholders:
            return True
        first = next(sequence.placeholders.needed(self._start(sequence)), None)
        return first is None or first.key in sequence.held

    def _start(self, sequence: Sequence) -> int:
        """Returns the first position of the sequence that must be fed."""
        return len(self.room.cached_pages(sequence)) * self.limits.page_size

    # -- facts -------------------------------------------------------------------------------------------------------

    def granted(self, holder: str) -> None:
        """Notes that ``holder`` holds its encoder output now. An unknown holder has withdrawn its acquire. A sequence
        that has ended keeps its outputs until a step in flight is answered."""
        if holder not in self._holds:
            return
        sequence, hold = self._holds[holder]
        hold.ready = True
        if sequence.ended or not sequence.holds_all:
            return
        self.actions.append(EncoderWaitOver(sequence.request.id))
        if sequence.phase is Phase.WAITING:
            self.ready.put(sequence, sequence.key)

    def refused(self, holder: str) -> Sequence | None:
        """Notes that the encoder cache refuses the acquire. Returns the sequence; ``None``: the sequence has withdrawn
        the acquire."""
        if holder not in self._holds:
            return None
        sequence, hold = self._holds[holder]
        self._forget(sequence, hold)
        return sequence

    def generation_lost(self) -> None:
        """Notes that all outputs are lost. Every acquire stays open, and the encoder cache answers it once more."""
        for _, hold in self._holds.values():
            hold.ready = False

    def waits(self, sequence: Sequence) -> None:
        """Puts a waiting sequence into the queues that it belongs to. The sequence keeps an output that it has acquired
        for cross-attention. It releases placed items, since it may need others now."""
        if not sequence.request.items:
            self.ready.put(sequence, sequence.key)
            return
        if sequence.placeholders:
            self.release(sequence)
        holds = bool(sequence.holds)
        for queue, member in ((self._ahead, holds), (self._seeking, not holds), (self.ready, sequence.holds_all)):
            if member:
                queue.put(sequence, sequence.key)
            else:
                queue.discard(sequence)
        self._stale = True

    def waits_no_more(self, sequence: Sequence) -> None:
        """Removes a sequence that starts, or no longer runs, or has ended, from the queues."""
        for queue in (self.ready, self._seeking, self._ahead, self._wanting):
            queue.discard(sequence)
        self._stale = True

    def has_read(self, sequence: Sequence) -> None:
        """Notes that more positions of the sequence are fed or cached. The sequence releases the items that lie before
        these positions. If it cannot go on with the items that are left, it releases them too: such an item is placed a
        second time, but after an item that the sequence does not hold."""
        for hold in list(sequence.holds.values()):
            if sequence.placeholders.is_read(hold.item.key, sequence.fed):
                self._release(sequence, hold)
        if sequence.holds and not sequence.holds_all:
            return
        if sequence.placeholders.reach(sequence.fed, sequence.held) == sequence.fed:
            self.release(sequence)
        if not sequence.holds and sequence.fed < sequence.placeholders.stop and sequence.phase is Phase.RUNNING:
            self._wanting.put(sequence, sequence.key)
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
            items = self._group(sequence.placeholders.needed(start))
        else:
            items = [] if self.room.slots.resident(item.key) else [item]
        while not self._fits(items):
            if not self._withdraw_for(sequence):
                return False
        assert not sequence.holds, f"{sequence.request.id} would wait for encoder outputs while it holds others"
        for item in items:
            self._acquire(sequence, item)
        if sequence.phase is Phase.WAITING:
            (self._ahead if items else self.ready).put(sequence, sequence.key)
        return True

    def _group(self, items: Iterable[EncoderItem]) -> list[EncoderItem]:
        """Returns the leading ``items`` that together fit into half of the encoder cache, but at least one. The other
        half is left for the next items, which are encoded while the decoder reads these."""
        chosen: list[EncoderItem] = []
        left = self.limits.encoder_cache_bytes // 2
        for item in items:
            left -= item.size
            if chosen and left < 0:
                break
            chosen.append(item)
        return chosen

    def _fits(self, items: Iterable[EncoderItem]) -> bool:
        """True if there is room for ``items`` beside all acquired outputs."""
        fresh = sum(item.size for item in items if item.key not in self._users)
        return self._taken + fresh <= self.limits.encoder_cache_bytes

    def _withdraw_for(self, sequence: Sequence) -> bool:
        """Makes the last waiting sequence give up the outputs that it has acquired, unless ``sequence`` comes after it.
        False if no sequence gives up any."""
        last = self._ahead.last()
        if last is None or (sequence.phase is Phase.WAITING and last.key < sequence.key):
            return False
        self.release(last)
        self._ahead.discard(last)
        self.ready.discard(last)
        self._seeking.put(last, last.key)
        return True

    # -- acquires and releases ---------------------------------------------------------------------------------------

    def _acquire(self, sequence: Sequence, item: EncoderItem) -> None:
        name = sequence.request.id
        hold = sequence.holds[item.key] = EncoderHold(f"{name}/{self._acquired}", item)
        self._acquired += 1
        self._holds[hold.holder] = sequence, hold
        self._users[item.key] += 1
        self._taken += item.size if self._users[item.key] == 1 else 0
        self.actions.append(Acquire(hold.holder, item, sequence.key[0], name))

    def release(self, sequence: Sequence) -> None:
        """Releases the outputs that the sequence holds, and withdraws its open acquires."""
        for hold in list(sequence.holds.values()):
            self._release(sequence, hold)

    def _release(self, sequence: Sequence, hold: EncoderHold) -> None:
        self._forget(sequence, hold)
        self.actions.append(Release(hold.holder, hold.item.key))

    def _forget(self, sequence: Sequence, hold: EncoderHold) -> None:
        key = hold.item.key
        del self._holds[hold.holder], sequence.holds[key]
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._taken -= hold.item.size
        self._stale = True
