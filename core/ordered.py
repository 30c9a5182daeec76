"""`Ordered`: a set whose first item is known at once, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from attrs import define, field

Item = TypeVar("Item", bound="object")
Place = tuple[int, int]  # (order, arrival): the smallest comes first; no two items share one


@define(eq=False)
class Ordered(Generic[Item]):
    """Items by their places. An item that is discarded stays in the heap until it surfaces there, or until the heap has
    more of its kind than items; so every method takes the same time on average, but for iterating."""

    _places: dict[Item, Place] = field(factory=dict)
    _heap: list[tuple[Place, Item]] = field(factory=list)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        return iter(sorted(self._places, key=self._places.__getitem__))

    def put(self, item: Item, place: Place) -> None:
        """Adds ``item``, or moves it."""
        if self._places.get(item) == place:
            return
        self._places[item] = place
        heappush(self._heap, (place, item))
        self._tidy()

    def discard(self, item: Item) -> None:
        """Takes ``item`` out, if it is there."""
        self._places.pop(item, None)
        self._tidy()

    def first(self) -> Item | None:
        """The item with the smallest place; ``None``: there is none."""
        while self._heap and self._places.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._places) + 8:
            self._heap = [(place, item) for item, place in self._places.items()]
            heapify(self._heap)
