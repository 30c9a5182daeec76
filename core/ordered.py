"""`Ordered`: a set that keeps its items in the order of their places, for queues of any length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from attrs import define, field

Item = TypeVar("Item")
Place = tuple[int, int]  # (order, arrival): the smallest comes first; no two items have the same place


@define(eq=False)
class Ordered(Generic[Item]):
    """The items of a queue, by their places. Adding and discarding find the place by bisection. They move the places
    after it, which takes microseconds for thousands of places."""

    _places: dict[Item, Place] = field(factory=dict, init=False)
    _items: dict[Place, Item] = field(factory=dict, init=False)
    _list: list[Place] = field(factory=list, init=False)  # ascending

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        """Yields the items in order. The set must not change meanwhile."""
        return (self._items[place] for place in self._list)

    def put(self, item: Item, place: Place) -> None:
        """Adds ``item``, or moves it to ``place``."""
        if self._places.get(item) != place:
            self.discard(item)
            self._places[item], self._items[place] = place, item
            insort(self._list, place)

    def discard(self, item: Item) -> None:
        """Removes ``item``, if it is in the set."""
        place = self._places.pop(item, None)
        if place is not None:
            del self._items[place]
            del self._list[bisect_left(self._list, place)]

    def first(self) -> Item | None:
        """Returns the item with the smallest place; ``None``: the set is empty."""
        return self._items[self._list[0]] if self._list else None

    def last(self) -> Item | None:
        """Returns the item with the largest place; ``None``: the set is empty."""
        return self._items[self._list[-1]] if self._list else None
