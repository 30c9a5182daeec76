"""Who is to blame: a request that crashes what others do not; on a device that fails everybody, nobody in a hurry."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triolet.core.planning.quarantine import StepHistory

LEAST, MOST = 2, 8


def crashes_needed(steps: str, request_id: str = "r") -> int:
    """After ``steps``: "." went well, "x" failed with others, "r" failed with the request."""
    history = StepHistory()
    for step in steps:
        if step == ".":
            history.step_done()
        else:
            history.step_failed(["other"] if step == "x" else [request_id])
    return history.crashes_needed(request_id, LEAST)


@given(steps=st.text(".xr", max_size=200))
def test_the_bounds_hold(steps: str):
    assert LEAST <= crashes_needed(steps) <= MOST


@given(steps=st.text(".x", min_size=1, max_size=64), at=st.integers(0, 63))
def test_more_failures_of_others_never_condemn_sooner(steps: str, at: int):
    worse = steps[: at % len(steps)] + "x" + steps[at % len(steps) + 1 :]
    assert crashes_needed(worse) >= crashes_needed(steps)


def test_on_a_device_that_fails_nobody_else_twice_is_enough():
    assert crashes_needed("." * 64 + "rr") == LEAST


def test_of_a_device_that_is_new_little_is_known():
    assert crashes_needed("rr") == MOST


def test_a_failure_that_the_request_survives_counts_as_chance():
    history = StepHistory()
    for _ in range(60):
        history.step_done()
    for _ in range(4):
        history.step_failed(["r"])
        history.cleared("r")
    assert history.crashes_needed("r", LEAST) > LEAST


def test_what_a_poisonous_request_did_does_not_excuse_the_next_one():
    history = StepHistory()
    for _ in range(50):
        history.step_done()
    for _ in range(10):
        history.step_failed(["poison"])
    history.condemned("poison")
    assert history.crashes_needed("next", LEAST) == LEAST


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.2])
@pytest.mark.parametrize("together", [1, 4])
def test_chance_condemns_next_to_nobody(rate: float, together: int):
    """100,000 steps of innocents; a request that crashed runs alone until it draws."""
    dice, history, condemned = random.Random(0), StepHistory(), 0
    for step in range(100_000):
        names = [f"r{(step // 40 + n) % 50}" for n in range(together)]
        if dice.random() >= rate:
            history.step_done()
            continue
        history.step_failed(names)
        for name in names:
            crashes = 0
            while dice.random() < rate and crashes < MOST:
                crashes += 1
                history.step_failed([name])
            condemned += crashes >= history.crashes_needed(name, LEAST)
            history.cleared(name)
    assert condemned <= 10
