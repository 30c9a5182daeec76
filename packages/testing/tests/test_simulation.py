"""The simulation replays exactly, meets what it claims to meet, and reports what is broken."""

from __future__ import annotations

import itertools
import re
import signal
import subprocess
import sys
from collections import Counter

import pytest
import trio
from hypothesis import settings

import triolet_testing
import triolet_testing.sweep as sweep_module
from triolet import RunnerCrashed
from triolet.actors.supervisor import Supervisor
from triolet.core.errors import InvariantViolation
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.ledger_values import Decisions
from triolet.core.plan import StepPlan, StepResult
from triolet.core.planning import prefix
from triolet.core.planning.actions import DropAdapter
from triolet.core.planning.adapters import AdapterBook
from triolet.core.planning.planner import Planner
from triolet_testing import trio_tools
from triolet_testing.clients import SCENARIOS, Client, Scenario
from triolet_testing.faults import DEVICE_FAULTS, OCCASIONS, Fault, FaultKind
from triolet_testing.sim import SimExecutor
from triolet_testing.simulation import simulate
from triolet_testing.sweep import Report, sweep_all, sweep_scenario
from triolet_testing.trio_tools.schedules import Batches, Deadlock, Pct, Uniform

SCHEDULES = [Batches(3), Uniform(3), Pct(3)]


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_run_is_replayed_from_its_seed(name, schedule):
    first, second = (simulate(SCENARIOS[name], schedule) for _ in range(2))
    assert first == second
    assert first.error is None


@pytest.mark.parametrize(
    ("name", "meets"),
    [
        ("shared audio", "EntryHeld"),
        ("eviction pressure", "FreeSent"),
        ("abort storm", "aborted"),
        ("shutdown while busy", "drain deadline"),
    ],
)
def test_scenarios_meet_what_they_are_named_after(name, meets):
    trace = simulate(SCENARIOS[name], Uniform(1)).trace
    told = "\n".join(map(str, trace))
    if meets == "FreeSent":  # before the end, so for want of room
        assert told.index("FreeSent") < told.index("intake closed")
    else:
        assert meets in told


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("preemption", "preemptions"),
        ("shared prefix", "tokens_cached"),
        ("shared prefix", "tokens_accepted"),
        ("preemption among images", "preemptions"),
        ("preemption among images", "tokens_cached"),
        ("pooling with images", "tokens_cached"),
        ("recurrent states", "tokens_cached"),
        ("recurrent states", "tokens_accepted"),
        ("recurrent states", "preemptions"),
    ],
)
def test_scenarios_meet_what_the_planner_counts(name, count):
    assert getattr(simulate(SCENARIOS[name], Uniform(1)).requests, count) > 0


def test_images_that_do_not_fit_together_are_encoded_in_turn():
    """One of the clients has three: it asks for the next when it has read the one before, also where that comes again
    behind the next."""
    trace = simulate(SCENARIOS["images that do not fit together"], Uniform(1)).trace
    steps = [event for event in trace if type(event).__name__ == "StepBegun"]
    asks = Counter(reader.partition("/")[0] for reader in {reader for step in steps for reader in step.readers})
    assert max(asks.values()) == 3


@pytest.mark.parametrize("kind", FaultKind)
def test_every_kind_of_fault_happens(kind):
    """At the scheduler's second step, or on the first occasion."""
    fault = Fault(kind, OCCASIONS[kind], 1) if kind in OCCASIONS else Fault(kind, "triolet scheduler", 2)
    name = "adapters" if kind is FaultKind.ADAPTER_FAILS else "sleep by order"
    assert simulate(SCENARIOS[name], Uniform(2), fault).met


def pages_of_any_adapter(patch):
    plain = prefix.root_key
    patch.setattr(prefix, "root_key", lambda identity, cross_key=None, adapter="": plain(identity, cross_key))


def drops_at_once(patch):
    def unload(book, key):
        book._loads[key] -= 1
        book._actions.append(DropAdapter(key))

    patch.setattr(AdapterBook, "unload", unload)


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (pages_of_any_adapter, "a page of positions 0 on holds another sequence's KV"),
        (drops_at_once, "is written, but it is not loaded"),
    ],
)
def test_a_fault_of_adapters_is_found(plant, told, monkeypatch):
    """Pages are shared beyond adapters; an adapter goes while a request has it."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=told):
        simulate(SCENARIOS["adapters"], Uniform(1))


def test_a_broken_promise_tells_how_to_run_it_again(monkeypatch):
    """Free bytes that are counted twice: the ledger gives room that is not there."""

    def counts_twice(ledger: EncoderLedger, *changed) -> None:
        before = ledger.taken
        change(ledger, *changed)
        ledger._bytes[State.ABSENT] += max(0, before - ledger.taken)

    change = EncoderLedger._change
    monkeypatch.setattr(EncoderLedger, "_change", counts_twice)
    with pytest.raises((AssertionError, InvariantViolation)) as caught:
        simulate(SCENARIOS["eviction pressure"], Uniform(5))
    assert "simulate(SCENARIOS['eviction pressure'], Uniform(seed=5), None)" in caught.value.__notes__[-1]


def test_an_answer_that_never_comes_is_a_deadlock_or_a_wait_that_is_told(monkeypatch):
    monkeypatch.setattr(EncoderLedger, "_serve", lambda *_: None)
    with pytest.raises((Deadlock, InvariantViolation)):
        simulate(SCENARIOS["plain"])


TINY = Scenario(name="plain", clients=(Client(max_tokens=1),))


def test_a_sweep_takes_every_step_of_every_task():
    report = sweep_scenario(TINY, kinds=[FaultKind.CANCEL])
    steps = simulate(TINY).steps
    assert report.failures == []
    assert report.faults == sum(steps.values())
    assert report.runs == 1 + report.faults  # the undisturbed one


def test_a_sweep_reports_what_is_broken_and_goes_on(monkeypatch):
    """Only a fault brings it to light: undisturbed, nobody aborts."""
    monkeypatch.setattr(Planner, "abort", lambda *_, **__: 1 / 0)
    report = sweep_scenario(TINY, kinds=[FaultKind.CANCEL], most_failures=3)
    assert len(report.failures) == 3
    with pytest.raises(RunnerCrashed, match="ZeroDivisionError"):
        names = {name: getattr(trio_tools, name) for name in trio_tools.__all__}  # the schedules
        names |= {name: getattr(triolet_testing, name) for name in triolet_testing.__all__}
        eval(report.failures[0].again, names)


# -- what it must not overlook ---------------------------------------------------------------------------------------


def test_a_device_that_frees_nothing_is_told(monkeypatch):
    monkeypatch.setattr(SimExecutor, "free", lambda *_: None)
    with pytest.raises(InvariantViolation, match=r"books balance: .*on the device, and in no book"):
        simulate(SCENARIOS["idle time"])


def test_a_misuse_of_the_device_is_told_even_where_a_retry_makes_it_good(monkeypatch):
    steps = []

    def misused_once(executor: SimExecutor, plan: StepPlan) -> StepResult:
        steps.append(plan)
        assert len(steps) != 3, "misused"
        return step(executor, plan)

    step = SimExecutor._step
    monkeypatch.setattr(SimExecutor, "_step", misused_once)
    with pytest.raises(AssertionError, match="the device was misused: AssertionError: misused"):
        simulate(SCENARIOS["plain"])


@pytest.mark.parametrize(
    ("kind", "swallowed", "says"),
    [(FaultKind.INTERRUPT, KeyboardInterrupt, "did not come out"), (FaultKind.CANCEL, trio.Cancelled, "swallowed")],
)
def test_an_engine_that_swallows_what_should_leave_it_is_told(monkeypatch, kind, swallowed, says):
    def swallow(supervisor: Supervisor, error: BaseException | None) -> None:
        group = error.split(swallowed)[1] if isinstance(error, BaseExceptionGroup) else error
        raise_end(supervisor, None if isinstance(error, swallowed) else group)

    raise_end = Supervisor._raise_end
    monkeypatch.setattr(Supervisor, "_raise_end", swallow)
    report = sweep_scenario(SCENARIOS["plain"], kinds=[kind], most_failures=60)
    assert any(says in failure.error for failure in report.failures)


def test_a_crash_that_comes_with_a_control_c_is_told(monkeypatch):
    def breaks(ledger: EncoderLedger, *, now: float) -> Decisions:
        close(ledger, now=now)
        raise RuntimeError("boom")

    close = EncoderLedger.close
    monkeypatch.setattr(EncoderLedger, "close", breaks)
    with pytest.raises(AssertionError, match="boom"):
        simulate(SCENARIOS["plain"], Uniform(0), Fault(FaultKind.INTERRUPT, "triolet scheduler", 3))


def test_an_undisturbed_failure_is_a_finding_too(monkeypatch):
    monkeypatch.setattr(Planner, "submit", lambda *_: 1 / 0)
    (failure,) = sweep_scenario(TINY).failures
    assert failure.again.endswith("None)")


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(FaultKind.CANCEL, "triolet runer", 3), r"no such task; allowed: .*triolet runner"),
        (Fault(FaultKind.CANCEL, "triolet runner", 0), "counted from 1"),
        (Fault(FaultKind.STEP_FAILS, "triolet runner", 1), "counted in 'calls of step'"),
    ],
)
def test_a_fault_that_cannot_happen_is_an_error(fault, says):
    with pytest.raises(ValueError, match=says):
        simulate(SCENARIOS["plain"], Uniform(0), fault)


def test_where_nobody_listens_to_control_c_none_is_injected(monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    with pytest.raises(RuntimeError, match="SIGINT is ignored"):
        simulate(SCENARIOS["plain"], Uniform(0), Fault(FaultKind.INTERRUPT, "main", 1))


@pytest.mark.parametrize("third", range(3))
def test_every_fault_at_every_step_of_every_task_breaks_no_promise(third: int):
    """A third of the scenarios, each under one schedule, which are in turn PCT, uniform, and trio's own, with a third
    of the kinds of fault; a third of those that are not the device's. With ``--hypothesis-profile=soak`` each
    scenario has all kinds, and ``make soak`` takes each through many schedules."""
    whole = settings.get_current_profile_name() == "soak"
    of_this_third = tuple(FaultKind)[third::3]
    report, schedules = Report(), itertools.cycle((Pct(0), Uniform(0), Pct(0, depth=5), Batches(0)))
    turns = list(zip(SCENARIOS.values(), schedules, strict=False))
    for number, (scenario, schedule) in enumerate(turns[third::3]):
        rare = [kind for kind in of_this_third if kind in DEVICE_FAULTS]
        often = [kind for kind in of_this_third if kind not in DEVICE_FAULTS][number % 3 :: 3]
        report.add(sweep_scenario(scenario, schedule, kinds=tuple(FaultKind) if whole else (*rare, *often)))
    print(f"\n{report.runs} runs, {report.faults} faults, {report.runs / report.seconds:.0f} runs a second")  # noqa: T201
    assert [str(failure) for failure in report.failures] == []
    assert report.faults >= (2_400 if whole else 400)
    assert set(report.by_kind) >= {kind.value for kind in of_this_third}, "a kind of fault has not happened"


def test_a_sweep_of_everything_goes_on_until_there_are_enough_faults(monkeypatch):
    """What ``make soak`` runs: round after round, each under another schedule."""
    monkeypatch.setattr(sweep_module, "SCENARIOS", {TINY.name: TINY})
    told: list[int] = []
    report = sweep_all(250, on_progress=lambda so_far: told.append(so_far.faults))
    assert report.failures == []
    assert report.faults >= 250
    assert len(told) > 1


_SWEEP_OF_ONE = """
import triolet_testing.sweep as sweep
from triolet_testing.__main__ import begin
from triolet_testing.clients import Client, Scenario

sweep.SCENARIOS = {"plain": Scenario(name="plain", clients=(Client(max_tokens=1),))}
begin()
"""


@pytest.mark.real_time
def test_the_command_prints_its_report_and_no_warning_that_it_provokes():
    """Releases that fail among them: an engine without a handler for its log would warn of each on stderr."""
    command = [sys.executable, "-c", _SWEEP_OF_ONE, "--faults", "1", "--workers", "2"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "a release raises" in done.stdout
    assert "0 broken promises" in done.stdout
    assert re.fullmatch(r"\d+ faults in \d+ runs, \d+ s\n", done.stderr)
