"""Is the cache manager of your step engine sound? The step protocol: the kit plays requests and the device.

::

    def test_my_cache_keeps_its_promises():
        examine_steps(MyAdapter, Declaration(closes=False)).raise_if_any()  # MyAdapter(room) has `StepCache`'s methods

The engine plans steps: in each, requests ask for encoder outputs, and some requests are preempted. The device runs the
steps in their order, and in each the frees, then the encodings, then the reads. ``docs/adapt_your_cache.md`` has the
protocol as a table, and adapts a cache manager.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

from attrs import asdict, evolve, field, frozen, validators

from . import step_game
from .findings import (
    RAISES_NOTHING,
    WORKLOADS,
    BrokenPromise,
    Findings,
    Promise,
    Script,
    Severity,
    Table,
    examine,
    raised,
    without_some,
)
from .step_game import Broken, StepGame, WrongAdapter

Wanted = tuple[Literal["ask"], str, str, int] | tuple[Literal["preempt"], str]
"""``("ask", request, key, size)`` or ``("preempt", request)``."""

StepPlanned = tuple[Collection[str], Collection[str], Collection[str]]
"""The answers, the keys that the step frees, and those that it encodes."""


class StepCache(Protocol):
    """What the kit needs of the cache manager of a step engine: decisions about keys and sizes, never tensors. Requests
    and keys are texts, sizes and room are in one unit (bytes, embeddings), and everything is plain Python, so that an
    adapter need not import Triolet."""

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:
        """Plans the next step. The answers are one for each ``ask``, in order:

        - ``"hit"``: the output is there when the step reads, since an earlier step, or this one, encodes it.
        - ``"encode"``: the same, and this step encodes it, for this request and all that share it.
        - ``"later"``: no room, or no budget. The request asks again in later steps, or ends.
        - ``"never"``: larger than the whole room.

        After ``"hit"`` and ``"encode"`` the request holds the key, once, however often it asks again. ``preempt`` takes
        back all that the request holds and has asked for, in this step too; who shares a key with it keeps it.

        The encodings of one step take ``budget`` together, at most. The output of ``key`` has ``size`` in every call.
        """
        ...

    def executed(self, failed: Sequence[str]) -> None:
        """The oldest planned step has run. The encodings of ``failed`` left nothing, and all holds of these keys are
        over: who still needs one asks anew."""
        ...

    def release(self, request: str, key: str) -> None:
        """``request`` has read ``key``, and goes on. May come again, as a step loop does in each later step."""
        ...

    def finish(self, request: str) -> None:
        """``request`` has ended, was aborted, or was preempted between two steps: all that it holds and waits for is
        given back. May come again, and for a request that holds nothing. A preempted request asks anew later."""
        ...

    # and, where the declaration says so:
    # reset(): the device was emptied between two steps; nobody holds anything any more.
    # close(): no request asks any more; the next steps free all that is on the device.


MakeStepCache = Callable[[int], StepCache]
"""Makes an empty cache of so much room."""


@frozen(kw_only=True)
class Declaration:
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
        budgets: the engine has a budget of encoder compute for each step. False: the budget is always the whole room.
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


PROMISES = {
    promise.name: promise
    for promise in (
        Promise(
            step_game.NO_FREE_WHILE_HELD,
            Severity.CORRUPTS,
            "A step reads an output that is gone: an error at best, another request's image or voice at worst.",
        ),
        Promise(
            step_game.NO_PHANTOM,
            Severity.CORRUPTS,
            "The runner finds nothing under the key and crashes, or reads what happens to lie there.",
        ),
        Promise(
            step_game.ROOM_IS_KEPT,
            Severity.CRASHES,
            "The device holds more than the books say: it runs out of memory under load, long after the cause.",
        ),
        RAISES_NOTHING,
        Promise(
            step_game.EVERY_ASK_ANSWERED,
            Severity.HANGS,
            "A request waits for ever, and its client with it; under load the whole queue stands behind it.",
        ),
        Promise(
            step_game.ALWAYS_FREED,
            Severity.LEAKS,
            "Memory that nobody gives back is lost until the process ends, and with it the next engine's start.",
        ),
        Promise(
            step_game.FREES_HIT,
            Severity.LEAKS,
            "The free came before the output: it misses, and the output that comes later is in no book any more.",
        ),
        Promise(
            step_game.ENCODE_ONCE,
            Severity.WASTES,
            "The encoder computes what is there already, and writes over an output that others may be reading.",
        ),
        Promise(
            step_game.BUDGET_IS_KEPT,
            Severity.WASTES,
            "The step takes longer than planned, for everybody in it, and its activations may not fit.",
        ),
    )
}
"""The promises of a `StepCache`, the worst first."""

# -- workloads -------------------------------------------------------------------------------------------------------

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


def draw_workload(chance: random.Random, declared: Declaration) -> StepWorkload:
    """Up to 20 rounds of one to three requests on one to three keys in a room of 1 to 4, rarely of six each: few that
    get in each other's way find faults soonest."""
    roll = chance.random
    keys = _KEYS[: 6 if roll() < 0.1 else chance.randint(1, 3)]
    requests = _REQUESTS[: 6 if roll() < 0.1 else chance.randint(1, 3)]
    room = chance.randint(len(keys) - 2, len(keys) + 1) if len(keys) > 3 else chance.randint(1, 4)
    unit = _LARGE if roll() < 0.1 else 1
    pairs = [(request, key if declared.shared else f"{request}.{key}") for request in requests for key in keys]
    sizes = {}
    for _, key in pairs:
        if key not in sizes:
            too_large = declared.refuses and roll() < 0.06
            small = len(keys) > 3 or roll() < 0.4
            sizes[key] = unit * (room + 1 if too_large else 1 if small else chance.randint(1, room))
    operations = tuple(_operations(chance, declared, pairs, room * unit))
    hurried = roll() < 0.3
    failures = hurried and declared.may_fail_after_plan and roll() < 0.4
    return StepWorkload(room * unit, sizes, operations, hurried, tuple(sizes) if failures else ())


def _operations(
    chance: random.Random, declared: Declaration, pairs: list[tuple[str, str]], room: int
) -> Iterator[Operation]:
    """Plans and ends of steps in turn, with what requests do between them."""
    roll, in_flight = chance.random, 0
    for _ in range(chance.randint(1, 20)):
        if in_flight == declared.steps_in_flight or (in_flight and roll() < 0.4):
            in_flight -= 1
            fails = declared.may_fail_after_plan and roll() < 0.15
            yield "executed", (list(dict.fromkeys(key for _, key in pairs[:: chance.randint(1, 2)])),) if fails else ()
        else:
            in_flight += 1
            small = declared.budgets and roll() < 0.3
            budgets = (chance.randint(0, room),) if small else ()
            yield "plan", (_wanted(chance, pairs), *budgets)
        for _ in range(chance.randint(0, 2)):
            request, key = chance.choice(pairs)
            yield ("finish", (request,)) if roll() < 0.4 else ("release", (request, key))
        if declared.resets and roll() < 0.05:
            yield "reset", ()


def _wanted(chance: random.Random, pairs: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Up to five. Those that are preempted have mostly asked in the same step."""
    some: list[tuple[str, ...]] = []
    for _ in range(chance.randint(0, 5)):
        request, key = chance.choice(pairs)
        if chance.random() < 0.8:
            some.append(("ask", request, key))
        else:
            asked = [one[1] for one in some if one[0] == "ask"]
            some.append(("preempt", chance.choice(asked) if asked else request))
    return some


def simpler_workloads(workload: StepWorkload) -> Iterator[StepWorkload]:
    """Without some operations, without a part of one, with smaller numbers, with fewer names."""
    for fewer in without_some(workload.operations):
        yield evolve(workload, operations=fewer)
    for at, operation in enumerate(workload.operations):
        for smaller in _simpler_operations(operation):
            yield evolve(workload, operations=(*workload.operations[:at], smaller, *workload.operations[at + 1 :]))
    if workload.late_failures:
        yield evolve(workload, late_failures=())
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


# -- playing ---------------------------------------------------------------------------------------------------------

COLUMNS = ("step", "what happens", "answer", "frees", "encodes", "then on the device")


def play_steps(make_cache: MakeStepCache, declared: Declaration, workload: StepWorkload) -> None:
    """Plays ``workload`` on a new cache, brings it to its end (`StepGame.end`), and checks every promise on the way.

    Raises:
        BrokenPromise: the cache broke one, or raised an error.
        WrongAdapter: the adapter does not speak the protocol.
    """
    game = StepGame(make_cache(workload.room), workload.room, dict(workload.sizes), **declared.rules())
    try:
        for name, arguments in workload.operations:
            getattr(game, name)(*arguments)
        if workload.hurried:
            game.close(workload.late_failures)
        else:
            game.end()
    except Broken as broken:
        raise BrokenPromise(PROMISES[broken.promise], broken.what, Table(COLUMNS, game.rows), broken.kind) from None
    except WrongAdapter:
        raise
    except Exception as error:
        raise raised(error, Table(COLUMNS, game.rows)) from error


def examine_steps(
    make_cache: MakeStepCache,
    declared: Declaration | None = None,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
    subject: str | None = None,
) -> Findings:
    """Looks for workloads that break the promises of a `StepCache`.

    Args:
        make_cache: makes an empty cache of so much room; the adapter's class, if it takes the room alone.
        declared: what the engine does otherwise.
        seed: the same seed plays the same workloads.
        workloads: how many; a thousand take about a second.
        subject: what regression tests import, ``package.module:factory``; by default where ``make_cache`` was defined.

    Raises:
        TypeError: the adapter lacks a method, or does not speak the protocol.
    """
    declared = declared or Declaration()
    _check_methods(make_cache(1), declared)
    script = _script(subject or f"{make_cache.__module__}:{make_cache.__qualname__}", declared)
    play = partial(play_steps, make_cache, declared)
    return examine(
        lambda chance: draw_workload(chance, declared), play, simpler_workloads, script, seed=seed, workloads=workloads
    )


def _check_methods(cache: object, declared: Declaration) -> None:
    optional = [name for name, has in (("close", declared.closes), ("reset", declared.resets)) if has]
    missing = [name for name in ("plan", "executed", "release", "finish", *optional) if not hasattr(cache, name)]
    if missing:
        told = f"{type(cache).__name__} has no {missing[0]}"
        option = {"close": "; without one declare closes=False", "reset": "; without one declare resets=False"}
        raise WrongAdapter(f"{told}{option.get(missing[0], '')}; see triolet.testing.kit.steps.StepCache")


def _script(subject: str, declared: Declaration) -> Script[StepWorkload]:
    """Tests that carry the clients and the device along."""
    module, _, factory = subject.partition(":")
    prelude = f"{inspect.getsource(step_game)}\n\nfrom {module} import {factory}  # noqa: E402\n"
    rules = "".join(f", {name}={told!r}" for name, told in declared.rules().items())

    def body(workload: StepWorkload) -> str:
        begin = f"game = StepGame({factory}({workload.room}), {workload.room}, {dict(workload.sizes)!r}{rules})"
        return "\n".join([begin, *(f"game.{call}" for call in workload.calls())])

    return Script(prelude, body)
