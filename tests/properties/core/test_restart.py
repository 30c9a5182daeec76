"""Restarts are bounded within any period, and so is the pause before each."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from triolet.core.restart import RestartPolicy

GAPS = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(most=st.integers(0, 8), period=st.floats(0.1, 100), gaps=GAPS)
def test_no_period_has_more_restarts_than_are_allowed(most: int, period: float, gaps: list[float]):
    policy, now, granted = RestartPolicy(most, period), 0.0, []
    for gap in gaps:
        now += gap
        recent = [at for at in granted if at > now - period]
        pause = policy.try_restart(now)
        assert (pause is None) == (len(recent) >= most)
        if pause is not None:
            assert (pause == 0) == (not recent)
            granted.append(now)


@given(gaps=GAPS)
def test_pauses_double_up_to_the_longest(gaps: list[float]):
    policy, now = RestartPolicy(10**6, 1e9), 0.0
    pauses = []
    for gap in gaps:
        now += gap
        pauses.append(policy.try_restart(now))
    assert pauses[0] == 0
    assert pauses[1:] == [min(0.1 * 2**number, 5.0) for number in range(len(pauses) - 1)]


def test_thousands_of_restarts_do_not_overflow():
    policy = RestartPolicy(10**6, 1e9)
    assert max(policy.try_restart(0.0) or 0 for _ in range(5_000)) == 5.0
