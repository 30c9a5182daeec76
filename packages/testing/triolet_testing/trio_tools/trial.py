"""One run of a program under a schedule and a fault."""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any

import trio
from attrs import define, field, frozen

from . import promises
from .disturber import Disturber, interruptible
from .faults import Fault, TrioFault
from .generators import OpenGenerators
from .promises import PROMISES, Broken, told, without
from .schedules import Deadlock, Endless, InTurn, Recorder, Schedule, role, run_scheduled
from .threads import in_the_loop

MOST_TICKS = 50_000
"""The steps after which a program counts as endless."""


@frozen(kw_only=True)
class Case:
    """The schedule and the fault of one run. Its ``repr`` is Python that makes it again."""

    schedule: Schedule = field(factory=InTurn)
    fault: Fault[Any] | None = None


@define(eq=False)
class Trial:
    """One run of a program, as the program sees it."""

    case: Case
    broken: list[Broken] = field(factory=list)  # the worst first
    recorder: Recorder | None = None  # None: the schedule left all choices to trio
    given: Any = None  # what `Subject.around` has yielded
    error: BaseException | None = None  # the error that left the program and should not have
    disturber: Disturber = field(init=False)

    @disturber.default
    def _disturber(self) -> Disturber:
        return Disturber(self.case.fault)

    def part(self) -> AbstractAsyncContextManager[trio.CancelScope]:
        """Returns a block that a fault can cancel alone (`TrioFault.CANCEL_PART`), as a server does when a client has
        gone. The rest of the program goes on, and can check that it still works.
        """
        return self.disturber.block()

    @property
    def met(self) -> bool:
        """True if the fault has happened."""
        return self.disturber.met

    def breaks(self, promise: str, what: str, why: str = "") -> None:
        """Notes that the program has broken a promise. ``why`` says why this matters; it is needed if `PROMISES` does
        not have the promise."""
        self.broken.append(Broken(promise, what, why or PROMISES[promise]))


Program = Callable[[Trial], Awaitable[object]]


@frozen(kw_only=True)
class Subject:
    """A program and its surroundings.

    Args:
        program: called anew for every run.
        around: a block around the program that lives longer and is not cancelled.
        foreign: returns whether a task with this name is not the program's own. Such a task may end in any way, and its
            steps meet faults only after all other faults were tried.
        accepts: returns whether an error may leave the program after a fault.
        passes: errors that say nothing about the program, such as the error of a test that skips itself.
        more_faults: returns the faults that ``around`` makes happen. It is called after the first run.
    """

    program: Program
    around: Callable[[Trial], AbstractAsyncContextManager[object]] = field(default=lambda _: nullcontext())
    foreign: Callable[[str], bool] = field(default=lambda _: False)
    accepts: Callable[[BaseException, Fault[Any]], bool] = field(default=lambda *_: False)
    passes: tuple[type[BaseException], ...] = ()
    more_faults: Callable[[Trial], Iterable[Fault[Any]]] = field(default=lambda _: ())

    async def run(self, trial: Trial) -> None:
        """Runs the program once, and looks at what it has left behind."""
        async with self.around(trial) as trial.given:
            before = _tasks()
            generators = OpenGenerators(lambda task: task in before or self.foreign(role(task)))
            try:
                with generators.watched():
                    async with trial.disturber.block():
                        await self.program(trial)
            finally:
                self._look(trial, before, generators)

    def _look(self, trial: Trial, before: set[trio.lowlevel.Task], generators: OpenGenerators) -> None:
        names = {role(task) for task in _tasks() - before if not task.name.startswith(_OF_TRIO)}
        for name in sorted(name for name in names if not self.foreign(name)):
            trial.breaks(promises.NO_TASK, f"task {name!r} goes on when the program has ended")
        for name in sorted(set(generators.left)):
            trial.breaks(promises.GENERATORS, f"the async generator {name} was left open: use contextlib.aclosing")

    def judge(self, trial: Trial, error: BaseException | None) -> None:
        """Judges a run that has ended, with ``error`` or without one.

        Raises:
            KeyboardInterrupt: the user, not the fault, has pressed ^C.
        """
        fault = trial.case.fault if trial.met else None
        if fault is not None and fault.kind is TrioFault.INTERRUPT:
            rest = _judge_interrupt(trial, error)
        else:
            rest = error
            if error is not None and without(error, KeyboardInterrupt) is not error:
                raise KeyboardInterrupt
        if rest is not None and not (fault is not None and self.accepts(rest, fault)):
            trial.error = rest
            trial.breaks(_promise_of(fault), f"what left the program is {told(rest)}")
        for name, what in trial.disturber.swallowed:
            if not self.foreign(name):
                trial.breaks(promises.CANCELLATION, what)


_OF_TRIO = ("<", "close asyncgen")


def _promise_of(fault: Fault[Any] | None) -> str:
    """Returns the promise that an error breaks."""
    if fault is None:
        return promises.WORKS
    return promises.REST_WORKS if fault.kind is TrioFault.CANCEL_PART else promises.ONLY_THE_FAULT


def _judge_interrupt(trial: Trial, error: BaseException | None) -> BaseException | None:
    """Returns the errors that have left the program beside the ^C."""
    rest = None if error is None else without(error, KeyboardInterrupt)
    if error is None or rest is error:
        trial.breaks(promises.INTERRUPT, "the program went on as if nobody had pressed ^C")
    return rest


def run_trial(subject: Subject, case: Case, *, most_ticks: int = MOST_TICKS) -> Trial:
    """Runs ``subject`` once. The result lists the promises that the run has broken in `Trial.broken`."""
    trial = Trial(case)

    async def main() -> None:
        await subject.run(trial)

    def record(recorder: Recorder) -> None:
        trial.recorder = recorder

    error: BaseException | None = None
    with interruptible(case.fault), in_the_loop(), quiet():
        try:
            run_scheduled(
                main, schedule=case.schedule, instruments=[trial.disturber], recorded=record, most_ticks=most_ticks
            )
        except Deadlock as deadlock:
            trial.breaks(promises.IT_ENDS, str(deadlock))
            if isinstance(deadlock, Endless):
                _keep_for_ever(trial)
        except subject.passes:
            raise
        except BaseException as left:  # noqa: BLE001  (judged)
            error = left
        subject.judge(trial, error)
        del error
        trial.disturber.forget()
        if trial.broken:
            _collect(trial)
    order = list(PROMISES)
    trial.broken.sort(key=lambda one: order.index(one.promise) if one.promise in order else -1)
    return trial


def _keep_for_ever(trial: Trial) -> None:
    """Keeps the tasks of a run that took too many steps alive, even at the interpreter's end. If they were ended, they
    might swallow that and go on.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(trial.disturber.tasks))


def _collect(trial: Trial) -> None:
    """Ends the tasks that a run has left, so that they do not end within another run. The caller must hold no error of
    the run, since its traceback keeps frames alive.
    """
    if trial.recorder is not None:
        trial.recorder.forget()
    collect()


def collect() -> None:
    """Ends the tasks that runs have left, without warnings. These tasks set hooks as they end; the hooks are
    restored."""
    hooks = sys.get_asyncgen_hooks()
    with quiet():
        gc.collect()
    sys.set_asyncgen_hooks(*hooks)


@contextmanager
def quiet() -> Iterator[None]:
    """Silences warnings about generators and tasks that a fault has left, within the block. The trial reports them."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            yield
    finally:
        sys.unraisablehook = hook


def _tasks() -> set[trio.lowlevel.Task]:
    """Returns all tasks of the run but the current one."""
    found: set[trio.lowlevel.Task] = set()
    root = trio.lowlevel.current_root_task()
    unseen = [root] if root is not None else []
    while unseen:
        task = unseen.pop()
        found.add(task)
        unseen += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
    return found - {trio.lowlevel.current_task()}
