"""`EncoderCache` (single operations, in any order) searched as the other protocols are: seeded, without Hypothesis's
database, every distinct finding. `check_encoder_cache` looks for the first by Hypothesis."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

from attrs import evolve

from ...core import trace
from ...core.errors import InvariantViolation
from ..cache_game import MakeCache, play
from ..cache_workloads import HOLDERS, KEYS, Ask, Encoded, Free, Operation, Release, Workload
from .findings import (
    WORKLOADS,
    BrokenPromise,
    Findings,
    Promise,
    Script,
    Severity,
    Table,
    examine,
    import_of,
    raised,
    without_some,
)
from .steps import PROMISES as OF_STEPS
from .wrong_adapter import WrongAdapter

COLUMNS = ("", "what happens")

PROMISES = {
    **OF_STEPS,
    trace.NO_USE_BEFORE_READY: Promise(
        trace.NO_USE_BEFORE_READY,
        Severity.CORRUPTS,
        "A request reads an output while it is still being computed.",
    ),
    trace.BOOKS_BALANCE: Promise(
        trace.BOOKS_BALANCE,
        Severity.CRASHES,
        "The device holds more, or other outputs, than the books say: it runs out of memory long after the cause.",
    ),
}


def draw_cache_workload(chance: random.Random) -> Workload:
    """Up to 60 operations of few requests on few keys, as `workloads` draws them."""
    keys = KEYS[: chance.choice((1, 1, 2, 2, 3, 3, 4, 6))]
    holders = HOLDERS[: chance.choice((1, 2, 2, 3, 3, 3, 4, 6))]
    capacity = chance.randint(max(len(keys) - 2, 1), len(keys) + 2)
    unit = chance.choice((1,) * 8 + (5_000_000_000,))
    sizes = {key: unit * (chance.choice((1, 1, chance.randint(1, capacity + 1)))) for key in keys}
    operations = [_operation(chance, holders, keys) for _ in range(chance.randint(0, 60))]
    hurried = chance.random() < 0.4
    late = [operation for operation in operations if isinstance(operation, Encoded | Free)][:4] if hurried else []
    return Workload(capacity * unit, sizes, operations, hurried, late)


def _operation(chance: random.Random, holders: tuple[str, ...], keys: tuple[str, ...]) -> Operation:
    holder, key = chance.choice(holders), chance.choice(keys)
    kind = chance.random()
    if kind < 0.35:
        return Ask(holder, key)
    if kind < 0.6:
        return Release(holder, key)
    return Free() if kind < 0.75 else Encoded(key, stored=kind < 0.95)


def simpler_cache_workloads(workload: Workload) -> Iterator[Workload]:
    """Without some operations, and without keys that nobody asks for; with a smaller room."""
    for fewer in without_some(workload.operations):
        yield evolve(workload, operations=fewer)
    for fewer in without_some(workload.late):
        yield evolve(workload, late=fewer)
    used = {operation.key for operation in (*workload.operations, *workload.late) if not isinstance(operation, Free)}
    if not used >= set(workload.sizes):
        yield evolve(workload, sizes={key: size for key, size in workload.sizes.items() if key in used})
    if workload.capacity > 1:
        for smaller in (1, workload.capacity // 2, workload.capacity - 1):
            sizes = {key: min(size, smaller + (size > workload.capacity)) for key, size in workload.sizes.items()}
            yield evolve(workload, capacity=smaller, sizes=sizes)


def play_cache(make_cache: MakeCache, workload: Workload) -> None:
    """`play`, whose findings are `BrokenPromise`.

    Raises:
        BrokenPromise: the cache broke a promise, or raised an error.
        WrongAdapter: the adapter does not speak the protocol.
    """
    try:
        play(make_cache, workload)
    except InvariantViolation as broken:
        raise BrokenPromise(PROMISES[broken.invariant], broken.what, _table(map(str, broken.history))) from None
    except WrongAdapter:
        raise
    except Exception as error:
        told = getattr(error, "__notes__", [""])[-1].split("\n  ")[1:]
        raise raised(error, _table(iter(told))) from error


def _table(history: Iterator[str]) -> Table:
    return Table(COLUMNS, [(str(number), told) for number, told in enumerate(history, 1)])


def examine_cache(
    make_cache: MakeCache, *, seed: int = 0, workloads: int = WORKLOADS, subject: str | None = None
) -> Findings:
    """Looks for workloads that break the promises of an `EncoderCache`: the worst first. See `examine`."""
    line, factory = import_of(make_cache, subject)
    prelude = f"from triolet.testing import Ask, Encoded, Free, Release, Workload, play\n\n{line}\n"
    script: Script[Workload] = Script(prelude, lambda workload: f"play({factory}, {workload!r})")
    return examine(
        draw_cache_workload,
        partial(play_cache, make_cache),
        simpler_cache_workloads,
        script,
        seed=seed,
        workloads=workloads,
    )
