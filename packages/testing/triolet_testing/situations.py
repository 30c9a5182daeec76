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
    "a state is kept",
    "a request goes on from a kept state",
    "a request has a second state, or one for each beam",
    "a step is skipped behind a failed one",
    "steps are lost in flight",
)
_OF_REQUESTS = (
    "preempted for one that waits",
    "preempted for the pages of one that runs",
    "a suspect is preempted",
    "a suspect waits for an encoder output",
    "a request is poison",
    "a request waits while others have all states",
    "an acquire is withdrawn",
)
STAGES = ("device taken", "accepting", *TEARDOWN, "drain deadline", "device call abandoned")
SITUATIONS = (*_OF_EVENTS.values(), *_OF_BOOKS.values(), *_OF_STEPS, *_OF_REQUESTS)
"""Situations that every long run of the sweep, and of chaos, must have seen. The sweep must have seen all `STAGES`."""


def situations(trace: Iterable[e.Event], books: PlannerStatistics | None) -> Counter[str]:
    """Counts the situations of one run. ``books`` are the planner's at its end; ``None``: the planner never began."""
    seen: Counter[str] = Counter()
    running: set[str] = set()
    suspects: set[str] = set()
    fed: Counter[str] = Counter()  # steps since the start
    held: set[str] = set()
    waiting: set[str] = set()
    states: dict[str, tuple[int, ...]] = {}  # of running requests
    flights, most = 0, 0 if books is None else books.states
    for event in trace:
        seen[_OF_EVENTS.get(type(event), "")] += 1
        match event:
            case e.RequestQueued(name):
                waiting.add(name)
            case e.RequestStarted(name):
                waiting.discard(name)
                running.add(name)
                fed[name] = 0
            case e.RequestPreempted(name, to):
                running.discard(name)
                waiting.add(name)
                states.pop(name, None)
                seen[_OF_REQUESTS[to in running]] += 1
                seen["a suspect is preempted"] += name in suspects
            case e.RequestSuspected(name):
                running.discard(name)
                waiting.add(name)
                states.pop(name, None)
                suspects.add(name)
            case e.EncoderWaitOver(name):
                seen["a suspect waits for an encoder output"] += name in suspects
            case e.RequestEnded(name, _, error):
                running.discard(name)
                waiting.discard(name)
                states.pop(name, None)
                seen["a request is poison"] += error.startswith("PoisonRequest")
            case e.StepBegun(_, names):
                flights += 1
                suspects.difference_update(event.samples)
                seen["a step is empty"] += not names
                seen["a step has several requests"] += len(names) > 1
                states.update(zip(names, event.states, strict=bool(event.states)))
                seen["a state is kept"] += len(event.kept)
                seen["a request goes on from a kept state"] += len(event.sources)
                seen["a request has a second state, or one for each beam"] += max(map(len, event.states), default=0) > 1
                taken = {state for own in states.values() for state in own}
                seen["a request waits while others have all states"] += bool(waiting) and 0 < len(taken) == most
                seen["a prompt is read on"] += any(fed[name] for name in names if name not in event.samples)
                fed.update(names)
            case e.StepEnded():
                flights -= 1
                seen["a step is skipped behind a failed one"] += event.skipped
            case e.StepsLost():
                seen["steps are lost in flight"] += flights > 0
                waiting |= running
                running.clear()
                states.clear()
                flights = 0
            case e.StageReached(stage):
                seen[stage] += 1
            case e.EntryHeld(_, holder):
                held.add(holder)
            case e.EntryReleased(_, holder):
                seen["an acquire is withdrawn"] += holder not in held
    for name, situation in _OF_BOOKS.items() if books is not None else ():
        seen[situation] += getattr(books, name) > 0
    del seen[""]
    return +seen


def told(seen: Counter[str], wanted: Sequence[str], *, enough: bool) -> tuple[str, bool]:
    """Returns a line for each of the ``wanted``, and whether all have occurred. Too few runs, which are not ``enough``,
    may lack some."""
    lines = [f"{seen[one] or ('NEVER' if enough else 0):>9} {one}" for one in sorted(wanted, key=seen.__getitem__)]
    return "\n".join(lines), not enough or all(map(seen.__getitem__, wanted))
