"""The simulation judges each step of our engine as the kit for schedulers judges another's."""

from __future__ import annotations

import hashlib

import pytest

from triolet.core.errors import InvariantViolation
from triolet.core.planning import prefix
from triolet.core.planning.acts import Acts
from triolet.core.planning.pages import PageAllocator
from triolet.core.planning.planner import Planner
from triolet.core.planning.sequence import Sequence
from triolet_testing.clients import SCENARIOS
from triolet_testing.simulation import simulate
from triolet_testing.trio_tools.schedules import Uniform


def broken(*names: str) -> set[str]:
    """The promises that runs of the scenarios break."""
    found = set()
    for name in names:
        for seed in range(3):
            try:
                simulate(SCENARIOS[name], Uniform(seed))
            except InvariantViolation as violation:
                found.add(violation.invariant)
            except AssertionError:  # the device, or the books, were faster
                continue
    return found


@pytest.mark.parametrize("name", ["plain", "beams", "shared prefix", "preemption among images"])
def test_every_step_that_runs_is_judged(name: str) -> None:
    assert simulate(SCENARIOS[name], Uniform(1)).judged > 5


def test_a_page_that_changes_hands_in_flight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def settles_at_once(self: Planner, sequence: Sequence) -> None:
        flying, sequence.in_flight = sequence.in_flight, 0
        settle(self, sequence)
        sequence.in_flight = flying

    settle = Planner._settle
    monkeypatch.setattr(Planner, "_settle", settles_at_once)
    assert "free follows completion" in broken("abort storm", "preemption", "preemption among images")


def test_a_page_that_is_found_without_its_prefix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are found by their place alone."""
    monkeypatch.setattr(prefix, "_digest", lambda parent, _: hashlib.blake2b(parent, digest_size=16).digest())
    assert "prefix hits are what was computed" in broken("shared prefix", "preemption among images")


def test_a_page_that_is_free_and_in_use_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence's last page comes back while it runs on."""

    def takes(self: PageAllocator, count: int) -> tuple[int, ...] | None:
        pages = take(self, count)
        self._free += (pages or ())[-1:]
        return pages

    take = PageAllocator.try_take
    monkeypatch.setattr(PageAllocator, "try_take", takes)
    assert broken("preemption", "plain", "shared audio") & {"no page is given away in use", "free follows completion"}


def test_a_step_over_its_budget_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fills(self: Acts, draft: object) -> None:
        draft.tokens = 100
        fill(self, draft)

    fill = Acts._fill_up
    monkeypatch.setattr(Acts, "_fill_up", fills)
    assert "books balance" in broken("images that do not fit together", "parallel")
