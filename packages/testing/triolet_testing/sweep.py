"""The sweep: every kind of fault, at every step of every task of a scenario.

::

    python -m triolet_testing --faults 20000 --workers 2

A scenario is first run undisturbed. Then it is run once for each kind of fault and each step of each task. Some kinds
have occasions instead of steps: each call of the device that may fail, for example. A run that breaks a promise of the
engine is reported with the line of Python that repeats the run.
"""

from __future__ import annotations

import gc
import itertools
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from attrs import define, field, fields, frozen

from .clients import SCENARIOS, Scenario
from .faults import OCCASIONS, Fault, FaultKind
from .simulation import Outcome, again, simulate
from .situations import situations
from .trio_tools.schedules import Batches, Pct, Schedule, Uniform


@frozen
class Failure:
    """A run that broke a promise: the line of Python that repeats the run, and the error."""

    again: str
    error: str

    def __str__(self) -> str:
        return f"{self.again}\n  {self.error}"


@define(kw_only=True)
class Report:
    """The outcome of a sweep."""

    runs: int = 0
    faults: int = 0  # runs in which the fault happened
    judged: int = 0  # steps that the kit for schedulers has judged
    by_kind: Counter[str] = field(factory=Counter)  # faults of each kind
    by_end: Counter[str] = field(factory=Counter)  # how clients ended
    seen: Counter[str] = field(factory=Counter)  # how often each situation occurred
    failures: list[Failure] = field(factory=list)
    seconds: float = 0.0

    def add(self, other: Report) -> None:
        """Adds the counts of another sweep. ``seconds`` are processor time."""
        for one in fields(Report):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def sweep_scenario(
    scenario: Scenario,
    schedule: Schedule | None = None,
    *,
    kinds: Sequence[FaultKind] = tuple(FaultKind),
    most_failures: int = 10,
) -> Report:
    """Runs ``scenario`` with every fault of ``kinds``, at every step of every task or on every occasion of the fault.
    It stops after ``most_failures`` failures.

    A broken promise raises nothing, but is reported in `Report.failures`.
    """
    schedule = schedule or Uniform()
    report, begun = Report(), time.process_time()
    undisturbed = _run(report, scenario, schedule, None)
    taken = undisturbed.steps if undisturbed is not None else {}
    places = [(kind, task, steps) for kind in kinds for task, steps in _places(kind, taken)]
    for kind, task, steps in places:
        for step in steps:
            if len(report.failures) >= most_failures:
                break
            outcome = _run(report, scenario, schedule, Fault(kind, task, step))
            if outcome is not None and not outcome.met:
                break  # this occasion does not exist, so no later one does
    report.seconds = time.process_time() - begun
    return report


def _places(kind: FaultKind, steps: Mapping[str, int]) -> Iterator[tuple[str, Iterable[int]]]:
    """Yields the tasks, or the occasions, at which faults of ``kind`` may happen, each with the numbers of the steps.
    Occasions are numbered without end, since the last one is not known in advance.
    """
    if kind not in OCCASIONS:
        yield from ((task, range(1, count + 1)) for task, count in steps.items())
    elif steps:
        yield OCCASIONS[kind], itertools.count(1)


def _run(report: Report, scenario: Scenario, schedule: Schedule, fault: Fault | None) -> Outcome | None:
    """Runs the scenario once and counts the run. Returns its outcome; ``None``: a promise was broken."""
    report.runs += 1
    try:
        outcome = simulate(scenario, schedule, fault)
    except Exception as error:  # noqa: BLE001  (told in the report)
        report.failures.append(Failure(again(scenario, schedule, fault), f"{type(error).__name__}: {error}"))
        return None
    report.judged += outcome.judged
    if fault is not None and outcome.met:
        report.faults += 1
        report.by_kind[fault.kind.value] += 1
    report.by_end.update(outcome.ends)
    report.seen += situations(outcome.trace, outcome.requests)
    return outcome


def _schedules(seed: int) -> Iterator[Schedule]:
    """Yields schedules without end: two of PCT, one uniform, and trio's own, then the same with the next seed."""
    for number in itertools.count(seed):
        yield from (Pct(number), Uniform(number), Pct(number, depth=5), Batches(number))


def _work(item: tuple[str, Schedule]) -> Report:
    name, schedule = item
    return sweep_scenario(SCENARIOS[name], schedule)


def sweep_all(
    least_faults: int, *, seed: int = 0, workers: int = 1, on_progress: Callable[[Report], None] = lambda _: None
) -> Report:
    """Sweeps every scenario under one schedule after the other until ``least_faults`` faults have happened, or a
    promise was broken.

    Args:
        least_faults: the sweep goes on until this many faults have happened.
        seed: the first seed of the schedules.
        workers: the number of processes.
        on_progress: called after each schedule with the report so far.
    """
    began = partial(begin_worker, logging.getLogger("triolet").level)
    report, pool = Report(), ProcessPoolExecutor(workers, initializer=began) if workers > 1 else None
    try:
        for schedule in _schedules(seed):
            items = [(name, schedule) for name in SCENARIOS]
            for part in pool.map(_work, items) if pool is not None else map(_work, items):
                report.add(part)
            on_progress(report)
            if report.failures or report.faults >= least_faults:
                break
    finally:
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.terminate()  # a worker may mistake the terminal's ^C for an injected one
            pool.shutdown(cancel_futures=True)  # the end of the interpreter would race with its thread
    return report


def begin_worker(log_level: int) -> None:
    """Prepares a worker process. It handles ^C, even if the shell had ^C ignored, and logs at its parent's level. The
    objects that exist already are frozen, so that the garbage collector does not scan them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("triolet").setLevel(log_level)
    gc.freeze()
