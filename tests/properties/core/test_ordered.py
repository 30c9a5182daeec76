"""`Ordered` is a sorted set, whatever was put and discarded before."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from triolet.core.ordered import Ordered


@given(st.lists(st.tuples(st.integers(0, 12), st.one_of(st.none(), st.integers(0, 20))), max_size=200))
def test_it_is_a_sorted_set(steps: list[tuple[int, int | None]]):
    """Put with an order, or discarded (``None``); looked at from both ends after every step."""
    ordered: Ordered[int] = Ordered()
    places: dict[int, tuple[int, int]] = {}
    for item, order in steps:
        if order is None:
            ordered.discard(item)
            places.pop(item, None)
        else:
            places[item] = (order, item)
            ordered.put(item, places[item])
        expected = sorted(places, key=places.__getitem__)
        assert list(ordered) == expected
        assert ordered.first() == next(iter(expected), None)
        assert ordered.last() == next(reversed(expected), None)
        assert len(ordered) == len(expected)
        assert [item in ordered for item in range(13)] == [item in places for item in range(13)]
