"""The encoder outputs that sequences hold, and the rule that keeps sequences from waiting for each other.

To *acquire* is to request an output from the encoder cache, to *hold* is to have it, and to *release* is to give it
back or to withdraw the acquire.

The planner checks for room before it acquires an output: all acquired outputs fit the encoder cache together. So no
acquire waits for the release of another, and no sequence holds one output while it waits for room for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from attrs import define, field

from ..request import EncoderItem
from .actions import Acquire, Action, HoldsAll, Release
from .sequence import Sequence


@define(eq=False)
class _Hold:
    """One acquired output. ``holder`` is the hold's name at the encoder cache. The name is new for every acquire, so
    that a late answer to a withdrawn acquire is recognised."""

    holder: str
    sequence: Sequence
    item: EncoderItem
    ready: bool = False


@define(eq=False)
class EncoderHolds:
    """The acquired outputs of all sequences. Acquires and releases are appended to ``actions``. ``capacity`` is in
    bytes."""

    capacity: int
    actions: list[Action]
    _holds: dict[Sequence, dict[str, _Hold]] = field(factory=dict, init=False)  # by content key
    _holders: dict[str, _Hold] = field(factory=dict, init=False)
    _users: Counter[str] = field(factory=Counter, init=False)  # how many sequences have acquired each key
    _taken: int = field(default=0, init=False)  # bytes of all acquired keys
    _acquired: int = field(default=0, init=False)  # the number of acquires so far; it numbers the holders

    # -- questions ---------------------------------------------------------------------------------------------------

    def keys(self, sequence: Sequence) -> Set[str]:
        """Returns the keys that the sequence has acquired."""
        return self._holds.get(sequence, {}).keys()

    def held(self, sequence: Sequence) -> set[str]:
        """Returns the keys that the sequence holds."""
        return {key for key, hold in self._holds.get(sequence, {}).items() if hold.ready}

    def holder(self, sequence: Sequence, key: str) -> str:
        """Returns the sequence's name at the encoder cache for ``key``, which the sequence has acquired."""
        return self._holds[sequence][key].holder

    def holds_all(self, sequence: Sequence) -> bool:
        """True if the sequence has acquired at least one key, and holds all keys that it has acquired."""
        holds = self._holds.get(sequence)
        return holds is not None and all(hold.ready for hold in holds.values())

    def fits(self, items: Iterable[EncoderItem]) -> bool:
        """True if there is room for ``items`` beside all acquired outputs."""
        fresh = {item.key: item.size for item in items if item.key not in self._users}
        return self._taken + sum(fresh.values()) <= self.capacity

    def group(self, items: Iterable[EncoderItem]) -> list[EncoderItem]:
        """Returns the leading ``items`` that together fit into half of the encoder cache, but at least one. The other
        half is left for the next items. These are encoded while the decoder reads the group.
        """
        chosen: list[EncoderItem] = []
        left = self.capacity // 2
        for item in items:
            left -= item.size
            if chosen and left < 0:
                break
            chosen.append(item)
        return chosen

    # -- changes -----------------------------------------------------------------------------------------------------

    def acquire(self, sequence: Sequence, items: Iterable[EncoderItem]) -> None:
        """Acquires ``items``, which must fit. The sequence must have acquired nothing yet."""
        name = sequence.request.id
        assert sequence not in self._holds, f"{name} would wait for encoder outputs while it holds others"
        holds = self._holds[sequence] = {}
        for item in items:
            hold = holds[item.key] = _Hold(f"{name}/{self._acquired}", sequence, item)
            self._acquired += 1
            self._holders[hold.holder] = hold
            self._users[item.key] += 1
            self._taken += item.size if self._users[item.key] == 1 else 0
            self.actions.append(Acquire(hold.holder, item, sequence.key[0], name))

    def ready(self, holder: str) -> Sequence | None:
        """Notes that ``holder`` holds its output now. Returns the sequence if it holds all of its outputs. Returns
        ``None`` if the sequence waits for others, has withdrawn the acquire, or has ended and keeps its outputs until a
        step in flight is answered."""
        hold = self._holders.get(holder)
        if hold is None:
            return None
        hold.ready = True
        if hold.sequence.ended or not self.holds_all(hold.sequence):
            return None
        self.actions.append(HoldsAll(hold.sequence.request.id))
        return hold.sequence

    def refused(self, holder: str) -> Sequence | None:
        """Notes that the encoder cache refuses the acquire. Returns the sequence; ``None``: the sequence has withdrawn
        the acquire."""
        hold = self._holders.get(holder)
        if hold is None:
            return None
        self._forget(hold)
        return hold.sequence

    def release_read(self, sequence: Sequence) -> bool:
        """Releases the placed items that answered steps have read completely. Releases the other items too if the
        sequence cannot go on with them: its next position needs an item that it does not hold. True if the sequence
        must acquire its next items.
        """
        for key in [key for key in self.keys(sequence) if sequence.placeholders.is_read(key, sequence.fed)]:
            self._release(sequence, key)
        if self.keys(sequence) and not self.holds_all(sequence):
            return False
        if sequence.placeholders.reach(sequence.fed, self.held(sequence)) == sequence.fed:
            self.release_all(sequence)
        return not self.keys(sequence) and sequence.fed < sequence.placeholders.stop

    def release_all(self, sequence: Sequence) -> None:
        """Releases the outputs that the sequence holds, and withdraws its open acquires."""
        for key in list(self.keys(sequence)):
            self._release(sequence, key)

    def generation_lost(self) -> None:
        """Notes that all outputs are lost. Every acquire stays open, and the encoder cache answers it once more."""
        for hold in self._holders.values():
            hold.ready = False

    def _release(self, sequence: Sequence, key: str) -> None:
        hold = self._holds[sequence][key]
        self._forget(hold)
        self.actions.append(Release(hold.holder, key))

    def _forget(self, hold: _Hold) -> None:
        key, holds = hold.item.key, self._holds[hold.sequence]
        del holds[key]
        if not holds:
            del self._holds[hold.sequence]
        del self._holders[hold.holder]
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._taken -= hold.item.size
