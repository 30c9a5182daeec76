"""The sweep of a trio program: every fault at every step of every task, and many schedules.

::

    async def program(trial):
        async with service() as address:
            async with trial.part():  # a client, which may leave at any time
                await ask(address)
            await ask(address)  # the service still answers


    def test_my_service():
        check_program(program)
"""

from __future__ import annotations

import gc
import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from attrs import define, field, frozen

from .faults import Fault, TrioFault
from .promises import IT_ENDS, Broken
from .schedules import InTurn, Overtaking, Pct, Schedule, Uniform, shrink
from .trial import MOST_TICKS, Case, Program, Subject, Trial, collect, run_trial

_PATIENCE = 5  # times the steps of the first run, after which a run counts as endless
_SHARE = 10  # one of this many runs has no fault
_REPEATED = 3  # how often one kind of fault may break one promise in one task, before other faults are tried


class ProgramBroken(AssertionError):
    """The error raised if a program has broken promises. The message says which, in which run, and how to repeat the
    run."""


@frozen(kw_only=True)
class ProgramFailure:
    """A broken promise, and the shortest run found that breaks it."""

    broken: Broken
    case: Case
    place: str = ""  # where the task stood at whose step the fault happened
    overtakings: tuple[Overtaking, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.broken.promise}: {self.broken.what}", f"  Why it matters: {self.broken.why}"]
        lines += [f"  fault: {self.fault}", f"  schedule: {self.schedule}", f"  case: {self.case!r}"]
        return "\n".join(lines)

    @property
    def fault(self) -> str:
        """The fault in words, with its place."""
        fault = self.case.fault
        if fault is None:
            return "none"
        if not isinstance(fault.kind, TrioFault):
            return f"{fault.kind.value}, at number {fault.step} of the {fault.task}"
        standing = f", which stands in {self.place}" if self.place else ""
        return f"{fault.kind.value}, just before step {fault.step} of task {fault.task!r}{standing}"

    @property
    def schedule(self) -> str:
        """The schedule in words."""
        if not isinstance(self.case.schedule, InTurn):
            return repr(self.case.schedule)
        if not self.case.schedule.but:
            return "trio's plain order"
        told = ", ".join(f"in tick {one.tick} {one.chosen!r} before {one.waiting!r}" for one in self.overtakings)
        return f"trio's plain order, but {told}"


@define(kw_only=True)
class ProgramReport:
    """The outcome of a sweep of a program."""

    runs: int = 0
    faults: int = 0  # runs in which the fault happened
    left_out: int = 0  # faults that were left out, since there were too few runs
    failures: list[ProgramFailure] = field(factory=list)

    def __str__(self) -> str:
        told = [f"{number}. {failure}" for number, failure in enumerate(self.failures, 1)]
        return "\n\n".join([*told, self.counts])

    @property
    def counts(self) -> str:
        """The numbers of runs and faults, in words."""
        out = f"; {self.left_out} places of a fault left out: more runs take them in" if self.left_out else ""
        return f"{self.runs} runs, {self.faults} faults{out}"

    def raise_if_any(self) -> None:
        """Raises `ProgramBroken` if a promise was broken."""
        if self.failures:
            raise ProgramBroken(f"{len(self.failures)} broken promises\n\n{self}")


@define(eq=False)
class _Sweep:
    """One sweep under way."""

    subject: Subject
    kinds: Sequence[TrioFault]
    runs: int
    seed: int
    ignored: frozenset[str]
    most_failures: int
    report: ProgramReport = field(factory=ProgramReport)
    most_ticks: int = MOST_TICKS
    _seen: set[tuple[str, str]] = field(factory=set)
    _broken_by: Counter[tuple[object, str, str]] = field(factory=Counter)
    _any_broken: bool = False  # whether any run broke a promise, even one that is ignored

    def go(self) -> ProgramReport:
        """Runs the cases. Objects that exist already are frozen meanwhile, since in a large process the garbage
        collector would scan them for a second in each run. A process that has frozen objects of its own is left alone.
        """
        if gc.get_freeze_count():
            self._go()
            return self.report
        gc.freeze()
        try:
            self._go()
        finally:
            gc.unfreeze()
        if self._any_broken:  # tasks of runs may refer to objects that were frozen: they end here
            collect()
        return self.report

    def _go(self) -> None:
        first = self._take(Case())
        self.most_ticks = min(MOST_TICKS, _PATIENCE * (sum(first.disturber.steps.values()) + 200))
        for case in () if self.report.failures else self._cases(first):
            if self.report.runs >= self.runs or len(self.report.failures) >= self.most_failures:
                break
            if case.fault is None or not self._is_known(case.fault):
                self._take(case)

    def _is_known(self, fault: Fault[Any]) -> bool:
        """Returns whether this kind of fault has broken a promise so often in this task that it need not be tried
        again."""
        return any(
            (kind, task) == (fault.kind, fault.task) and times >= _REPEATED
            for (kind, task, _), times in self._broken_by.items()
        )

    def _cases(self, first: Trial) -> Iterator[Case]:
        """Yields some schedules without a fault, then every fault under trio's plain order, then random faults under
        more schedules."""
        schedules = self._schedules()
        yield from (Case(schedule=schedule) for schedule in itertools.islice(schedules, max(1, self.runs // _SHARE)))
        own, foreign = self._places(first)
        chosen = _spread(own, self.runs - self.report.runs)
        chosen += _spread(foreign, self.runs - self.report.runs - len(chosen))
        self.report.left_out = len(own) + len(foreign) - len(chosen)
        yield from (Case(fault=fault) for fault in chosen)
        rng = random.Random(self.seed)
        while chosen := [fault for fault in chosen if not self._is_known(fault)]:
            yield Case(schedule=next(schedules), fault=rng.choice(chosen))

    def _schedules(self) -> Iterator[Schedule]:
        for seed in itertools.count(self.seed):
            yield from (Pct(seed), Uniform(seed))

    def _places(self, first: Trial) -> tuple[list[Fault[Any]], list[Fault[Any]]]:
        """Returns two lists. The first has the faults at steps of the program's own tasks, and the subject's own
        faults; the second has the faults at steps of other tasks."""
        names = sorted(name for name in first.disturber.steps if not name.startswith("<"))
        own = [fault for name in names if not self.subject.foreign(name) for fault in self._at(name, first)]
        foreign = [fault for name in names if self.subject.foreign(name) for fault in self._at(name, first)]
        return own + list(self.subject.more_faults(first)), foreign

    def _at(self, name: str, first: Trial) -> Iterator[Fault[Any]]:
        """Yields the faults at every step of a task."""
        for kind in self.kinds:
            steps: Iterable[int] = range(1, first.disturber.steps[name] + 1)
            if kind is TrioFault.CANCEL_PART:
                steps = first.disturber.within_parts.get(name, ())
            yield from (Fault(kind, name, step) for step in steps)

    def _take(self, case: Case) -> Trial:
        """Runs a case, and shrinks its failure if the failure is new."""
        trial = self._run(case)
        self.report.runs += 1
        self.report.faults += trial.met
        if trial.broken and trial.met and case.schedule != InTurn():  # the schedule alone may be the cause
            bare = self._run(Case(schedule=case.schedule))
            trial = bare if self._worst(bare) is not None else trial
        broken = self._worst(trial)
        if broken is not None and _key(broken) not in self._seen:
            trial = self._with_patience(trial)
            broken = self._worst(trial)
        if broken is None:
            return trial
        if trial.case.fault is not None:
            self._broken_by[trial.case.fault.kind, trial.case.fault.task, broken.promise] += 1
        if _key(broken) not in self._seen:
            self._seen.add(_key(broken))
            self.report.failures.append(self._shrunk(trial, broken))
        return trial

    def _run(self, case: Case) -> Trial:
        trial = run_trial(self.subject, case, most_ticks=self.most_ticks)
        self._any_broken = self._any_broken or bool(trial.broken)
        return trial

    def _worst(self, trial: Trial) -> Broken | None:
        """Returns the worst broken promise. The others follow from it, or other runs find them again."""
        return next((one for one in trial.broken if one.promise not in self.ignored), None)

    def _with_patience(self, trial: Trial) -> Trial:
        """Runs a trial again if it was cut short, since it may just be slow. The second run may take as many ticks as a
        replay.
        """
        if self.most_ticks < MOST_TICKS and any(one.promise == IT_ENDS for one in trial.broken):
            return run_trial(self.subject, trial.case)
        return trial

    def _shrunk(self, trial: Trial, broken: Broken) -> ProgramFailure:
        """Returns the failure with the shortest schedule found."""
        if trial.recorder is None or not trial.recorder.overtakings:
            return _failure(trial, broken)
        fault = trial.case.fault

        def again(schedule: InTurn) -> Broken | None:
            found = self._run(Case(schedule=schedule, fault=fault)).broken
            return next((one for one in found if one.promise == broken.promise), None)

        shortest = shrink(trial.recorder.schedule, lambda schedule: again(schedule) is not None)
        last = self._with_patience(self._run(Case(schedule=shortest, fault=fault)))
        same = [one for one in last.broken if one.promise == broken.promise]
        return _failure(last, same[0]) if same else _failure(trial, broken)


def _key(broken: Broken) -> tuple[str, str]:
    """Returns a key that is equal for two findings of one kind."""
    return broken.promise, re.sub(r"\d+", "#", broken.what.partition("\n")[0])


def _failure(trial: Trial, broken: Broken) -> ProgramFailure:
    overtakings = tuple(trial.recorder.overtakings) if trial.recorder is not None else ()
    return ProgramFailure(broken=broken, case=trial.case, place=trial.disturber.place, overtakings=overtakings)


def _spread(places: Sequence[Fault[Any]], most: int) -> list[Fault[Any]]:
    """Returns at most ``most`` of ``places``, evenly spread."""
    if len(places) <= max(0, most):
        return list(places)
    return [places[index * len(places) // most] for index in range(max(0, most))]


def sweep_program(
    program: Program | Subject,
    *,
    kinds: Sequence[TrioFault] = tuple(TrioFault),
    runs: int = 500,
    seed: int = 0,
    ignore: Iterable[str] = (),
    most_failures: int = 5,
) -> ProgramReport:
    """Runs ``program`` under many schedules, and with every fault at every step of every task.

    The program runs on virtual time, and its work for threads is done in the loop, so that each run can be repeated.
    The program must not wait for the outside world: for sockets, processes or its own threads.

    Args:
        program: called anew for every run, with the run's `Trial`.
        kinds: the kinds of fault to inject.
        runs: the most runs, not counting those for shrinking. If there are more faults, an even selection is tried, and
            the report counts those that are left out. If there are fewer, they are tried under other schedules too.
        seed: the seed of the schedules.
        ignore: promises that the program need not keep, from `PROMISES`.
        most_failures: the number of different failures after which the sweep stops.

    Raises:
        KeyboardInterrupt: somebody has pressed ^C.
        ValueError: ``runs`` is below 1.
        RuntimeError: ^C is among the kinds, and this is not the main thread.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}; allowed: at least 1")
    subject = program if isinstance(program, Subject) else Subject(program=program)
    return _Sweep(subject, kinds, runs, seed, frozenset(ignore), most_failures).go()


def check_program(
    program: Program | Subject,
    *,
    kinds: Sequence[TrioFault] = tuple(TrioFault),
    runs: int = 500,
    seed: int = 0,
    ignore: Iterable[str] = (),
) -> None:
    """Sweeps a program as `sweep_program` does.

    Raises:
        ProgramBroken: a promise was broken.
    """
    sweep_program(program, kinds=kinds, runs=runs, seed=seed, ignore=ignore).raise_if_any()


def replay_program(program: Program | Subject, case: Case, *, most_ticks: int = MOST_TICKS) -> Trial:
    """Runs one case again. After ``most_ticks`` the program counts as endless.

    Raises:
        ProgramBroken: a promise is broken.
    """
    trial = run_trial(
        program if isinstance(program, Subject) else Subject(program=program), case, most_ticks=most_ticks
    )
    if trial.broken:
        raise ProgramBroken("\n\n".join(str(_failure(trial, broken)) for broken in trial.broken)) from trial.error
    return trial
