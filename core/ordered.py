"""`Ordered`: a set in the order of its items' places, for queues of any length."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from attrs import define, field

Item = TypeVar("Item")
Place = tuple[int, int]  # (order, arrival): the smallest comes first; no two items share one


@define(eq=False)
class Ordered(Generic[Item]):
    """Items in the order of their places. A discarded item leaves its place in the list until that place comes first or
    last, or until such places are many. So the cost of adding, discarding and looking at an end does not grow with the
    items.
    """

    _places: dict[Item, Place] = field(factory=dict, init=False)
    _items: dict[Place, Item] = field(factory=dict, init=False)
    _list: list[Place] = field(factory=list, init=False)  # ascending from ``_begin`` on
    _begin: int = field(default=0, init=False)
    _stale: set[Place] = field(factory=set, init=False)  # in the list, of discarded items

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: object) -> bool:
        return item in self._places

    def __iter__(self) -> Iterator[Item]:
        """The items in order. The set must not change meanwhile."""
        places = (self._list[index] for index in range(self._begin, len(self._list)))
        return (self._items[place] for place in places if place in self._items)

    def put(self, item: Item, place: Place) -> None:
        """Adds ``item``, or moves it to ``place``."""
        if self._places.get(item) == place:
            return
        self.discard(item)
        self._places[item], self._items[place] = place, item
        if place in self._stale:
            self._stale.discard(place)
        else:
            insort(self._list, place, lo=self._begin)

    def discard(self, item: Item) -> None:
        """Takes ``item`` out, if it is there."""
        place = self._places.pop(item, None)
        if place is None:
            return
        del self._items[place]
        self._stale.add(place)
        if not self._items or self._begin + len(self._stale) > 8 + len(self._items):
            self._list = [place for place in self._list[self._begin :] if place in self._items]
            self._begin = 0
            self._stale.clear()

    def first(self) -> Item | None:
        """The item with the smallest place; ``None``: there is none."""
        while self._begin < len(self._list) and (place := self._list[self._begin]) not in self._items:
            self._stale.discard(place)
            self._begin += 1
        return self._items[self._list[self._begin]] if self._items else None

    def last(self) -> Item | None:
        """The item with the largest place; ``None``: there is none."""
        while len(self._list) > self._begin and (place := self._list[-1]) not in self._items:
            self._stale.discard(place)
            self._list.pop()
        return self._items[self._list[-1]] if self._items else None
