"""How many replicas are wanted, by demand."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from triolet_ray.scaling import ENCODINGS, USED, Demand, wanted_replicas

DEMANDS = st.builds(Demand, requests=st.floats(0, 1e5), encodings=st.floats(0, 1e4))


@given(demand=DEMANDS, places=st.integers(1, 64), least=st.integers(1, 5), more=st.integers(0, 50))
def test_there_are_enough_and_no_more(demand: Demand, places: int, least: int, more: int) -> None:
    wanted = wanted_replicas(demand, places=places, least=least, most=least + more)
    assert least <= wanted <= least + more
    if wanted < least + more:
        assert demand.requests <= USED * places * wanted * (1 + 1e-9)
        assert demand.encodings <= ENCODINGS * wanted
    if wanted > least:
        fewer = wanted - 1
        assert demand.requests > USED * places * fewer * (1 - 1e-9) or demand.encodings > ENCODINGS * fewer
