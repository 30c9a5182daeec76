"""Sequences in order, for queues of any length: adding, discarding and looking at an end cost next to nothing."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from attrs import define, field

from .sequence import Sequence

_LEAST_STALE = 32


@define(eq=False)
class Waiting:
    """A queue of sequences by (order, arrival). A key that was discarded stays in the list until they are many."""

    _keys: list[tuple[int, int]] = field(factory=list, init=False)  # ascending
    _members: dict[tuple[int, int], Sequence] = field(factory=dict, init=False)
    _stale: set[tuple[int, int]] = field(factory=set, init=False)  # in the list, and nobody's any more

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.key in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """In order. The queue must not change meanwhile."""
        return (self._members[key] for key in self._keys if key in self._members)

    def add(self, sequence: Sequence) -> None:
        """It joins, unless it is here."""
        key = sequence.key
        if key in self._members:
            return
        self._members[key] = sequence
        if key in self._stale:
            self._stale.discard(key)
        elif not self._keys or self._keys[-1] < key:
            self._keys.append(key)
        else:
            insort(self._keys, key)

    def discard(self, sequence: Sequence) -> None:
        """It leaves, if it is here."""
        if self._members.pop(sequence.key, None) is None:
            return
        self._stale.add(sequence.key)
        if len(self._stale) > _LEAST_STALE + len(self._members):
            self._keys = [key for key in self._keys if key in self._members]
            self._stale.clear()

    def first(self) -> Sequence | None:
        """Who comes first."""
        return next(iter(self), None)

    def last(self) -> Sequence | None:
        """Who comes last."""
        return next((self._members[key] for key in reversed(self._keys) if key in self._members), None)
