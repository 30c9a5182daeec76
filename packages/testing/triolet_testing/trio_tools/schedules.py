"""The schedules of trio programs. A schedule chooses the task that runs next; it is a value that can be sampled, shrunk
and replayed.

::

    run_scheduled(program, schedule=Uniform(seed=7))

A schedule's ``repr`` is Python that makes it again.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import trio
from attrs import define, field, frozen, validators

from .hooks import OneTaskPerTick, Pick, seeded_batches, virtual_clock

Result = TypeVar("Result")


class Deadlock(AssertionError):
    """The error raised if every task waits and no deadline will wake one. The message is the tree of tasks, each with
    the line where it waits.
    """


class Endless(Deadlock):
    """The error raised if the program has taken more steps than it may."""


@frozen
class Schedule:
    """The base class of schedules."""

    def picker(self) -> Pick | None:
        """Returns a function that picks one of the runnable tasks; ``None``: the choice is left to trio."""
        return None

    def around(self) -> AbstractContextManager[None]:
        """Returns a block around the whole run."""
        return nullcontext()


@frozen
class Batches(Schedule):
    """The schedule of trio itself: every runnable task in each tick, in an order that is shuffled by ``seed``. It is
    the fastest schedule and finds the fewest faults, since no task ever falls two steps behind another."""

    seed: int = 0

    def around(self) -> AbstractContextManager[None]:
        """Implements `Schedule.around`."""
        return seeded_batches(self.seed)


@frozen
class Uniform(Schedule):
    """One task a tick, each with the same chance."""

    seed: int = 0

    def picker(self) -> Pick:
        """Implements `Schedule.picker`."""
        draw = random.Random(self.seed).random
        return lambda tasks: int(draw() * len(tasks))


@frozen
class Pct(Schedule):
    """One task a tick: the task of the highest priority. Priorities are random, and at ``depth - 1`` random ticks the
    running task falls behind all others. The probability to find a bug that needs ``depth`` orderings is at least ``1 /
    (tasks * ticks ** (depth - 1))`` (Burckhardt et al., "A randomized scheduler with probabilistic guarantees of
    finding bugs", ASPLOS 2010)."""

    seed: int = 0
    depth: int = field(default=3, validator=validators.ge(1))
    ticks: int = field(default=400, validator=validators.ge(1))

    def __attrs_post_init__(self) -> None:
        if self.depth > self.ticks:
            raise ValueError(f"depth={self.depth}; allowed: up to ticks={self.ticks}")

    def picker(self) -> Pick:
        """Implements `Schedule.picker`."""
        rng = random.Random(self.seed)
        falls = frozenset(rng.sample(range(self.ticks), self.depth - 1))
        priorities: dict[trio.lowlevel.Task, float] = {}
        tick = 0

        def pick(tasks: list[trio.lowlevel.Task]) -> int:
            nonlocal tick
            for task in tasks:
                if task not in priorities:
                    priorities[task] = rng.random()
            if tick in falls:
                priorities[max(tasks, key=priorities.__getitem__)] = -float(tick + 1)
            tick += 1
            return max(range(len(tasks)), key=lambda index: priorities[tasks[index]])

        return pick


@frozen
class Listed(Schedule):
    """One task a tick: in tick n the ``choices[n]``-th of the runnable tasks. After the last choice it is always the
    longest waiting task. Hypothesis shrinks such a schedule to as few choices other than 0 as possible."""

    choices: tuple[int, ...] = field(default=(), converter=tuple)

    def picker(self) -> Pick:
        """Implements `Schedule.picker`."""
        rest = iter(self.choices)
        return lambda _: next(rest, 0)


@frozen
class InTurn(Schedule):
    """One task a tick, the longest waiting first, which is trio's plain order. The exceptions are pairs ``(n, k)`` in
    ``but``: in tick n the k-th of the runnable tasks runs, counted from 0. `shrink` shrinks a failing schedule to the
    fewest pairs.
    """

    but: tuple[tuple[int, int], ...] = ()

    def picker(self) -> Pick:
        """Implements `Schedule.picker`."""
        choices, ticks = dict(self.but), itertools.count()
        return lambda _: choices.get(next(ticks), 0)


@frozen
class Overtaking:
    """A departure from the plain order: in tick ``tick`` the task ``chosen`` ran before ``waiting``, which had waited
    longer."""

    tick: int
    choice: int
    chosen: str
    waiting: str


@define(eq=False)
class Recorder:
    """A wrapper of a schedule's picker that records the departures from `InTurn`."""

    pick: Pick
    overtakings: list[Overtaking] = field(factory=list)
    _ticks: int = 0

    def __call__(self, tasks: list[trio.lowlevel.Task]) -> int:
        """Picks a task, and records whether it has overtaken another."""
        choice = self.pick(tasks) % len(tasks)
        if choice:
            self.overtakings.append(Overtaking(self._ticks, choice, role(tasks[choice]), role(tasks[0])))
        self._ticks += 1
        return choice

    def forget(self) -> None:
        """Drops the picker, which refers to tasks."""
        self.pick = InTurn().picker()

    @property
    def schedule(self) -> InTurn:
        """The schedule of the run that was recorded, as a value that can be shrunk."""
        return InTurn(tuple((one.tick, one.choice) for one in self.overtakings))


@frozen
class _Bounded:
    """A wrapper of a picker that gives up after ``most`` ticks."""

    pick: Pick
    most: int
    ticks: Iterator[int] = field(factory=itertools.count)

    def __call__(self, tasks: list[trio.lowlevel.Task]) -> int:
        if next(self.ticks) >= self.most:
            raise Endless(f"the program has not ended after {self.most} steps:\n{task_tree()}")
        return self.pick(tasks)


def role(task: trio.lowlevel.Task) -> str:
    """Returns a task's name without its module and class. Names of trio's own tasks begin with ``<``."""
    return task.name if task.name.startswith("<") else task.name.rsplit(".", 1)[-1]


@define(eq=False)
class _Watch:
    """A watcher of deadlocks. The first one cancels the program, so that it can clean up. At the second one the watcher
    gives up.
    """

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    tree: str | None = None

    def deadlocked(self) -> None:
        if self.tree is not None:
            raise Deadlock(f"the program does not end although it was cancelled:\n{task_tree()}")
        self.tree = task_tree()
        self.scope.cancel()


def run_scheduled(
    program: Callable[[], Awaitable[Result]],
    *,
    schedule: Schedule | None = None,
    instruments: Sequence[trio.abc.Instrument] = (),
    recorded: Callable[[Recorder], None] | None = None,
    most_ticks: int | None = None,
) -> Result:
    """Runs an async program on virtual time under a schedule, and returns its result.

    Args:
        program: called without arguments.
        schedule: chooses the task that runs next; by default one random task a tick.
        instruments: further instruments for trio.
        recorded: called before the run with the recorder of the choices, if the schedule makes choices.
        most_ticks: the number of ticks after which the program counts as endless, if the schedule makes choices.

    Raises:
        Deadlock: all tasks of the program wait for ever, or there are more than ``most_ticks``.
        Exception: whatever the program raises.
    """
    schedule = schedule or Uniform()
    watch = _Watch()
    result: list[Result] = []

    async def main() -> None:
        with watch.scope:
            result.append(await program())

    pick = schedule.picker()
    if pick is not None and recorded is not None:
        pick = Recorder(pick)
        recorded(pick)
    if pick is not None and most_ticks is not None:
        pick = _Bounded(pick, most_ticks)
    hooks = [*instruments, OneTaskPerTick(pick)] if pick is not None else instruments
    try:
        with schedule.around(), _collector_held():
            trio.run(main, clock=virtual_clock(watch.deadlocked), instruments=hooks)
    except trio.TrioInternalError as error:
        if isinstance(error.__cause__, Deadlock):
            raise error.__cause__ from None
        raise
    if watch.tree is not None:
        raise Deadlock(f"every task waits, and no deadline will wake any:\n{watch.tree}")
    return result[0]


@contextmanager
def _collector_held() -> Iterator[None]:
    """Keeps the garbage collector off within the block. Otherwise finalizers would run at a step that depends on
    everything that ran before.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def task_tree() -> str:
    """Returns the tasks of the run, indented under their parents, each with the line where it waits."""
    lines: list[str] = []

    def walk(task: trio.lowlevel.Task, depth: int) -> None:
        lines.append("  " * depth + f"{task.name}: {where_of(task)}")
        for nursery in task.child_nurseries:
            for child in sorted(nursery.child_tasks, key=lambda child: child.name):
                walk(child, depth + 1)

    root = trio.lowlevel.current_root_task()
    if root is not None:
        walk(root, 0)
    return "\n".join(lines)


def where_of(task: trio.lowlevel.Task) -> str:
    """Returns the place of the task's innermost frame that belongs neither to trio, nor to these tools, nor to
    contextlib, which stands between a program and the block that it enters or leaves."""
    where = "about to start"
    for frame, line in task.iter_await_frames():
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] not in ("trio", "contextlib") and module.rpartition(".")[0] != __package__:
            where = f"{frame.f_code.co_qualname} at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{line}"
    return where


# ---- shrinking -------------------------------------------------------------------------------------------------------


Pairs = tuple[tuple[int, int], ...]
Fails = Callable[[Pairs], bool]


def shrink(schedule: InTurn, fails: Callable[[InTurn], bool], *, most_runs: int = 300) -> InTurn:
    """Returns the shortest schedule found that ``fails`` as ``schedule`` does: the one with the fewest departures from
    trio's plain order. The search first leaves out pairs, then makes choices smaller. At most ``most_runs`` schedules
    are tried; schedules beyond this limit count as not failing.
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
