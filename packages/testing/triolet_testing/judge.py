"""The judge of a simulated run: whether the run has kept every promise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from triolet.actors.statistics import EngineStatistics
from triolet.core import events
from triolet.core.errors import (
    CheckpointError,
    DeviceLost,
    EncodeFailed,
    EngineAsleep,
    EngineClosed,
    EngineStateError,
    EngineTeardownError,
    PoisonRequest,
    RunnerCrashed,
)
from triolet.core.trace import TEARDOWN

from .clients import FOREVER
from .faults import FaultKind, Injected
from .run import Run


def judge_interrupt(interrupt: BaseException) -> None:
    """Checks that only the ^C went wrong. The error has no notes then."""
    inside = interrupt.exceptions if isinstance(interrupt, BaseExceptionGroup) else (interrupt,)
    notes = [note for error in (interrupt, *inside) for note in getattr(error, "__notes__", ())]
    assert not notes, f"more than the ^C went wrong: {notes}"


def judge(run: Run, *, interrupted: bool) -> None:
    """Checks that everything was given back, and that every client got the right answer."""
    kind = run.injector.fault.kind if run.injector.fault is not None and run.injector.met else None
    _judge_error(run, kind)
    assert interrupted == (kind is FaultKind.INTERRUPT), "the ^C did not come out"
    done = run.scenario.leaves < FOREVER or set(run.ends) <= {"finished", "left", run.scenario.refusal}
    assert done or kind is not FaultKind.CANCEL or run.injector.scope.cancelled_caught, "the cancellation was swallowed"
    assert not run.executor.misuses, f"the device was misused: {run.executor.misuses[0]}"
    hung = events.StageReached("device call abandoned") in run.trace
    assert hung or not run.executor.is_open, "the device was not released"
    assert not run.worker.abandoned or kind in {FaultKind.STEP_HANGS, FaultKind.CRASH}, (
        "the way out did not wait for it"
    )
    opened = events.StageReached("accepting") in run.trace
    failed = [event for event in run.trace if isinstance(event, events.ActorFailed)]
    assert not failed or kind in _FATAL, f"an actor failed: {failed[0]}"
    if not run.blind:
        run.checker.end()
    if opened and not (hung or failed or run.blind):
        _judge_teardown(run)
    _judge_switching(run)
    _judge_books(run, opened=opened, whole=not (hung or failed))
    _judge_ends(run, kind)


_FATAL = {FaultKind.CRASH, FaultKind.DEVICE_LOST, FaultKind.STEP_HANGS}


_WELL = {"finished", "left"}


_STOPPED = {"cancelled", "not started"}


_BROKEN = _STOPPED | {"crashed", RunnerCrashed.__name__, EngineClosed.__name__, EngineStateError.__name__}


_MAY_END: Mapping[FaultKind | None, set[str]] = {
    FaultKind.ENCODE_FAILS: _WELL | {EncodeFailed.__name__},
    FaultKind.ITEM_FAILS: _WELL | {EncodeFailed.__name__},
    FaultKind.PROMPT_FAILS: _WELL | {PoisonRequest.__name__},
    FaultKind.OUT_OF_MEMORY: _WELL | {EncodeFailed.__name__},
    FaultKind.ADAPTER_FAILS: _WELL | {CheckpointError.__name__},
    FaultKind.WAKE_FAILS: _WELL | {EngineAsleep.__name__},
    FaultKind.CANCEL: _WELL | _STOPPED,
    FaultKind.CANCEL_RELEASE_FAILS: _WELL | _STOPPED,
    FaultKind.INTERRUPT: _WELL | _STOPPED,
    FaultKind.STEP_HANGS: _WELL | _STOPPED,
    FaultKind.CRASH: _WELL | _BROKEN,
    FaultKind.CLIENT_RAISES: _WELL | _STOPPED | {"crashed"},
    FaultKind.OPEN_FAILS: {"not started"},
    FaultKind.DEVICE_LOST: _WELL | _BROKEN,
}


def _judge_error(run: Run, kind: FaultKind | None) -> None:
    """Checks that the error that left the block reports the fault and nothing else."""
    error = run.error
    if kind is FaultKind.CLIENT_RAISES and run.scenario.outside:
        assert error is None, f"a client outside of the block has raised, and {error!r} left it"
    elif kind is FaultKind.OPEN_FAILS:
        assert isinstance(error, RuntimeError), f"the load's error was swallowed: {error!r}"
    elif kind in {FaultKind.CRASH, FaultKind.CLIENT_RAISES, FaultKind.OBSERVER_FAILS}:
        assert _tells_of(error, Injected), f"the crash was swallowed; what left the block is {error!r}"
    elif kind is FaultKind.DEVICE_LOST:
        assert isinstance(error, RunnerCrashed), f"the lost device was swallowed; what left the block is {error!r}"
        assert _tells_of(error, DeviceLost), "nobody says why"
    elif run.injector.release_failed:
        assert isinstance(error, EngineTeardownError), f"the release that failed was swallowed: {error!r}"
    elif kind is FaultKind.STEP_HANGS:
        assert isinstance(error, EngineTeardownError), f"a step hung, and nobody says so: {error!r}"
    elif error is not None:
        raise error


def _tells_of(error: BaseException | None, kind: type[Exception]) -> bool:
    """Returns whether ``error`` is of ``kind``, contains such an error, or was caused by one."""
    if error is None:
        return False
    inside = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    return isinstance(error, kind) or any(_tells_of(other, kind) for other in (*inside, error.__cause__))


def _judge_teardown(run: Run) -> None:
    assert not run.executor.left, f"encoder outputs are left: {sorted(run.executor.left)}"
    reached = [event.stage for event in run.trace if isinstance(event, events.StageReached)]
    stages = tuple(stage for stage in reached if stage in TEARDOWN)
    assert stages == TEARDOWN, f"the teardown went through {stages}"
    cut_off = [stage for stage in reached if stage.endswith("cut off")]
    assert not cut_off, f"{cut_off}, though the device answered"


def _judge_switching(run: Run) -> None:
    """Checks that the switch interval was short exactly while a call was in flight, and that the user's interval is
    restored."""
    assert run.strange_interval is None, f"the switch interval was {run.strange_interval}"
    interpreter = run.worker.interpreter
    left = f"a switch interval of {interpreter.microseconds} microseconds is left"
    assert interpreter.read() == run.users_interval, left


def _may_end(run: Run, kind: FaultKind | None) -> set[str]:
    """Returns the ends that clients may have after a fault of ``kind``. Clients outside of the block may have them
    too."""
    allowed = set(_MAY_END.get(kind, _WELL))
    alone = Counter(event.keys for event in run.trace if isinstance(event, events.EncodeBroke) and len(event.keys) == 1)
    if not any(count > 1 for count in alone.values()):
        allowed -= {EncodeFailed.__name__}  # a failed batch is retried in halves, a failed item once more
    failed = [event.actor for event in run.trace if isinstance(event, events.ActorFailed)]
    if failed and failed[0] != "runner":
        allowed -= {RunnerCrashed.__name__}
    elif failed and run.scenario.outside:
        allowed -= {EngineClosed.__name__}
    elif run.scenario.outside and kind is not None:  # the drain may end before the clients are done
        allowed |= {EngineClosed.__name__, EngineStateError.__name__}
    return allowed


def _judge_ends(run: Run, kind: FaultKind | None) -> None:
    allowed = _may_end(run, kind) | {run.scenario.refusal or "finished"}
    if run.scenario.leaves < FOREVER and not run.scenario.outside:
        allowed |= _STOPPED
    strange = {number: end for number, end in enumerate(run.ends) if end not in allowed}
    assert not strange, f"clients ended as {strange}; allowed: {sorted(allowed)}"


def _judge_books(run: Run, *, opened: bool, whole: bool) -> None:
    """Checks that no request holds a permit, a place, a page, a slot, a state or an entry. A step that hangs may
    keep what it has."""
    engine = run.engine
    pending = engine.inside.pending
    assert not pending, f"{pending} permits of the queue did not come back"
    if opened and whole and run.books is not None:
        judge_statistics(run.books)


def judge_statistics(books: EngineStatistics) -> None:
    """Checks the books of an engine that has ended: nobody holds a place, a page, a slot, a state or an entry."""
    requests = books.requests
    left = requests.waiting + requests.running + requests.leaving + requests.cross_slots_used
    assert not left, f"the planner still has {requests}"
    assert requests.pages_free == requests.pages, f"{requests.pages - requests.pages_free} pages did not come back"
    states = requests.states - requests.states_free
    assert not states, f"{states} recurrent states did not come back"
    cache = books.encoder_cache
    assert not (held := cache.held + cache.waiting), f"{held} holders or waiters are left: {cache}"
    assert not cache.entries, f"the ledger still has entries: {cache}"
    assert cache.taken == 0, f"the ledger's bytes do not balance: {cache}"
