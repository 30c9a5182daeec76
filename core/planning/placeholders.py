"""The places of a request's items among its tokens, by position. A look-up skips the placeholders that were read, at no
cost.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from attrs import define, field

from ..request import EncoderItem, Placeholder, Request


@define(eq=False)
class PlaceholderCursor:
    """Placeholders in the order of their first positions. Finds those that do not lie wholly before a position."""

    placeholders: Sequence[Placeholder]
    _stops: list[int] = field(init=False)  # the greatest stop up to each placeholder

    def __attrs_post_init__(self) -> None:
        self._stops = list(accumulate((placeholder.stop for placeholder in self.placeholders), max))

    @property
    def stop(self) -> int:
        """One past the last position of all placeholders."""
        return self._stops[-1] if self._stops else 0

    def unread(self, position: int) -> range:
        """Returns the indices of the placeholders that may reach beyond ``position``. All others lie before it."""
        return range(bisect_right(self._stops, position), len(self.placeholders))


@define(eq=False)
class PlaceholderItems:
    """The items among the tokens of one request, in the order of their positions."""

    all: tuple[Placeholder, ...]
    _items: tuple[EncoderItem, ...]
    stop: int = field(init=False)  # one past the last position of all placeholders
    _cursor: PlaceholderCursor = field(init=False)
    _last_stops: dict[str, int] = field(factory=dict, init=False)  # by key: an item may come twice

    def __attrs_post_init__(self) -> None:
        self._cursor = PlaceholderCursor(self.all)
        self.stop = self._cursor.stop
        for placeholder in self.all:
            self._last_stops[placeholder.key] = max(placeholder.stop, self._last_stops.get(placeholder.key, 0))

    @classmethod
    def of(cls, request: Request) -> PlaceholderItems:
        """Returns the placed items of ``request``."""
        placed = [(item.placeholder, item) for item in request.items if item.placeholder is not None]
        placed.sort(key=lambda pair: pair[0].start)
        return cls(tuple(placeholder for placeholder, _ in placed), tuple(item for _, item in placed))

    def __bool__(self) -> bool:
        return bool(self.all)

    def needed(self, start: int) -> Iterator[EncoderItem]:
        """Yields the items with embeddings at ``start`` or later, each key once."""
        seen = set()
        for index in self._cursor.unread(start):
            item = self._items[index]
            if self.all[index].stop > start and item.key not in seen:
                seen.add(item.key)
                yield item

    def is_read(self, key: str, position: int) -> bool:
        """True if all placeholders of ``key`` lie before ``position``."""
        return self._last_stops[key] <= position

    def reach(self, start: int, held: Collection[str]) -> int | None:
        """Returns the first position, from ``start`` on, of an embedding of an item that is not in ``held``; ``None``:
        there is no such position."""
        missing = (
            next(max(first, start) for first, stop in self.all[index].spans if stop > start)
            for index in self._cursor.unread(start)
            if self.all[index].key not in held and self.all[index].stop > start
        )
        return min(missing, default=None)

    def touched(self, start: int, stop: int) -> list[str]:
        """Returns the keys of the items with embeddings in ``[start, stop)``."""
        found: dict[str, None] = {}
        for index in self._cursor.unread(start):
            placeholder = self.all[index]
            if placeholder.start >= stop:
                break
            if placeholder.touches(start, stop):
                found[placeholder.key] = None
        return list(found)
