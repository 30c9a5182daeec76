"""The sweep: every kind of fault, at every step of every task of a scenario.

::

    python -m triolet.testing --faults 20000 --workers 2

A scenario is first run undisturbed; then once for each kind of fault and each step of each task, or each occasion of
the fault: each call of the device that may fail, say. A run that breaks a promise of the engine is reported with the
line that repeats it.
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

from attrs import define, field, frozen

from .clients import SCENARIOS, Scenario
from .faults import OCCASIONS, Fault, FaultKind
from .simulation import Outcome, again, simulate
from .trio_tools.schedules import Batches, Pct, Schedule, Uniform


@frozen
class Failure:
    """A run in which a promise was broken: the line of Python that repeats the run, and the error."""

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
    failures: list[Failure] = field(factory=list)
    seconds: float = 0.0

    def add(self, other: Report) -> None:
        """Adds another sweep's counts; ``seconds`` are of processor time."""
        self.runs += other.runs
        self.faults += other.faults
        self.judged += other.judged
        self.by_kind += other.by_kind
        self.by_end += other.by_end
        self.failures += other.failures
        self.seconds += other.seconds


def sweep_scenario(
    scenario: Scenario,
    schedule: Schedule | None = None,
    *,
    kinds: Sequence[FaultKind] = tuple(FaultKind),
    most_failures: int = 10,
) -> Report:
    """Runs ``scenario`` with every fault of ``kinds`` at every step of every task, or on every occasion of the fault;
    stops at ``most_failures``.

    Never raises for a broken promise: see `Report.failures`.
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
                break  # there is no such occasion, and so no later one
    report.seconds = time.process_time() - begun
    return report


def _places(kind: FaultKind, steps: Mapping[str, int]) -> Iterator[tuple[str, Iterable[int]]]:
    """Yields the places where faults of ``kind`` may happen to a run of so many ``steps``; none without such a run. The
    number of occasions shows only when none is left."""
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
    return outcome


def _schedules(seed: int) -> Iterator[Schedule]:
    """Schedules without end: two of PCT, uniform, and trio's own, then the same with the next seed."""
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
        least_faults: how many faults, at least.
        seed: the first seed of the schedules.
        workers: processes.
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
                process.terminate()  # a worker may take a ^C of the terminal for one of its own
            pool.shutdown(wait=False, cancel_futures=True)
    return report


def begin_worker(log_level: int) -> None:
    """Prepares a worker: it handles ^C, even if the shell had it ignored, and logs at its parent's level. Present
    objects stay, so that the collector need not look at them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("triolet").setLevel(log_level)
    gc.freeze()
