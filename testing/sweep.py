"""The sweep: every kind of fault, at every step of every task of a scenario.

::

    python -m triolet.testing --faults 20000 --workers 2

A scenario is first run undisturbed, to count the steps that each task takes; then once for each kind of fault and each
of those steps. Whatever breaks a promise of the engine is reported with the one line that runs it again.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from attrs import define, field, frozen

from .schedule import Batches, Pct, Schedule, Uniform
from .simulation import SCENARIOS, Fault, FaultKind, Scenario, simulate


@frozen(kw_only=True)
class Failure:
    """A run in which a promise was broken."""

    scenario: str
    schedule: Schedule
    fault: Fault | None
    error: str

    def __str__(self) -> str:
        return f"simulate(SCENARIOS[{self.scenario!r}], {self.schedule!r}, {self.fault!r}): {self.error}"


@define(kw_only=True)
class Report:
    """What a sweep came to."""

    runs: int = 0
    faults: int = 0  # runs in which the fault happened to something
    by_kind: Counter[str] = field(factory=Counter)  # faults of each kind
    by_end: Counter[str] = field(factory=Counter)  # how clients ended
    failures: list[Failure] = field(factory=list)
    seconds: float = 0.0

    def add(self, other: Report) -> None:
        """Counts another sweep in; ``seconds`` are of processor time."""
        self.runs += other.runs
        self.faults += other.faults
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
    """Runs ``scenario`` with every fault of ``kinds`` at every step of every task; stops at ``most_failures``.

    Never raises for a broken promise: see `Report.failures`. Raises what `simulate` does where the undisturbed run
    fails already.
    """
    schedule = schedule or Batches()
    report, begun = Report(), time.process_time()
    steps = simulate(scenario, schedule).steps
    for task, kind in itertools.product(steps, kinds):
        for step in range(1, steps[task] + 1):
            if len(report.failures) >= most_failures:
                break
            if not _run(report, scenario, schedule, Fault(kind, task, step)):
                break  # nothing was left that it could happen to; nor will there be at a later step
    report.seconds = time.process_time() - begun
    return report


def _run(report: Report, scenario: Scenario, schedule: Schedule, fault: Fault) -> bool:
    """Runs it once and counts it in; whether the fault happened to anything."""
    report.runs += 1
    try:
        outcome = simulate(scenario, schedule, fault)
    except Exception as error:  # noqa: BLE001  (told in the report)
        told = f"{type(error).__name__}: {error}"
        report.failures.append(Failure(scenario=scenario.name, schedule=schedule, fault=fault, error=told))
        return True
    report.faults += outcome.met
    report.by_kind[fault.kind.value] += outcome.met
    report.by_end.update(outcome.ends)
    return outcome.met


def schedules(seed: int = 0) -> Iterator[Schedule]:
    """Schedules without end: trio's own, uniform, and two of PCT, then the same with the next seed."""
    for number in itertools.count(seed):
        yield from (Batches(number), Uniform(number), Pct(number), Pct(number, depth=5))


def _work(item: tuple[str, Schedule]) -> Report:
    name, schedule = item
    return sweep_scenario(SCENARIOS[name], schedule)


def sweep_all(least_faults: int, *, seed: int = 0, workers: int = 1) -> Report:
    """Sweeps every scenario under one schedule after the other until ``least_faults`` faults have happened, or a
    promise was broken."""
    report = Report()
    for schedule in schedules(seed):
        items = [(name, schedule) for name in SCENARIOS]
        if workers == 1:
            reports = [_work(item) for item in items]
        else:
            with ProcessPoolExecutor(workers) as pool:
                reports = list(pool.map(_work, items))
        for part in reports:
            report.add(part)
        if report.failures or report.faults >= least_faults:
            break
    return report
