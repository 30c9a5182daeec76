"""Deterministic simulation: the real supervisor and actors over a simulated device, on virtual time, in one thread.

::

    from triolet_testing import SCENARIOS, Fault, FaultKind, simulate
    from triolet_testing.trio_tools import Uniform

    outcome = simulate(SCENARIOS["abort storm"], Uniform(seed=7), Fault(FaultKind.CANCEL, "triolet runner", 12))

`simulate` raises if a promise of the engine is broken: an `InvariantViolation` of the trace, a client that gets a wrong
token or never ends, a page or a byte that is not given back, an exception that should not leave the block, or a
`Deadlock`. The same arguments give the same run, step by step.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from attrs import frozen

from triolet.core import events
from triolet.core.planning.statistics import PlannerStatistics

from .clients import SCENARIOS, Scenario
from .faults import OCCASIONS, Fault, FaultKind, Injector
from .judge import judge, judge_interrupt
from .run import Run
from .trio_tools.schedules import Schedule, Uniform, run_scheduled


@frozen(kw_only=True)
class Outcome:
    """The outcome of one simulated run."""

    scenario: str
    met: bool  # true if the fault happened
    steps: Mapping[str, int]  # how many steps each task has taken
    ends: tuple[str, ...]  # of each client: "finished", "left", "cancelled", "not started" or an error's class
    error: BaseException | None  # the error that left the engine's block
    trace: tuple[events.Event, ...]
    seconds: float  # virtual seconds
    judged: int  # steps that the kit for schedulers has judged
    requests: PlannerStatistics | None  # the planner's books at the end; ``None``: the planner never began


def simulate(scenario: Scenario, schedule: Schedule | None = None, fault: Fault | None = None) -> Outcome:
    """Runs ``scenario`` once and checks everything that the engine promises.

    Args:
        scenario: see `SCENARIOS` for those that are shipped.
        schedule: chooses the task that runs next; by default one random task a tick.
        fault: the fault to inject, and when.

    Raises:
        InvariantViolation: a promise is broken; the note says how to repeat the run.
        AssertionError: a client got a wrong token, or the simulated device was misused (a page freed too early, say).
        Deadlock: all tasks wait for ever.
        ValueError: the fault is impossible: there is no such task, its kind is counted by occasions of another name, or
            its step is below 1.
        RuntimeError: the fault is a ^C, and this process ignores or handles ^C otherwise.
    """
    schedule = schedule or Uniform()
    _check_fault(fault)
    injector = Injector(fault)
    run = Run(scenario, injector)
    try:
        interrupted = _run_to_its_end(run, schedule)
        for violation in (run.violation, run.judge.violation):
            if violation is not None:
                raise violation
        judge(run, interrupted=interrupted)
    except Exception as error:
        error.add_note(f"run it again with {again(scenario, schedule, fault)}")
        raise
    unknown = fault is not None and fault.kind not in OCCASIONS and fault.task not in injector.steps
    if fault is not None and unknown and not injector.met:
        raise ValueError(f"{fault!r}: there is no such task; allowed: {', '.join(sorted(injector.steps))}")
    return Outcome(
        scenario=scenario.name,
        met=injector.met,
        steps=dict(injector.steps),
        ends=tuple(run.ends),
        error=run.error,
        trace=tuple(run.trace),
        seconds=run.seconds,
        judged=run.judge.steps,
        requests=run.books.requests if run.books is not None else None,
    )


def again(scenario: Scenario, schedule: Schedule, fault: Fault | None) -> str:
    """Returns the line of Python that repeats the run."""
    shipped = SCENARIOS.get(scenario.name) == scenario
    return f"simulate({f'SCENARIOS[{scenario.name!r}]' if shipped else repr(scenario)}, {schedule!r}, {fault!r})"


def _check_fault(fault: Fault | None) -> None:
    if fault is None:
        return
    if fault.task != OCCASIONS.get(fault.kind, fault.task):
        raise ValueError(f"{fault!r}: faults of this kind are counted in {OCCASIONS[fault.kind]!r}")
    if fault.step < 1:
        raise ValueError(f"{fault!r}: steps are counted from 1")
    if fault.kind is FaultKind.INTERRUPT and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        raise RuntimeError(
            "SIGINT is ignored or has another handler here, so no ^C can be injected; restore Python's default handler"
        )


def _run_to_its_end(run: Run, schedule: Schedule) -> bool:
    """Returns whether the run ended with the injected ^C, and nothing else."""
    fault = run.injector.fault
    try:
        run_scheduled(run.main, schedule=schedule, instruments=[run.injector])
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if not (fault is not None and fault.kind is FaultKind.INTERRUPT and run.injector.met):
            raise
        others = error.split(KeyboardInterrupt)[1] if isinstance(error, BaseExceptionGroup) else None
        if others is not None:
            raise others from None
        judge_interrupt(error)
        return True
    return False
