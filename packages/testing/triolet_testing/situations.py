"""The situations that matter, as the events of runs show them: a search that never came into one of them proves little.

The sweep and `triolet_testing.chaos` count how often each occurred, and a long one fails with the names of those that
never did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from triolet.core import events as e
from triolet.core.planning.statistics import PlannerStatistics
from triolet.core.trace import TEARDOWN

_OF_EVENTS: Mapping[type[e.Event], str] = {
    e.EncodeRetried: "an encode batch is tried again",
    e.EncodeShrunk: "an encode batch is too large for memory",
    e.EntryDropped: "a reservation is dropped",
    e.EntryRefused: "an encoder output is refused",
    e.FreeSent: "an encoder output is freed",
    e.RunnerAsleep: "the runner falls asleep",
    e.RunnerAwake: "the runner wakes",
    e.RunnerRestarting: "the runner restarts",
    e.StepShrunk: "a step is too large for memory",
}
_OF_BOOKS: Mapping[str, str] = {
    "cross_shared": "cross KV is shared",
    "tokens_cached": "pages are found in the cache",
    "tokens_accepted": "a draft token is right",
}
_OF_STEPS = (
    "a prompt is read on",
    "a step has several requests",
    "a step is empty",
    "a step is skipped behind a failed one",
    "steps are lost in flight",
)
_OF_STATES = (
    "a state is kept",
    "a request goes on from a kept state",
    "a request has a second state, or one for each beam",
    "a request waits while others have all states",
)
_OF_REQUESTS = (
    "preempted for one that waits",
    "preempted for the pages of one that runs",
    "a suspect is preempted",
    "a suspect waits for an encoder output",
    "a request is poison",
    "an acquire is withdrawn",
)
STAGES = ("device taken", "accepting", *TEARDOWN, "drain deadline", "device call abandoned")
SITUATIONS = (*_OF_EVENTS.values(), *_OF_BOOKS.values(), *_OF_STEPS, *_OF_STATES, *_OF_REQUESTS)
"""Situations that every long run of the sweep, and of chaos, must have seen. The sweep must have seen all `STAGES`."""


def situations(trace: Iterable[e.Event], books: PlannerStatistics | None) -> Counter[str]:
    """Counts the situations of one run. ``books`` are the planner's at its end; ``None``: the planner never began."""
    seen: Counter[str] = Counter()
    running: set[str] = set()
    suspects: set[str] = set()
    fed: Counter[str] = Counter()  # steps since the start
    held: set[str] = set()
    flights = 0
    for event in trace:
        seen[_OF_EVENTS.get(type(event), "")] += 1
        match event:
            case e.RequestStarted(name):
                running.add(name)
                fed[name] = 0
            case e.RequestPreempted(name, to):
                running.discard(name)
                seen[_OF_REQUESTS[to in running]] += 1
                seen["a suspect is preempted"] += name in suspects
            case e.RequestSuspected(name):
                running.discard(name)
                suspects.add(name)
            case e.EncoderWaitOver(name):
                seen["a suspect waits for an encoder output"] += name in suspects
            case e.RequestEnded(name, _, error):
                running.discard(name)
                seen["a request is poison"] += error.startswith("PoisonRequest")
            case e.StepBegun(_, names):
                flights += 1
                suspects.difference_update(event.samples)
                seen["a step is empty"] += not names
                seen["a step has several requests"] += len(names) > 1
                seen["a prompt is read on"] += any(fed[name] for name in names if name not in event.samples)
                fed.update(names)
            case e.StepEnded():
                flights -= 1
                seen["a step is skipped behind a failed one"] += event.skipped
            case e.StepsLost():
                seen["steps are lost in flight"] += flights > 0
                running.clear()
                flights = 0
            case e.StageReached(stage):
                seen[stage] += 1
            case e.EntryHeld(_, holder):
                held.add(holder)
            case e.EntryReleased(_, holder):
                seen["an acquire is withdrawn"] += holder not in held
    for name, situation in _OF_BOOKS.items() if books is not None else ():
        seen[situation] += getattr(books, name) > 0
    if books is not None and books.states:
        _count_states(trace, books.states, seen)
    del seen[""]
    return +seen


def _count_states(trace: Iterable[e.Event], most: int, seen: Counter[str]) -> None:
    """Counts the situations of a model with ``most`` recurrent states."""
    states: dict[str, tuple[int, ...]] = {}  # of each request; empty while it waits
    for event in trace:
        match event:
            case e.RequestQueued(name) | e.RequestPreempted(name) | e.RequestSuspected(name):
                states[name] = ()
            case e.RequestEnded(name):
                states.pop(name, None)
            case e.StepsLost():
                states = dict.fromkeys(states, ())
            case e.StepBegun(_, names) if names:
                owned = list(zip(event.owners, event.states, strict=True))
                states.update({name: tuple(state for owner, state in owned if owner == name) for name in names})
                taken = {state for own in states.values() for state in own}
                counts = len(event.kept), len(event.sources), max(len(states[name]) for name in names) > 1
                seen.update(dict(zip(_OF_STATES, (*counts, () in states.values() and len(taken) == most), strict=True)))


def told(seen: Counter[str], wanted: Sequence[str], *, enough: bool) -> tuple[str, bool]:
    """Returns a line for each of the ``wanted``, and whether all have occurred. Too few runs, which are not ``enough``,
    may lack some."""
    lines = [f"{seen[one] or ('NEVER' if enough else 0):>9} {one}" for one in sorted(wanted, key=seen.__getitem__)]
    return "\n".join(lines), not enough or all(map(seen.__getitem__, wanted))
