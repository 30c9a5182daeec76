"""The private parts of trio that deterministic simulation needs. No other file uses private parts of trio.

If a release of trio has moved a part, `TrioChanged` names it at the first use.
"""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
import trio.testing
from attrs import define, field

_created: Callable[[trio.lowlevel.Task], int] = operator.attrgetter("_counter")
Pick = Callable[[list[trio.lowlevel.Task]], int]  # takes the runnable tasks; returns the index of the one to run


_NEEDED = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT", "Deadlines")  # in the module of the run loop


class TrioChanged(RuntimeError):
    """The error raised if a private part of trio is not where it was."""


def _run_module() -> Any:
    """Returns the module of trio's run loop.

    Raises:
        TrioChanged: a part of the loop that these tools need has moved.
    """
    try:
        import trio._core._run as run
    except ImportError as error:
        raise TrioChanged("this version of trio has no trio._core._run") from error
    for name in _NEEDED:
        if not hasattr(run, name):
            raise TrioChanged(f"this version of trio has no trio._core._run.{name}")
    for name in ("_counter", "_next_send", "_next_send_fn"):
        if not hasattr(trio.lowlevel.Task, name):
            raise TrioChanged(f"this version of trio has no trio.lowlevel.Task.{name}")
    if not hasattr(trio.Nursery, "_nested_child_finished"):
        raise TrioChanged("this version of trio has no trio.Nursery._nested_child_finished")
    if not isinstance(run._r, random.Random):
        raise TrioChanged("in this version of trio, trio._core._run._r is not a random.Random")
    return run


class _OneTaskQueue(list[trio.lowlevel.Task]):
    """A replacement of trio's run queue that gives the loop one task a tick: the task that ``pick`` chooses.

    trio's own queue gives every runnable task its turn in every tick, so that no task ever falls behind another by two
    steps. So many orders that happen in production never happen in a test. This queue is a list, the longest waiting
    task first, since trio appends to the queue and takes its length several times a tick.
    """

    __slots__ = ("_given", "_pick", "_seen")

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self._pick = pick
        self._seen = 0  # how many of the tasks were in the queue at the last tick
        self._given: int | None = None

    def __iter__(self) -> Iterator[trio.lowlevel.Task]:
        """Returns the tasks of trio's next batch, which has one task."""
        waiting = len(self)
        if waiting - self._seen > 1:
            # tasks that are woken together come in the order of their addresses, as trio's sets have them
            self[self._seen :] = sorted(self[self._seen :], key=_created)
        self._seen = waiting
        if not waiting:
            return iter(())
        self._given = self._pick(self[:]) % waiting
        return iter((self[self._given],))

    def clear(self) -> None:
        """Removes the task of the batch that trio has just made."""
        if self._given is not None:
            del self[self._given]
            self._seen -= 1
            self._given = None


class _AsksSeldom:
    """A replacement of trio's I/O manager. It asks the system only in ticks in which there may be an event: a task
    waits for a file, or a thread or a signal handler has handed a call over. The task that takes these calls always
    waits for a file, and does not count.
    """

    def __init__(self, runner: Any) -> None:
        manager = self._manager = runner.io_manager
        self._waited_for, self._poll = manager._registered, manager.get_events
        self._handed_over, self._handed_over_once = runner.entry_queue.queue, runner.entry_queue.idempotent_queue
        self.process_events = manager.process_events

    def get_events(self, timeout: float) -> Any:
        """Returns the events of a tick to trio."""
        idle = len(self._waited_for) <= 1 and not self._handed_over and not self._handed_over_once
        return () if idle and timeout <= 0 else self._poll(timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


@define(eq=False)
class OneTaskPerTick(trio.abc.Instrument):
    """An instrument that replaces the run queue and the I/O manager of its run."""

    pick: Pick
    _run: Any = field(factory=_run_module, init=False)

    def before_run(self) -> None:
        """Implements `trio.abc.Instrument.before_run`, which trio calls when its runner exists and has no task yet."""
        runner = self._run.GLOBAL_RUN_CONTEXT.runner
        runner.runq = _OneTaskQueue(self.pick)
        if hasattr(runner.io_manager, "_registered"):  # on Windows trio's I/O manager stays
            runner.io_manager = _AsksSeldom(runner)


def virtual_clock(on_deadlock: Callable[[], None]) -> trio.testing.MockClock:
    """Returns a clock that jumps to the next deadline when all tasks wait. If there is no deadline, no task will ever
    wake. Then the clock calls ``on_deadlock``, once each time. `trio.testing.MockClock` would spin for ever.
    """
    clock = trio.testing.MockClock(autojump_threshold=0)
    hidden: Any = clock
    for name in ("_autojump", "_virtual_base"):
        if not hasattr(clock, name):
            raise TrioChanged(f"this version of trio has no trio.testing.MockClock.{name}")
    run = _run_module()

    def jump_or_tell() -> None:
        deadline = run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if deadline == math.inf:
            on_deadlock()
        else:
            hidden._virtual_base = max(deadline, hidden._virtual_base)

    hidden._autojump = jump_or_tell
    hidden.current_time = lambda: hidden._virtual_base  # the rate of the clock is 0
    return clock


def _deadlines() -> Any:
    """Returns the deadlines of the present run."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    return GLOBAL_RUN_CONTEXT.runner.deadlines


@define(eq=False)
class Alarm:
    """An alarm for the one task that waits for it. It rings at a time of trio's clock, or earlier if `ring` is called.
    An earlier end of `trio.sleep_until` would need a cancel scope and an exception, which cost as much as ten steps of
    a task.

    An alarm is registered among trio's deadlines, where it looks like a cancel scope.
    """

    _registered_deadline: float = field(default=math.inf, init=False)
    _waiting: trio.lowlevel.Task | None = field(default=None, init=False)

    @property
    def is_waited_for(self) -> bool:
        """True if a task waits and was not woken yet."""
        return self._waiting is not None

    async def wait(self) -> None:
        """Sleeps until the alarm rings."""
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._aborted)

    def _aborted(self, _: object) -> trio.lowlevel.Abort:
        self._waiting = None
        self.set(math.inf)
        return trio.lowlevel.Abort.SUCCEEDED

    def set(self, deadline: float) -> None:
        """Sets the alarm to ``deadline``, in place of its present deadline."""
        deadlines = _deadlines()
        if self._registered_deadline < math.inf:
            deadlines.remove(self._registered_deadline, self)
        self._registered_deadline = deadline
        if deadline < math.inf:
            deadlines.add(deadline, self)

    def ring(self) -> None:
        """Rings now: wakes the task that waits."""
        self.set(math.inf)
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(task)

    def _cancel(self, _: object) -> None:
        """Rings. trio calls this method when the deadline has come."""
        self.ring()


@contextmanager
def seeded_batches(seed: int) -> Iterator[None]:
    """Makes trio shuffle its batches of tasks by ``seed`` within the block, instead of by chance."""
    run = _run_module()
    allowed, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = allowed
        run._r.setstate(state)


def throw_into(task: trio.lowlevel.Task, error: Exception) -> object:
    """Raises ``error`` in ``task``, which is about to run, at the place where the task waited. Returns the value that
    the task would have received instead. Call this function from `trio.abc.Instrument.before_task_step`."""
    hidden: Any = task
    given = hidden._next_send
    hidden._next_send_fn, hidden._next_send = task.coro.throw, error
    return getattr(given, "value", None)


def leaves_a_nursery(task: trio.lowlevel.Task) -> bool:
    """Returns whether ``task`` waits at the end of a nursery's block, within trio. No program can raise there. An error
    that is thrown into the task there leaves the nursery open for ever.
    """
    return any(frame.f_code.co_name == "_nested_child_finished" for frame, _ in task.iter_await_frames())


def about_to_raise(task: trio.lowlevel.Task) -> BaseException | None:
    """Returns the error that trio is about to raise in ``task``, at the place where it waited; ``None``: trio raises
    nothing."""
    hidden: Any = task
    return getattr(hidden._next_send, "error", None)


def errors_within(nursery: trio.Nursery | None) -> int:
    """Returns how many tasks of ``nursery`` have ended with an error so far."""
    hidden: Any = nursery
    return len(getattr(hidden, "_pending_excs", ()))
