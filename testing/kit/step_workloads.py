"""What an engine declares, and workloads of step engines: drawn by chance, and made simpler."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import asdict, evolve, field, frozen, validators

from .findings import without_some
from .step_game import StepGame


@frozen(kw_only=True)
class StepDeclaration:
    """What the engine does otherwise. A declaration takes away what the kit does or the one complaint that it names;
    all other promises stay.

    Args:
        closes: the cache has ``close``. False: the manager lives as long as the process.
        resets: the cache has ``reset``, for engines that empty the encoder cache when weights change.
        shared: requests share the entries of equal keys. False, for caches of one request's own entries, such as the
            cross-attention of encoder-decoders: no two requests ask for one key.
        missed_free: a free of what is not on the device is a ``"fault"``, or ``"harmless"`` where the runner takes the
            key out of a dictionary if it is there. What such a free leaves behind is still found.
        may_fail_after_plan: planned encodings may fail. False: a failed encoding ends the engine.
        refuses: an output that is larger than the room is answered ``"never"``. False: such requests are refused before
            they reach the cache manager, so that the kit has none.
        evicts_within_step: the room of a step's frees is there for its encodings. False: the device frees behind the
            encodings and reads, so that the room is there from the next step on.
        budgets: the engine has a budget of encoder compute for each step. False: it is always plenty, four times
            the room.
        repeats: ``release`` and ``finish`` come again for what was given back, as from a step loop. False: each comes
            once, where something is held.
        steps_in_flight: most steps that are planned and have not run. 1: the engine plans one when the last has run.
    """

    closes: bool = True
    resets: bool = False
    shared: bool = True
    missed_free: str = field(default="fault", validator=validators.in_(("fault", "harmless")))
    may_fail_after_plan: bool = True
    refuses: bool = True
    evicts_within_step: bool = True
    budgets: bool = True
    repeats: bool = True
    steps_in_flight: int = field(default=2, validator=validators.in_((1, 2)))

    def rules(self) -> dict[str, Any]:
        """What a `StepGame` must know of it, where it differs from the default."""
        known = inspect.signature(StepGame).parameters
        return {name: told for name, told in asdict(self).items() if name in known and told != known[name].default}


Operation = tuple[str, tuple[Any, ...]]
"""The name of a `StepGame`'s method, and its arguments."""


@frozen
class StepWorkload:
    """What requests and device do to a cache of ``room``. With ``hurried`` it is closed right after the last operation,
    with steps in flight, of whose encodings those of ``late_failures`` fail."""

    room: int
    sizes: Mapping[str, int]
    operations: tuple[Operation, ...] = ()
    hurried: bool = False
    late_failures: tuple[str, ...] = ()

    def calls(self) -> list[str]:
        """The operations as calls, for people and for a regression test."""
        told = [f"{name}({', '.join(map(repr, arguments))})" for name, arguments in self.operations]
        end = f"close({list(self.late_failures)!r})" if self.late_failures else "close()"
        return [*told, end if self.hurried else "end()"]

    def __repr__(self) -> str:
        return f"room {self.room}, sizes {dict(self.sizes)}: {'; '.join(self.calls())}"


_KEYS, _REQUESTS = "abcdef", ("r0", "r1", "r2", "r3", "r4", "r5")
_LARGE = 5_000_000_000  # what one item may take: more than 32 bits hold


@frozen
class _Rates:
    """How often what happens in one workload. They differ from one to the next: a fault that needs one thing often, and
    another never, is met sooner."""

    preempts: float
    tight: float  # budgets
    runs: float  # the oldest planned step, where another one could be planned
    fails: float
    ends: float  # of requests, rather than releases

    @classmethod
    def draw(cls, chance: random.Random, declared: StepDeclaration) -> _Rates:
        return cls(
            preempts=chance.choice((0.0, 0.1, 0.3, 0.5)),
            tight=chance.choice((0.0, 0.3, 1.0)) if declared.budgets else 0.0,
            runs=chance.choice((0.1, 0.4, 0.9)),
            fails=chance.choice((0.0, 0.1, 0.3)) if declared.may_fail_after_plan else 0.0,
            ends=chance.choice((0.1, 0.4, 0.8)),
        )


def draw_workload(chance: random.Random, declared: StepDeclaration) -> StepWorkload:
    """Up to 20 rounds of one to three requests on one to three keys in a room of 1 to 4, rarely of six each: few that
    get in each other's way find faults soonest."""
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
    """Plans and ends of steps in turn, with what requests do between them."""
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
    """Up to six asks and preemptions, mostly of those that have asked in the same step; a budget where it is tight."""
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
    """Without some operations, without a part of one, with smaller numbers, with fewer names."""
    for fewer in without_some(workload.operations):
        yield evolve(workload, operations=fewer)
    for at, operation in enumerate(workload.operations):
        for smaller in _simpler_operations(operation):
            yield evolve(workload, operations=(*workload.operations[:at], smaller, *workload.operations[at + 1 :]))
    if workload.late_failures:
        yield evolve(workload, late_failures=())
    if not workload.hurried:
        yield evolve(workload, hurried=True)
    used = {name for _, arguments in workload.operations for name in _names(arguments)}
    if not used >= set(workload.sizes):
        yield evolve(workload, sizes={key: size for key, size in workload.sizes.items() if key in used})
    yield from _smaller(workload)
    yield from _renamed(workload)


def _simpler_operations(operation: Operation) -> Iterator[Operation]:
    name, arguments = operation
    if name == "executed" and arguments:
        yield name, ()
        if len(arguments[0]) > 1:
            yield from ((name, (list(fewer),)) for fewer in without_some(arguments[0]) if fewer)
    if name == "plan":
        wanted, *budget = arguments
        if budget:
            yield name, (wanted,)
        yield from ((name, (list(fewer), *budget)) for fewer in without_some(wanted))


def _names(value: Any) -> Iterator[str]:
    """Every text within."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _names(inner)


def _smaller(workload: StepWorkload) -> Iterator[StepWorkload]:
    """Numbers in units of the large one; the room one less; one size one less."""
    if workload.room >= _LARGE:
        yield _with_numbers(workload, lambda number: number // _LARGE)
    elif workload.room > 1:
        yield _with_numbers(workload, lambda number: min(number, workload.room - 1))
    for key, size in workload.sizes.items():
        if 1 < size < _LARGE:
            yield evolve(workload, sizes={**workload.sizes, key: size - 1})


def _with_numbers(workload: StepWorkload, change: Callable[[int], int]) -> StepWorkload:
    """With another room, and with other sizes and budgets."""
    operations = tuple(
        (name, (arguments[0], *map(change, arguments[1:])) if name == "plan" else arguments)
        for name, arguments in workload.operations
    )
    sizes = {key: change(size) for key, size in workload.sizes.items()}
    return evolve(workload, room=change(workload.room), sizes=sizes, operations=operations)


def _renamed(workload: StepWorkload) -> Iterator[StepWorkload]:
    """With the first names instead of others; two names may become one. Where entries are not shared, names say whose
    they are, and stay."""
    for names in (_REQUESTS, _KEYS) if not any("." in key for key in workload.sizes) else ():
        used = [name for name in names if name in _names(workload.operations)]
        for at, name in enumerate(used):
            for other in names[: names.index(name)]:
                if other not in used or at:
                    yield _with_name(workload, name, other)


def _with_name(workload: StepWorkload, name: str, other: str) -> StepWorkload:
    def named(value: Any) -> Any:
        if isinstance(value, str):
            return other if value == name else value
        return type(value)(map(named, value)) if isinstance(value, tuple | list) else value

    sizes = {other if key == name else key: size for key, size in workload.sizes.items()}
    return evolve(workload, sizes=sizes, operations=named(workload.operations))
