"""The shrinking of a failing schedule to the shortest that can be found: the one with the fewest departures from trio's
plain order.
"""

from __future__ import annotations

from collections.abc import Callable

from .schedules import InTurn

Pairs = tuple[tuple[int, int], ...]


Fails = Callable[[Pairs], bool]


def shrink(schedule: InTurn, fails: Callable[[InTurn], bool], *, most_runs: int = 300) -> InTurn:
    """Returns the shortest schedule found that ``fails`` as ``schedule`` does. The search first leaves out pairs, then
    makes choices smaller. At most ``most_runs`` schedules are tried; schedules beyond this limit count as not failing.
    """
    tries = iter(range(most_runs))

    def found_to_fail(pairs: Pairs) -> bool:
        return next(tries, None) is not None and fails(InTurn(pairs))

    if found_to_fail(()):
        return InTurn()
    return InTurn(_lowered(_fewer(schedule.but, found_to_fail), found_to_fail))


def _fewer(pairs: Pairs, fails: Fails) -> Pairs:
    """Leaves out halves of the remaining pairs, then quarters, and so on (Zeller and Hildebrandt, "Simplifying and
    isolating failure-inducing input", IEEE TSE 2002)."""
    size = max(1, len(pairs) // 2)
    while pairs:
        before, start = pairs, 0
        while start < len(pairs):
            shorter = pairs[:start] + pairs[start + size :]
            if fails(shorter):
                pairs = shorter
            else:
                start += size
        if size == 1 and pairs == before:
            break
        size = max(1, size // 2)
    return pairs


def _lowered(pairs: Pairs, fails: Fails) -> Pairs:
    """Lowers each choice if the schedule still fails. A lower choice runs a task that has waited longer."""
    for index, (tick, choice) in enumerate(pairs):
        for smaller in range(1, choice):
            lower = (*pairs[:index], (tick, smaller), *pairs[index + 1 :])
            if fails(lower):
                pairs = lower
                break
    return pairs
