"""The workloads of step engines, which are drawn by chance, and simpler versions of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from .search import without_some
from .step_declaration import StepDeclaration

Operation = tuple[str, tuple[Any, ...]]
"""The name of a method of `StepGame`, and its arguments."""


@frozen
class StepWorkload:
    """The actions of requests and device on a cache of ``room``. If ``hurried``, the cache is closed right after the
    last operation, while steps are in flight. The encodings of ``late_failures`` in these steps fail. Unless ``ends``,
    nothing follows the last operation.
    """

    room: int
    sizes: Mapping[str, int]
    operations: tuple[Operation, ...] = ()
    hurried: bool = False
    late_failures: tuple[str, ...] = ()
    ends: bool = True


_KEYS, _REQUESTS = "abcdef", ("r0", "r1", "r2", "r3", "r4", "r5")
_LARGE = 5_000_000_000  # units of one item that need more than 32 bits


@frozen
class _Rates:
    """The rates of the events in one workload. They differ between workloads. So a fault that needs one event often,
    and another one never, is found sooner.
    """

    preempts: float
    tight: float  # of budgets that are tight
    runs: float  # that the oldest planned step runs though another one could be planned
    fails: float
    ends: float  # that a request ends rather than releases

    @classmethod
    def draw(cls, chance: random.Random, declared: StepDeclaration) -> _Rates:
        return cls(
            preempts=chance.choice((0.0, 0.1, 0.3, 0.5)) if declared.preempts_within_step else 0.0,
            tight=chance.choice((0.0, 0.3, 1.0)) if declared.budgets else 0.0,
            runs=chance.choice((0.1, 0.4, 0.9)),
            fails=chance.choice((0.0, 0.1, 0.3)) if declared.may_fail_after_plan else 0.0,
            ends=chance.choice((0.1, 0.4, 0.8)),
        )


def draw_workload(chance: random.Random, declared: StepDeclaration) -> StepWorkload:
    """Draws a workload of up to 20 rounds. It has one to three requests, one to three keys and a room of 1 to 4, rarely
    more: few requests and keys in little room get in each other's way most often.
    """
    roll = chance.random
    keys = _KEYS[: chance.choice((1, 2, 2, 3, 3, 3, 4, 6))]
    requests = _REQUESTS[: chance.choice((1, 2, 2, 2, 3, 3, 3, 6))]
    room = chance.randint(max(len(keys) - 2, 1), len(keys) + 2)
    unit = _LARGE if roll() < 0.1 else 1
    pairs = [(request, key if declared.shared else f"{request}.{key}") for request in requests for key in keys]
    sizes: dict[str, int] = {}
    for _, key in pairs:
        if key not in sizes:
            too_large = declared.refuses and roll() < 0.06
            small = len(keys) > 3 or roll() < 0.4
            sizes[key] = unit * (room + 1 if too_large else 1 if small else chance.randint(1, room))
    rates = _Rates.draw(chance, declared)
    operations = tuple(_operations(chance, declared, rates, pairs, sizes))
    hurried = roll() < 0.3
    fails = hurried and roll() < rates.fails
    return StepWorkload(room * unit, sizes, operations, hurried, tuple(sizes) if fails else ())


def _operations(
    chance: random.Random,
    declared: StepDeclaration,
    rates: _Rates,
    pairs: Sequence[tuple[str, str]],
    sizes: Mapping[str, int],
) -> Iterator[Operation]:
    """Yields plans and ends of steps in turn, and what requests do between them."""
    roll, in_flight = chance.random, 0
    for _ in range(chance.randint(1, 20)):
        if in_flight == declared.steps_in_flight or (in_flight and roll() < rates.runs):
            in_flight -= 1
            yield "executed", ([key for key in sizes if roll() < 0.7],) if roll() < rates.fails else ()
        else:
            in_flight += 1
            yield "plan", tuple(_plan(chance, rates, pairs, sizes))
        for _ in range(chance.randint(0, 2)):
            request, key = chance.choice(pairs)
            yield ("finish", (request,)) if roll() < rates.ends else ("release", (request, key))
        if declared.resets and roll() < 0.05:
            yield "reset", ()


def _plan(
    chance: random.Random, rates: _Rates, pairs: Sequence[tuple[str, str]], sizes: Mapping[str, int]
) -> Iterator[Any]:
    """Yields up to six asks and preemptions. Most preemptions are of requests that have asked in the same step. A tight
    budget is yielded too.
    """
    wanted: list[tuple[str, ...]] = []
    asked: list[str] = []
    for _ in range(chance.randint(0, 6)):
        request, key = chance.choice(pairs)
        if chance.random() >= rates.preempts:
            asked.append(request)
            wanted.append(("ask", request, key))
        else:
            wanted.append(("preempt", chance.choice(asked) if asked else request))
    yield wanted
    if chance.random() < rates.tight:
        yield chance.choice(list(sizes.values())) if chance.random() < 0.9 else 0


def simpler_workloads(workload: StepWorkload) -> Iterator[StepWorkload]:
    """Yields ``workload`` without some operations, or without a part of one operation."""
    for fewer in without_some(workload.operations):
        yield evolve(workload, operations=fewer)
    for at, operation in enumerate(workload.operations):
        for smaller in _simpler_operations(operation):
            yield evolve(workload, operations=(*workload.operations[:at], smaller, *workload.operations[at + 1 :]))
    plans = [arguments[0] for name, arguments in workload.operations if name == "plan"]
    asked = {key for wanted in plans for _, _, *keys in wanted for key in keys}
    if not asked >= set(workload.sizes):
        yield evolve(workload, sizes={key: size for key, size in workload.sizes.items() if key in asked})
    if workload.late_failures:
        yield evolve(workload, late_failures=())
    if workload.ends and not workload.hurried:
        yield evolve(workload, hurried=True)


def _simpler_operations(operation: Operation) -> Iterator[Operation]:
    name, arguments = operation
    if name == "executed":
        yield from ((name, (list(fewer),) if fewer else ()) for fewer in without_some(*arguments or ((),)))
    if name == "plan":
        wanted, *budget = arguments
        if budget:
            yield name, (wanted,)
        yield from ((name, (list(fewer), *budget)) for fewer in without_some(wanted))
