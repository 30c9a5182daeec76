"""Where a request's items lie among its tokens, by position: no question costs more with what has been read already."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

from attrs import define, field

from .request import EncoderItem, Placement, Request


@define(eq=False)
class Reading:
    """Placements in the order of their first positions, and which of them lie wholly before a position."""

    placements: Sequence[Placement]
    _stops: list[int] = field(init=False)  # the furthest stop up to each

    def __attrs_post_init__(self) -> None:
        self._stops = list(accumulate((placement.stop for placement in self.placements), max))

    @property
    def stop(self) -> int:
        """One past the last position of all."""
        return self._stops[-1] if self._stops else 0

    def unread(self, position: int) -> range:
        """The indices of those that may reach beyond ``position``; all others lie before it."""
        return range(bisect_right(self._stops, position), len(self.placements))


@define(eq=False)
class PlacedItems:
    """The items among the tokens of one request, in the order of their positions."""

    placements: tuple[Placement, ...]
    _items: tuple[EncoderItem, ...]
    stop: int = field(init=False)  # one past the last position of all
    _reading: Reading = field(init=False)
    _last_stops: dict[str, int] = field(factory=dict, init=False)  # by key: an item may come twice

    def __attrs_post_init__(self) -> None:
        self._reading = Reading(self.placements)
        self.stop = self._reading.stop
        for placement in self.placements:
            self._last_stops[placement.key] = max(placement.stop, self._last_stops.get(placement.key, 0))

    @classmethod
    def of(cls, request: Request) -> PlacedItems:
        """Those of ``request``."""
        placed = [(item.placement, item) for item in request.items if item.placement is not None]
        placed.sort(key=lambda pair: pair[0].start)
        return cls(tuple(placement for placement, _ in placed), tuple(item for _, item in placed))

    def __bool__(self) -> bool:
        return bool(self.placements)

    def needed(self, start: int) -> Iterator[EncoderItem]:
        """The items with embeddings at ``start`` or behind, each key once."""
        seen = set()
        for index in self._reading.unread(start):
            item = self._items[index]
            if self.placements[index].stop > start and item.key not in seen:
                seen.add(item.key)
                yield item

    def is_read(self, key: str, position: int) -> bool:
        """Whether all places of ``key`` lie before ``position``."""
        return self._last_stops[key] <= position

    def reach(self, start: int, held: Collection[str]) -> int | None:
        """The first position from ``start`` on whose embedding is of none of the keys ``held``; ``None``: there is
        none."""
        missing = (
            next(max(first, start) for first, stop in self.placements[index].spans if stop > start)
            for index in self._reading.unread(start)
            if self.placements[index].key not in held and self.placements[index].stop > start
        )
        return min(missing, default=None)

    def touched(self, start: int, stop: int) -> list[str]:
        """The keys with embeddings in ``[start, stop)``."""
        found: dict[str, None] = {}
        for index in self._reading.unread(start):
            placement = self.placements[index]
            if placement.start >= stop:
                break
            if placement.touches(start, stop):
                found[placement.key] = None
        return list(found)
