"""How many replicas are wanted, by demand."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from triolet_ray.scaling import ENCODINGS, USED, wanted_replicas


@given(
    requests=st.floats(0, 1e5),
    encodings=st.floats(0, 1e4),
    places=st.integers(1, 64),
    least=st.integers(1, 5),
    more=st.integers(0, 50),
)
def test_there_are_enough_and_no_more(requests: float, encodings: float, places: int, least: int, more: int) -> None:
    wanted = wanted_replicas(requests, encodings, places=places, least=least, most=least + more)
    assert least <= wanted <= least + more
    if wanted < least + more:
        assert requests <= USED * places * wanted * (1 + 1e-9)
        assert encodings <= ENCODINGS * wanted
    if wanted > least:
        fewer = wanted - 1
        assert requests > USED * places * fewer * (1 - 1e-9) or encodings > ENCODINGS * fewer
