"""What sequences hold of the encoder cache, and the rule that keeps them from waiting for each other.

*Acquire* asks the encoder cache for an output, *hold* is to have it, *release* gives it back or withdraws the acquire.

Room is granted here, before anything is acquired: all outputs that are acquired fit the encoder cache together. So no
acquire waits for another one's release, and nobody holds one output while it waits for room for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set

from attrs import define, field

from .actions import Acquire, Action, HoldsAll, Release
from .request import EncoderItem
from .sequence import Sequence


@define(eq=False)
class _Hold:
    """``holder`` is its name at the encoder cache: new for every acquire, so that a late answer to a withdrawn one is
    recognised."""

    holder: str
    sequence: Sequence
    item: EncoderItem
    ready: bool = False


@define(eq=False)
class EncoderHolds:
    """The acquired outputs of all sequences; what is to be told goes to ``actions``. ``capacity``: bytes."""

    capacity: int
    actions: list[Action]
    _holds: dict[Sequence, dict[str, _Hold]] = field(factory=dict, init=False)  # by content key
    _holders: dict[str, _Hold] = field(factory=dict, init=False)
    _users: Counter[str] = field(factory=Counter, init=False)  # of each key
    _taken: int = field(default=0, init=False)  # bytes of all keys
    _acquired: int = field(default=0, init=False)  # numbers the holders

    # -- questions ---------------------------------------------------------------------------------------------------

    def keys(self, sequence: Sequence) -> Set[str]:
        """The keys that it has acquired."""
        return self._holds.get(sequence, {}).keys()

    def held(self, sequence: Sequence) -> set[str]:
        """The keys that it may read."""
        return {key for key, hold in self._holds.get(sequence, {}).items() if hold.ready}

    def holder(self, sequence: Sequence, key: str) -> str:
        """Its name at the encoder cache for ``key``, which it has acquired."""
        return self._holds[sequence][key].holder

    def holds_all(self, sequence: Sequence) -> bool:
        """Whether it may read all that it has acquired, and that is something."""
        holds = self._holds.get(sequence)
        return holds is not None and all(hold.ready for hold in holds.values())

    def fits(self, items: Iterable[EncoderItem]) -> bool:
        """Whether there is room for ``items`` beside all that is acquired."""
        fresh = {item.key: item.size for item in items if item.key not in self._users}
        return self._taken + sum(fresh.values()) <= self.capacity

    def group(self, items: Iterable[EncoderItem]) -> list[EncoderItem]:
        """As many of the first ``items`` as fit half of the encoder cache together, at least one: so the next ones are
        encoded while these are read."""
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
        """Asks for ``items``, which fit. The sequence must have acquired nothing."""
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
        """``holder`` may read its output. The sequence that holds all of its outputs now; ``None``: it still waits, has
        withdrawn meanwhile, or has ended and waits for a step in flight before it releases them."""
        hold = self._holders.get(holder)
        if hold is None:
            return None
        hold.ready = True
        if hold.sequence.ended or not self.holds_all(hold.sequence):
            return None
        self.actions.append(HoldsAll(hold.sequence.request.id))
        return hold.sequence

    def refused(self, holder: str) -> Sequence | None:
        """The encoder cache will not give the output. Whose acquire it was; ``None``: withdrawn meanwhile."""
        hold = self._holders.get(holder)
        if hold is None:
            return None
        self._forget(hold)
        return hold.sequence

    def release_read(self, sequence: Sequence) -> bool:
        """Releases the placed items that lie wholly before what answered steps have fed, and all of them where it
        cannot go on with what it holds: an item that comes once more, but only behind something else. Whether it needs
        others now."""
        for key in [key for key in self.keys(sequence) if sequence.placed.is_read(key, sequence.fed)]:
            self._release(sequence, key)
        if self.keys(sequence) and not self.holds_all(sequence):
            return False
        if sequence.placed.reach(sequence.fed, self.held(sequence)) == sequence.fed:
            self.release_all(sequence)
        return not self.keys(sequence) and sequence.fed < sequence.placed.stop

    def release_all(self, sequence: Sequence) -> None:
        """Gives back what it holds and withdraws what it waits for."""
        for key in list(self.keys(sequence)):
            self._release(sequence, key)

    def generation_lost(self) -> None:
        """No output is there any more. Every acquire stands: it will be answered once more."""
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
