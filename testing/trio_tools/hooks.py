"""The private parts of trio that deterministic simulation needs: all of them, and in this file alone.

`self_test` runs each hook against the installed trio and says which one a new release has moved.
"""

from __future__ import annotations

import math
import operator
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import trio
import trio.testing
from attrs import define, field

_created: Callable[[trio.lowlevel.Task], int] = operator.attrgetter("_counter")
Pick = Callable[[list[trio.lowlevel.Task]], int]  # takes the runnable tasks; returns the index of the one to run


_NEEDED = ("_ALLOW_DETERMINISTIC_SCHEDULING", "_r", "GLOBAL_RUN_CONTEXT", "Deadlines")  # in the module of the run loop


class TrioChanged(RuntimeError):
    """A private part of trio is not where it was."""


def _run_module() -> Any:
    """The module of trio's run loop; `TrioChanged` where it has moved."""
    try:
        import trio._core._run as run
    except ImportError as error:
        raise TrioChanged("trio._core._run is gone") from error
    for name in _NEEDED:
        if not hasattr(run, name):
            raise TrioChanged(f"trio._core._run.{name} is gone")
    for name in ("_counter", "_next_send", "_next_send_fn"):
        if not hasattr(trio.lowlevel.Task, name):
            raise TrioChanged(f"trio.lowlevel.Task.{name} is gone")
    if not hasattr(trio.Nursery, "_nested_child_finished"):
        raise TrioChanged("trio.Nursery._nested_child_finished is gone")
    if not isinstance(run._r, random.Random):
        raise TrioChanged("trio._core._run._r is no random.Random")
    return run


class _OneTaskQueue(list[trio.lowlevel.Task]):
    """Replaces trio's run queue, and gives the loop one task a tick: the one that ``pick`` chooses.

    trio's own queue gives every runnable task its turn in every tick, so that no task ever falls behind another by two
    steps: many orders never happen in a test, and do in production. This queue is a list, the longest waiting first,
    since trio appends to it and takes its length several times a tick.
    """

    __slots__ = ("_given", "_pick", "_seen")

    def __init__(self, pick: Pick) -> None:
        super().__init__()
        self._pick = pick
        self._seen = 0  # how many of the tasks were there at the last tick
        self._given: int | None = None

    def __iter__(self) -> Iterator[trio.lowlevel.Task]:
        """The tasks of trio's next batch: one."""
        waiting = len(self)
        if waiting - self._seen > 1:
            # tasks woken together come in the order of trio's sets, that is of their addresses
            self[self._seen :] = sorted(self[self._seen :], key=_created)
        self._seen = waiting
        if not waiting:
            return iter(())
        self._given = self._pick(self[:]) % waiting
        return iter((self[self._given],))

    def clear(self) -> None:
        """trio has made its batch."""
        if self._given is not None:
            del self[self._given]
            self._seen -= 1
            self._given = None


class _AsksSeldom:
    """Replaces trio's I/O manager, and asks the system in a tick only where there may be an event: where a task waits
    for a file, or where a thread or a signal handler has handed a call over. One task always waits for a file: the task
    that takes these calls."""

    def __init__(self, runner: Any) -> None:
        manager = self._manager = runner.io_manager
        self._waited_for, self._poll = manager._registered, manager.get_events
        self._handed_over, self._handed_over_once = runner.entry_queue.queue, runner.entry_queue.idempotent_queue
        self.process_events = manager.process_events

    def get_events(self, timeout: float) -> Any:
        """trio calls it in each tick."""
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
        """trio calls it once its runner exists, before the runner has a task."""
        runner = self._run.GLOBAL_RUN_CONTEXT.runner
        runner.runq = _OneTaskQueue(self.pick)
        if hasattr(runner.io_manager, "_registered"):  # not on Windows, where trio's I/O manager stays
            runner.io_manager = _AsksSeldom(runner)


def virtual_clock(on_deadlock: Callable[[], None]) -> trio.testing.MockClock:
    """A clock that jumps to the next deadline when all tasks wait. Where there is no deadline, no task will ever wake:
    the clock calls ``on_deadlock``, once each time, instead of spinning for ever as `trio.testing.MockClock` does."""
    clock = trio.testing.MockClock(autojump_threshold=0)
    hidden: Any = clock
    for name in ("_autojump", "_virtual_base"):
        if not hasattr(clock, name):
            raise TrioChanged(f"trio.testing.MockClock.{name} is gone")
    run = _run_module()

    def jump_or_tell() -> None:
        deadline = run.GLOBAL_RUN_CONTEXT.runner.deadlines.next_deadline()
        if deadline == math.inf:
            on_deadlock()
        else:
            hidden._virtual_base = max(deadline, hidden._virtual_base)

    hidden._autojump = jump_or_tell
    hidden.current_time = lambda: hidden._virtual_base  # its rate is 0
    return clock


def _deadlines() -> Any:
    """The deadlines of the present run."""
    from trio._core._run import GLOBAL_RUN_CONTEXT

    return GLOBAL_RUN_CONTEXT.runner.deadlines


@define(eq=False)
class Alarm:
    """Wakes the one task that waits for it, at a time of trio's clock, or earlier when it is rung. `trio.sleep_until`
    needs a cancel scope and an exception for that, which take as long as ten steps of a task.

    An alarm lies among trio's deadlines, where it looks like a cancel scope.
    """

    _registered_deadline: float = field(default=math.inf, init=False)
    _waiting: trio.lowlevel.Task | None = field(default=None, init=False)

    @property
    def is_waited_for(self) -> bool:
        """True if a task waits that was not woken yet."""
        return self._waiting is not None

    async def wait(self) -> None:
        """Sleeps until it rings."""
        self._waiting = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._aborted)

    def _aborted(self, _: object) -> trio.lowlevel.Abort:
        self._waiting = None
        self.set(math.inf)
        return trio.lowlevel.Abort.SUCCEEDED

    def set(self, deadline: float) -> None:
        """Has it ring at ``deadline``, and at no earlier setting."""
        deadlines = _deadlines()
        if self._registered_deadline < math.inf:
            deadlines.remove(self._registered_deadline, self)
        self._registered_deadline = deadline
        if deadline < math.inf:
            deadlines.add(deadline, self)

    def ring(self) -> None:
        """Rings now."""
        self.set(math.inf)
        if self._waiting is not None:
            task, self._waiting = self._waiting, None
            trio.lowlevel.reschedule(task)

    def _cancel(self, _: object) -> None:
        """trio calls it when the deadline has come."""
        self.ring()


@contextmanager
def seeded_batches(seed: int) -> Iterator[None]:
    """Within the block trio shuffles its batches of tasks by ``seed``, not by chance."""
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
    """Has ``error`` raised in ``task``, which is about to run, where the task waited. Returns the value that the task
    would have got instead. Call it from `trio.abc.Instrument.before_task_step`."""
    hidden: Any = task
    given = hidden._next_send
    hidden._next_send_fn, hidden._next_send = task.coro.throw, error
    return getattr(given, "value", None)


def leaves_a_nursery(task: trio.lowlevel.Task) -> bool:
    """True if ``task`` waits at the end of a nursery's block, within trio. An error thrown into the task there leaves
    the nursery open for ever; no program can raise there."""
    return any(frame.f_code.co_name == "_nested_child_finished" for frame, _ in task.iter_await_frames())


def about_to_raise(task: trio.lowlevel.Task) -> BaseException | None:
    """The error that ``task``, which is about to run, will have raised where it waited."""
    hidden: Any = task
    return getattr(hidden._next_send, "error", None)


def errors_within(nursery: trio.Nursery | None) -> int:
    """How many errors the tasks of ``nursery`` have ended with so far."""
    hidden: Any = nursery
    return len(getattr(hidden, "_pending_excs", ()))


# -- the self-test ---------------------------------------------------------------------------------------------------


def self_test() -> None:
    """Raises `TrioChanged` unless every hook does with the installed trio what it promises."""
    if (_order("ab", later="b"), _order("ab", later="a")) != ("aaabbb", "bbbaaa"):
        raise TrioChanged("the run queue was replaced, but trio does not run the tasks that are picked")
    orders = []
    for seed in (1, 1, 2, 3, 4):
        with seeded_batches(seed):
            orders.append(_order("abcdefgh"))
    if orders[0] != orders[1] or len(set(orders)) == 1:
        raise TrioChanged("trio's batches do not follow the seed")
    if not _is_thrown_into():
        raise TrioChanged("an error does not come out where it was thrown in")
    if (heard := _how_tasks_end()) != ["sound: told", "sound: 1 more", "swallows: told", "swallows: 0 more"]:
        raise TrioChanged(f"of tasks that are cancelled one sees only {heard}")
    if not _tells_of_a_deadlock():
        raise TrioChanged("the virtual clock does not tell of a deadlock")
    if (heard := _hears_of_files_and_threads()) != ["handed over", "then", "handed over once", "then", "file"]:
        raise TrioChanged(f"of a file and what is handed over, a run with one task a tick hears only {heard}")
    if (times := _times_of_alarms()) != [0.5, 1.0, 2.0]:
        raise TrioChanged(f"alarms do not ring when they should, but at {times}")
    if (times := _times_of_sleeps()) != [0.5, 1.75]:
        raise TrioChanged(f"the virtual clock does not jump to the next deadline, but to {times}")


def _order(names: str, *, later: str = "") -> str:
    """The order in which tasks of these names take three steps each; ``later`` runs only when no other task can."""
    order: list[str] = []

    async def take_steps(name: str) -> None:
        for _ in range(3):
            order.append(name)
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(take_steps, name, name=name)

    def pick(tasks: list[trio.lowlevel.Task]) -> int:
        return min(range(len(tasks)), key=lambda index: tasks[index].name == later)

    trio.run(main, instruments=[OneTaskPerTick(pick)] if later else [])
    return "".join(order)


def _hears_of_files_and_threads() -> list[str]:
    """The events that reach a run while one of its tasks is always ready: one after another, so that no two come
    together."""
    heard: list[str] = []
    near, far = socket.socketpair()

    async def read() -> None:
        await trio.lowlevel.wait_readable(near)
        heard.append("file")

    async def go_on() -> None:
        for _ in range(20):
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        await go_on()
        token.run_sync_soon(heard.append, "handed over")
        await go_on()
        heard.append("then")
        token.run_sync_soon(heard.append, "handed over once", idempotent=True)
        await go_on()
        heard.append("then")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await go_on()
            far.send(b"!")
            await go_on()
            nursery.cancel_scope.cancel()

    with near, far:
        trio.run(main, instruments=[OneTaskPerTick(lambda _: 0)])
    return heard


def _is_thrown_into() -> bool:
    class Thrower(trio.abc.Instrument):
        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            if task.name == "victim" and task.coro.cr_await is not None:
                throw_into(task, LookupError("thrown"))

    caught: list[Exception] = []

    async def wait() -> None:
        try:
            await trio.lowlevel.checkpoint()
        except LookupError as error:
            caught.append(error)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, name="victim")

    trio.run(main, instruments=[Thrower()])
    return len(caught) == 1


def _how_tasks_end() -> list[str]:
    """What is seen of two tasks that are cancelled, one after the other, of which the second swallows it."""
    seen: list[str] = []

    class Observer(trio.abc.Instrument):
        errors = 0

        def before_task_step(self, task: trio.lowlevel.Task) -> None:
            self.errors = errors_within(task.parent_nursery)
            if isinstance(about_to_raise(task), trio.Cancelled) and not task.name.startswith("<"):
                seen.append(f"{task.name}: told")

        def task_exited(self, task: trio.lowlevel.Task) -> None:
            if seen and seen[-1] == f"{task.name}: told":
                seen.append(f"{task.name}: {errors_within(task.parent_nursery) - self.errors} more")

    async def swallows() -> None:
        with suppress(trio.Cancelled):
            await trio.sleep_forever()

    async def main() -> None:
        for name, waits in (("sound", trio.sleep_forever), ("swallows", swallows)):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(waits, name=name)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()

    trio.run(main, instruments=[Observer()])
    return seen


def _tells_of_a_deadlock() -> bool:
    scope = trio.CancelScope()

    async def main() -> None:
        with scope:
            await trio.sleep_forever()

    trio.run(main, clock=virtual_clock(scope.cancel))
    return scope.cancelled_caught


def _times_of_sleeps() -> list[float]:
    """The virtual times at which two tasks wake up that sleep 0.5 s and 1.75 s."""
    times: list[float] = []

    async def nap(seconds: float) -> None:
        await trio.sleep(seconds)
        times.append(trio.current_time())

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for seconds in (1.75, 0.5):
                nursery.start_soon(nap, seconds)

    trio.run(main, clock=virtual_clock(lambda: None))
    return times


def _times_of_alarms() -> list[float]:
    """When a task wakes up whose alarm rings 0.5 s after it was set, is rung after 0.5 s more instead of later, and is
    cancelled after another second."""
    times: list[float] = []
    alarm = Alarm()

    async def ring() -> None:
        await trio.sleep(1.0)
        alarm.ring()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ring)
            for deadline in (0.5, 7.0, 9.0):
                alarm.set(deadline)
                with trio.move_on_at(2.0):
                    await alarm.wait()
                times.append(trio.current_time())

    trio.run(main, clock=virtual_clock(lambda: None))
    return times
