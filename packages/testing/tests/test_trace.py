"""`TraceChecker` names the promise that is broken and shows no more of the past than belongs to it."""

from __future__ import annotations

import pickle

import pytest

from triolet.core import events as e
from triolet.core.errors import InvariantViolation
from triolet.core.trace import INVARIANTS, TEARDOWN, TraceChecker


def runs(name: str) -> e.Event:
    """A step that gives the request a token."""
    return e.StepBegun(9, (name,), (), (), 1, (name,))


def changes(
    step: int, states: dict[str, tuple[int, ...]], kept: tuple[int, ...] = (), sources: tuple[int, ...] = ()
) -> e.Event:
    """A step that gives each of the requests a token, and changes its states."""
    names, owned = tuple(states), [(state, name) for name, own in states.items() for state in own]
    told = tuple(state for state, _ in owned), tuple(name for _, name in owned)
    return e.StepBegun(step, names, (), (), 1, names, 0, *told, kept, sources)


OPEN = [e.StageReached("device taken"), e.StageReached("accepting")]
ENCODED = [
    e.RequestQueued("r"),
    e.EntryAcquired("k", "r/0"),
    e.EntryReserved("k", 10),
    e.EncodeDispatched(("k",), 5),
    e.EncodeDone(("k",)),
    e.EntryHeld("k", "r/0"),
    e.EncoderWaitOver("r"),
]
START = e.RequestStarted("r", 3)
STEP = e.StepBegun(0, ("r",), ("k",), ("r/0",), 3)
FAILED = e.StepEnded(0, ok=False, error="RuntimeError: boom")
LIFE = [
    *ENCODED,
    START,
    STEP,
    e.StepEnded(0, ok=True),
    e.FirstToken("r"),
    e.EntryReleased("k", "r/0"),
    e.RequestEnded("r", "finished"),
    e.FreeSent(("k",)),
    e.EntryFreed(("k",)),
]
CLOSE = [e.StageReached(stage) for stage in TEARDOWN]
OTHER = e.RequestQueued("other")
PREEMPTED = [OTHER, START, e.RequestPreempted("r", "other")]
TWO = [OTHER, e.RequestQueued("r")]
DONE = e.StepEnded(0, ok=True)
OTHERS = [OTHER, e.EntryAcquired("o", "other/0"), e.EntryReserved("o", 1)]

BROKEN = {
    "no free while held": [*ENCODED, e.FreeSent(("k",))],
    "no use before ready": [*ENCODED[:4], STEP],
    "no phantom": [*ENCODED[:3], e.EntryHeld("k", "r/0")],
    "every acquire is answered": [*ENCODED, e.EntryHeld("k", "r/0")],
    "books balance": [*ENCODED[:3], e.EntryAcquired("large", "s/0"), e.EntryReserved("large", 91)],
    "encode once": [*ENCODED, e.EncodeDispatched(("k",), 5)],
    "terminal once": [*LIFE, e.RequestEnded("r", "finished")],
    "stages in order": [*ENCODED, START, START],
    "free follows completion": [*ENCODED, STEP, e.EntryReleased("k", "r/0")],
    "steps in order": [e.StepEnded(0, ok=True)],
    "no preemption in vain": [*ENCODED, *PREEMPTED, START],
    "no step in vain": [*ENCODED, e.RequestStarted("r", 1), *(e.StepBegun(n, ("r",), (), (), 1) for n in range(2))],
    "no state shared": [OTHER, e.RequestQueued("r"), changes(0, {"r": (1,), "other": (1,)})],
    "ordered teardown": [*OPEN, e.StageReached("device released"), e.StageReached("scheduler stopped")],
    "always freed eventually": [*OPEN, *LIFE[:13], *CLOSE[:3]],
}
MORE = {
    "a state of one that runs": (
        "no state shared",
        [*TWO, changes(0, {"r": (1, 2)}), DONE, changes(1, {"other": (2,)})],
    ),
    "a state of a step in flight": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,)}), e.RequestEnded("r", "finished"), changes(1, {"other": (1,)})],
    ),
    "a kept state of a step in flight": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,)}, kept=(3,)), changes(1, {"other": (3,)})],
    ),
    "a state that its own request keeps": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,)}, kept=(1,))],
    ),
    "a kept state that is not written yet": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,)}, kept=(3,)), changes(1, {"other": (2,)}, sources=(3,))],
    ),
    "a state that another one goes on from": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,)}, sources=(3,)), changes(1, {"other": (2,)}, kept=(3,))],
    ),
    "a state that a request of the step goes on from": (
        "no state shared",
        [*TWO, changes(0, {"r": (1,), "other": (2,)}, kept=(3,), sources=(3,))],
    ),
    "an ask left without an answer": (
        "every acquire is answered",
        [*OPEN, *ENCODED[:2], e.RequestEnded("r", "finished"), *CLOSE[:3]],
    ),
    "a request that never ends": ("terminal once", [*OPEN, *ENCODED, *CLOSE[:2]]),
    "a step of a request that has ended": ("terminal once", [*LIFE, e.StepBegun(1, ("r",), (), (), 1)]),
    "a request accepted twice": ("terminal once", [e.RequestQueued("r"), e.RequestQueued("r")]),
    "a step of an entry nobody holds": (
        "no use before ready",
        [*LIFE[:12], e.StepBegun(1, ("r",), ("k",), ("r/0",), 1)],
    ),
    "a third step in flight": (
        "steps in order",
        [e.RequestQueued("r"), *(runs("r") for _ in range(3))],
    ),
    "an empty step, though nobody has left": ("no step in vain", [*ENCODED, START, e.StepBegun(0, (), (), (), 0)]),
    "a second empty step": (
        "no step in vain",
        [*ENCODED, *PREEMPTED, e.StepBegun(0, (), (), (), 0), e.StepEnded(0, ok=True), e.StepBegun(1, (), (), (), 0)],
    ),
    "an empty step behind another step": ("no step in vain", [*LIFE[:9], LIFE[12], e.StepBegun(1, (), (), (), 0)]),
    "started before the one that it gave way to, though another has run": (
        "no preemption in vain",
        [*ENCODED, *PREEMPTED, e.RequestQueued("third"), e.RequestStarted("third", 1), runs("third"), START],
    ),
    "preempted for one that has ended": ("terminal once", [*ENCODED, START, e.RequestPreempted("r", "gone")]),
    "an encoder wait of a request that has ended": ("terminal once", [*LIFE, e.EncoderWaitOver("r")]),
    "a start of what was never queued": ("terminal once", [START]),
    "a first token after the end": ("terminal once", [*LIFE, e.FirstToken("r")]),
    "a preemption after the end": ("terminal once", [*LIFE, OTHER, e.RequestPreempted("r", "other")]),
    "suspected after the end": ("terminal once", [*LIFE, e.RequestSuspected("r")]),
    "tried again after the end": ("terminal once", [*LIFE, e.StepRetried(0, ("r",))]),
    "a token before any start": ("stages in order", [*ENCODED, e.FirstToken("r")]),
    "two first tokens": ("stages in order", [*LIFE[:11], e.FirstToken("r")]),
    "preempted while it waits": ("stages in order", [*ENCODED, OTHER, e.RequestPreempted("r", "other")]),
    "a step of one that was preempted": ("stages in order", [*ENCODED, *PREEMPTED, STEP]),
    "suspected, though nothing has failed": ("stages in order", [*LIFE[:10], e.RequestSuspected("r")]),
    "suspected for a step before it started again": (
        "stages in order",
        [*ENCODED, START, STEP, FAILED, START, e.RequestSuspected("r")],
    ),
    "tried again, though nothing has failed": ("stages in order", [*LIFE[:10], e.StepRetried(0, ("r",))]),
    "encoded once more, though it is resident": ("encode once", [*ENCODED, e.EncodeRetried(("k",))]),
    "a reservation of what is there": ("encode once", [*ENCODED, e.EntryReserved("k", 10)]),
    "freed, but not told to": ("books balance", [*LIFE[:13], e.EntryFreed(("k",))]),
    "freed twice": ("books balance", [*LIFE, e.EntryFreed(("k",))]),
    "dropped though it is resident": ("books balance", [*ENCODED, e.EntryDropped("k")]),
    "refused what was given": ("every acquire is answered", [*ENCODED, e.EntryRefused("k", "r/0")]),
    "given back what was not asked for": ("every acquire is answered", [e.EntryReleased("k", "r/0")]),
    "an entry taken back at the end": ("always freed eventually", [*ENCODED, e.EntryTakenBack("k", "r/0")]),
    "asked twice": ("every acquire is answered", [*ENCODED[:2], e.EntryAcquired("k", "r/0")]),
}


def feed(trace: list[e.Event]) -> TraceChecker:
    checker = TraceChecker(capacity=100, steps_in_flight=2)
    for event in trace:
        checker(event)
    return checker


def test_a_whole_life_keeps_every_promise():
    checker = feed([*OPEN, *LIFE, *CLOSE])
    checker.end()
    assert checker.taken == 0


def test_there_is_a_broken_trace_for_every_invariant():
    assert set(BROKEN) == set(INVARIANTS)


@pytest.mark.parametrize(("invariant", "trace"), [*BROKEN.items(), *MORE.values()], ids=[*BROKEN, *MORE])
def test_what_breaks_a_promise_is_named(invariant, trace):
    with pytest.raises(InvariantViolation) as caught:
        feed(trace)
    assert caught.value.invariant == invariant
    assert caught.value.history[-1] == trace[-1]


RIGHT = {
    "preempted, then started again": [*PREEMPTED, e.RequestStarted("other", 1), runs("other"), START, STEP],
    "preempted for one that ended": [*PREEMPTED, e.RequestEnded("other", "aborted"), START, STEP],
    "an empty step after a failed one": [START, STEP, FAILED, e.StepBegun(1, (), (), (), 0)],
    "a failed step, and its request goes on": [
        START,
        STEP,
        FAILED,
        e.RequestSuspected("r"),
        e.StepBegun(1, ("r",), (), (), 1),
    ],
    "a failed step, and its request starts again": [
        *(START, STEP, FAILED, e.RequestSuspected("r"), e.StepRetried(0, ("r",)), START),
    ],
    "a step that was skipped, and its request starts again": [
        START,
        STEP,
        e.StepEnded(0, ok=False, skipped=True),
        START,
    ],
    "a restart, and it starts again": [START, STEP, e.StepsLost(1), START],
    "a restart, and it was waiting": [e.StepsLost(1), START],
    "starts that nobody tells of": [STEP, e.StepEnded(0, ok=True)],
    "an encode batch that is tried again": [
        *(e.EntryAcquired("b", "r/1"), e.EntryReserved("b", 1), e.EncodeDispatched(("b",), 1)),
        *(e.EncodeBroke(("b",), "RuntimeError: boom"), e.EncodeRetried(("b",)), e.EncodeDispatched(("b",), 1)),
    ],
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_may_happen_to_a_request_is_no_broken_promise(case):
    feed([*ENCODED, *RIGHT[case]])


def test_the_history_holds_the_events_of_the_entry_and_no_others():
    with pytest.raises(InvariantViolation) as caught:
        feed([*OTHERS, *ENCODED, e.OutputsLost(1), e.FreeSent(("k",))])
    assert caught.value.history == (*ENCODED[1:-1], e.OutputsLost(1), e.FreeSent(("k",)))


def test_nothing_is_owed_any_more_once_an_actor_has_failed_but_an_end():
    checker = feed([*OPEN, *ENCODED, STEP, e.ActorFailed("runner", "boom"), e.EncodeDone(("x",))])
    checker(e.RequestEnded("r", "failed"))
    with pytest.raises(InvariantViolation, match="terminal once"):
        checker(e.RequestEnded("r", "failed"))


def test_an_engine_that_does_not_reach_its_last_stage_is_told():
    checker = feed([*OPEN, *CLOSE[:5]])
    with pytest.raises(InvariantViolation, match="ordered teardown"):
        checker.end()


def test_what_is_asked_for_when_all_has_stopped_is_told():
    checker = feed([*OPEN, *CLOSE, e.EntryAcquired("k", "r/0")])
    with pytest.raises(InvariantViolation, match="every acquire is answered"):
        checker.end()


def test_stages_that_were_left_out_are_told():
    checker = feed([*OPEN, CLOSE[0], CLOSE[5]])
    with pytest.raises(InvariantViolation, match=r"never reached \['scheduler stopped'"):
        checker.end()


def test_the_history_reaches_back_to_who_holds_it_however_often_it_was_read_since():
    checker = feed(ENCODED)
    for number in range(100):
        for kind in (e.EntryAcquired, e.EntryHeld, e.EntryReleased):
            checker(kind("k", f"n{number}"))
    with pytest.raises(InvariantViolation, match="no free while held") as caught:
        checker(e.FreeSent(("k",)))
    assert e.EntryHeld("k", "r/0") in caught.value.history


def test_a_violation_travels_between_processes():
    violation = InvariantViolation("books balance", "by 3", ("one", "two"))
    copy = pickle.loads(pickle.dumps(violation))
    assert (str(copy), copy.invariant, copy.history) == (str(violation), "books balance", ("one", "two"))


def test_what_it_keeps_does_not_grow():
    """An entry that is hit for ever, those that somebody waited for in vain, and requests without end leave nothing."""
    checker = feed([*OPEN, *ENCODED])
    for number in range(1000):
        name = f"n{number}"
        for event in (e.RequestQueued(name), e.EntryAcquired(f"k{number}", name), e.EntryReleased(f"k{number}", name)):
            checker(event)
        for event in (e.EntryAcquired("k", name), e.EntryHeld("k", name)):
            checker(event)
        for event in (e.EntryReleased("k", name), e.RequestEnded(name, "finished")):
            checker(event)
    assert set(checker._logs) == {"k", "r"}
    assert sum(map(len, checker._logs.values())) <= 40
