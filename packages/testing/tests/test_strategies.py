"""The strategies draw what their users need: values that run, that repeat, and that shrink to little."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import find, given, settings

import triolet_testing
from triolet_testing import strategies
from triolet_testing.clients import Client
from triolet_testing.sim_model import START
from triolet_testing.simulation import simulate
from triolet_testing.strategies import requests, scenarios, schedules
from triolet_testing.trio_tools import schedules as schedule_module
from triolet_testing.trio_tools.schedules import Listed


@given(scenarios(), schedules())
@settings(max_examples=150)
def test_every_scenario_under_every_schedule_keeps_the_engine_s_promises(scenario, schedule):
    """A user's whole property is one line."""
    simulate(scenario, schedule)


@given(scenarios(), schedules())
@settings(max_examples=40)
def test_the_same_values_give_the_same_run(scenario, schedule):
    assert simulate(scenario, schedule) == simulate(scenario, schedule)


BRIEF = settings(max_examples=100)


@pytest.mark.thorough
def test_what_is_drawn_shrinks_to_little():
    assert find(schedules(), lambda _: True, settings=BRIEF) == Listed(())
    assert find(schedules(), lambda schedule: any(getattr(schedule, "choices", ())), settings=BRIEF) == Listed((1,))
    assert find(requests(), lambda _: True, settings=BRIEF) == Client(audio=0, prompt=(START,), max_tokens=1)
    assert len(find(scenarios(), lambda _: True, settings=BRIEF).clients) == 1


@given(schedules())
@settings(max_examples=20)
def test_a_schedule_is_its_repr(schedule):
    assert eval(repr(schedule), vars(schedule_module)) == schedule


def test_hypothesis_is_needed_by_the_strategies_alone():
    """It is in the `test` extra: the simulation and the sweep run without it."""
    files = Path(strategies.__file__).parent.rglob("*.py")
    assert {path.name for path in files if "import hypothesis" in path.read_text(encoding="utf-8")} == {"strategies.py"}


def test_every_strategy_is_what_the_page_says_it_is():
    """``from triolet_testing import scenarios`` once gave a module of that name."""
    assert all(callable(getattr(triolet_testing, name)) for name in strategies.__all__)
