"""Every sequence of events on small ledgers: what Hypothesis samples, here in full.

    python -m pytest tests/properties/core/test_exhaustive.py -s

prints how many sequences were covered, and to which depth. Sequences that lead to the same state are followed on from
once, since what a ledger does next depends on its state alone; the search goes on until no event leads to a new state,
so that sequences of any length are covered. From every state reached, the liveness promise is checked too. The
largest worlds are searched to the depth `SHALLOW` only, but in full by ``make soak`` and ``--hypothesis-profile=soak``.

Fairness is assumed, and only this: the device answers every call that it was given, in order; holders who were told to
read release at some time; somebody who waits may go on waiting as long as others hold what he needs.
"""

from __future__ import annotations

import math
import pickle
from collections import Counter
from itertools import chain, repeat

import pytest
from attrs import define, field, frozen
from hypothesis import settings

from triolet.core.batch_size import BatchSize
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import RESIDENT, State
from triolet.core.ledger_values import Decisions

from ..machines import bytes_by_state, item

DEPTH = 12
SHALLOW = 8
ANEW = {State.ABSENT, State.FREEING}  # an acquire of such an entry reserves bytes
EVENTS = (
    *("ask", "release", "hears", "dispatch", "encoded", "encode failed", "out of memory", "freed", "idle time"),
    *("generation lost", "close"),
)
Event = tuple[str, int]  # what happens, and to which request; how many embeddings are dispatched at most


class _NeverLearns(BatchSize):
    """What it counts would make a state of every number; ``dispatch`` tries every size anyway."""

    def too_large(self, size: int) -> None:
        pass

    def done(self) -> None:
        pass


@frozen
class World:
    """A small cache: what each request asks for, and in bytes how large the keys and the cache are."""

    asks: tuple[str, ...]
    sizes: dict[str, int]
    capacity: int


WORLDS = {
    "two keys, room for one": World(("a", "b", "a"), {"a": 1, "b": 1}, 1),
    "two keys, room for both": World(("a", "b", "a"), {"a": 1, "b": 1}, 2),
    "a large key among small ones": World(("a", "b", "c"), {"a": 1, "b": 2, "c": 1}, 2),
    "four requests": World(("a", "b", "c", "a"), {"a": 1, "b": 2, "c": 1}, 3),
}
LARGE = ("two keys, room for both", "a large key among small ones", "four requests")


@define(eq=False)
class Play:
    """One sequence of events on one ledger, and the device and the clients that go with it. Raises where a promise is
    broken; the asserts carry the promises' names."""

    world: World
    ledger: EncoderLedger = field(init=False)
    phases: dict[int, str] = field(factory=dict)  # of each request that has asked: "waits", "reads" or "refused"
    device: dict[str, int] = field(factory=dict)
    encoding: list[tuple[str, ...]] = field(factory=list)
    freeing: list[tuple[str, ...]] = field(factory=list)
    closed: bool = False
    failed: set[str] = field(factory=set)  # keys that have failed alone since they were reserved or computed

    def __attrs_post_init__(self) -> None:
        self.ledger = EncoderLedger(self.world.capacity, _NeverLearns(2))

    # -- what can happen ---------------------------------------------------------------------------------------------

    def enabled(self) -> list[Event]:
        events: list[Event] = []
        if not self.closed:
            events += [("ask", n) for n in range(len(self.world.asks)) if n not in self.phases]
            events += [("release", n) for n in self.phases]
            events += [("hears", n) for n, phase in self.phases.items() if phase == "refused"]
            events += [("idle time", 0)] if self.ledger.oldest_idle is not None else []
            events += [("close", 0)]
        if self.ledger._reserved:
            events += [("dispatch", 1), ("dispatch", 2)]
        events += [("encoded", 0), ("encode failed", 0)] if self.encoding else []
        events += [("out of memory", 0)] if self.encoding and len(self.encoding[0]) > 1 else []
        events += [("freed", 0)] if self.freeing else []
        events += [("generation lost", 0)]
        return events

    def happen(self, event: Event) -> None:
        what, request = event
        match what:
            case "ask":
                key = self.world.asks[request]
                self.phases[request] = "waits"
                asked = item(key, size=self.world.sizes[key], payload=key)
                self.obey(self.ledger.acquire(f"r{request}", asked))
            case "release":
                if self.phases.pop(request) == "refused":
                    return  # the answer and this have crossed; the encoder-cache actor lets it pass
                self.obey(self.ledger.release(f"r{request}", self.world.asks[request], now=0.0))
            case "hears":
                del self.phases[request]
            case "dispatch":
                jobs = self.ledger.take_encode_batch(request)
                assert 0 < len(jobs) <= request, "a batch keeps its budget"
                assert [job.payload for job in jobs] == [job.key for job in jobs], "a payload is lost"
                self.encoding.append(tuple(job.key for job in jobs))
            case "encoded":
                self.encoded()
            case "encode failed":
                self.encode_failed()
            case "out of memory":
                self.obey(self.ledger.encode_failed(self.encoding.pop(0), MemoryError("full")))
            case "freed":
                keys = self.freeing.pop(0)
                for key in keys:
                    del self.device[key]
                self.obey(self.ledger.freed(keys))
            case "idle time":
                self.obey(self.ledger.evict_idle(now=1.0, idle_seconds=0.0))
            case "generation lost":
                self.device.clear()
                self.encoding.clear()
                self.freeing.clear()
                self.phases = {n: "waits" if phase == "reads" else phase for n, phase in self.phases.items()}
                self.obey(self.ledger.generation_lost())
            case "close":
                self.closed = True
                self.phases.clear()
                self.obey(self.ledger.close(now=0.0))
        self.check()

    def encoded(self) -> None:
        keys = self.encoding.pop(0)
        for key in keys:
            assert key not in self.device, "encode once"
            self.device[key] = self.world.sizes[key]
        self.failed -= set(keys)
        self.obey(self.ledger.encoded(keys, now=0.0))

    def encode_failed(self) -> None:
        """A key is given up when it fails alone for the second time, however often it was computed before."""
        keys = self.encoding.pop(0)
        held = {key for key, (_, holders, _) in self.ledger.entries().items() if holders}
        decisions = self.ledger.encode_failed(keys, RuntimeError("boom"))
        given_up = set(keys) & self.failed & held if len(keys) == 1 else set()
        assert {refusal.key for refusal in decisions.refused} == given_up, "tried again: refused too early or late"
        self.failed |= set(keys) & held if len(keys) == 1 else set()
        self.failed -= given_up
        self.obey(decisions)

    def obey(self, decisions: Decisions) -> None:
        self.failed -= {key for key, _ in decisions.reserved}
        for hold in decisions.ready:
            request = int(hold.holder[1:])
            assert self.phases[request] == "waits", "every acquire is answered once"
            assert hold.key in self.device, "no phantom"
            self.phases[request] = "reads"
        for refusal in decisions.refused:
            request = int(refusal.holder[1:])
            assert self.phases[request] == "waits", "every acquire is answered once"
            self.phases[request] = "refused"
        readers = {self.world.asks[n] for n, phase in self.phases.items() if phase == "reads"}
        for key in decisions.free:
            assert key not in readers, "no free while held"
            assert key in self.device, "books balance: only what is resident is freed"
        self.freeing += [tuple(decisions.free)] if decisions.free else []

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        entries = self.ledger.entries()
        assert self.ledger.taken == sum(size for _, _, size in entries.values()), "books balance"
        assert 0 <= self.ledger.taken <= self.ledger.capacity, "books balance"
        told = self.ledger.statistics().bytes_by_state
        assert told == bytes_by_state(self.ledger), "books balance: the bytes of each state"
        needed = {hold.key for hold in self.ledger.waiting() if self.ledger.state(hold.key) in ANEW}
        assert self.ledger._lacking == sum(self.world.sizes[key] for key in needed), "books balance: what waits need"
        resident = {key for key, (state, _, _) in entries.items() if state in RESIDENT}
        assert resident == set(self.device), "books balance: the device holds what the ledger says"
        for number, phase in self.phases.items():
            if phase == "reads":
                assert entries[self.world.asks[number]][0] is State.READY, "no use before ready"

    def settle(self) -> None:
        """Liveness: with a fair device and holders who leave, every acquire is answered, and after close all is
        freed."""
        for _ in range(100):
            self.device_works()
            readers = [n for n, phase in self.phases.items() if phase == "reads"]
            if readers:
                self.happen(("release", readers[0]))
            elif not self.device_works():
                break
        waiting = [n for n, phase in self.phases.items() if phase == "waits"]
        assert not waiting, f"every acquire is answered: {waiting} wait for ever"
        if not self.closed:
            self.happen(("close", 0))
        while self.device_works():
            pass
        assert self.ledger.drained, "always freed eventually"
        assert not self.device, "always freed eventually"

    def device_works(self) -> bool:
        """The device does one thing of each kind that it was asked for; whether there was any."""
        fair = (("dispatch", 1), ("encoded", 0), ("freed", 0))
        enabled = self.enabled()
        works = [event for event in fair if event in enabled]
        for event in works:
            self.happen(event)
        return bool(works)

    def state(self) -> tuple[object, ...]:
        """All that what happens next can depend on. The books' order is part of it: who is served, who is evicted."""
        ledger = self.ledger
        return (
            tuple(
                (e.item.key, e.state, tuple(e.holders), e.item.payload, e.failed_alone)
                for e in ledger._entries.values()
            ),
            tuple(sorted(ledger._entries, key=lambda key: ledger._entries[key].place)),
            ledger.waiting(),
            tuple(ledger._reserved),
            tuple(half for half in ledger._halves if half),
            tuple(ledger._idle),
            tuple(sorted(self.phases.items())),
            tuple(self.encoding),
            tuple(self.freeing),
            tuple(key for key in ledger._entries if key in self.failed),
            self.closed,
        )


def explore(world: World, deepest: float = math.inf) -> tuple[int, int, int, set[object]]:
    """Follows every event from every state that less than ``deepest`` events lead to. How many states there are, after
    how many events the last new one was reached, how many sequences of up to `DEPTH` events that covers, and which
    events and states of entries there were."""
    start = Play(world)
    first = start.state()
    ways_to: dict[tuple[object, ...], tuple[Event, ...]] = {first: ()}
    follows: dict[tuple[object, ...], list[tuple[object, ...]]] = {}
    frontier, depth, met = {first: pickle.dumps(start)}, 0, set[object]()
    while frontier and depth < deepest:
        new = {}
        for state, kept in frontier.items():
            path = ways_to[state]
            follows[state] = []
            one = pickle.loads(kept)  # a copy takes a fifth of the time of the path again
            plays = chain([one], map(pickle.loads, repeat(kept)))
            for event, play in zip(one.enabled(), plays, strict=False):
                _happen_or_tell(play, event, path)
                reached = play.state()
                met |= {event[0], *(state for state, _, _ in play.ledger.entries().values())}
                follows[state].append(reached)
                if reached not in ways_to:
                    ways_to[reached] = (*path, event)
                    new[reached] = pickle.dumps(play)
                    _settle_or_tell(play, ways_to[reached])
        frontier = new
        depth += bool(new)
    return len(ways_to), depth, _sequences(follows, first), met


def _sequences(follows: dict[tuple[object, ...], list[tuple[object, ...]]], first: tuple[object, ...]) -> int:
    ways, total = Counter({first: 1}), 0
    for _ in range(DEPTH):
        longer: Counter[tuple[object, ...]] = Counter()
        for state, count in ways.items():
            for reached in follows.get(state, ()):
                longer[reached] += count
        ways = longer
        total += ways.total()
    return total


def _happen_or_tell(play: Play, event: Event, path: tuple[Event, ...]) -> None:
    try:
        play.happen(event)
    except AssertionError as error:
        raise AssertionError(f"{error}, after {(*path, event)}") from error


def _settle_or_tell(play: Play, path: tuple[Event, ...]) -> None:
    try:
        play.settle()
    except AssertionError as error:
        raise AssertionError(f"{error}, after {path} and then fairly") from error


@pytest.mark.parametrize("name", WORLDS)
def test_every_sequence_of_events_keeps_every_promise(name: str) -> None:
    """All invariants of the ledger, and liveness from every state, over every sequence to the stated depth."""
    deepest = SHALLOW if name in LARGE and settings.get_current_profile_name() != "soak" else math.inf
    states, depth, sequences, met = explore(WORLDS[name], deepest)
    whole = depth < deepest
    print(f"\n{name}: all {states:,} states that {'any number of' if whole else depth} events lead to,", end=" ")  # noqa: T201
    print(f"{depth} at most; {sequences:,} sequences of up to {DEPTH} events stay among them", end="")  # noqa: T201
    print(", which are all, and all longer ones" if whole else "")  # noqa: T201
    assert depth >= 8
    assert sequences > 1_000_000
    assert met == set(EVENTS) | set(State) - {State.ABSENT} or name != "two keys, room for both", "a corner"
