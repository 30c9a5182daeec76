"""`ContentRouter` over replicas and results that a test makes, without a cluster: its books are those of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from ray.serve.request_router import ReplicaID, RequestRouter

from triolet_ray.content_router import ContentRouter
from triolet_ray.replica_reports import ReplicaReport

NAMES = tuple("abcd")
KEYS = tuple("uvw")


class Loop:
    """An event loop, as far as Serve's router uses it. What Ray's threads hand over waits for `turn`."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon_threadsafe(self, call: Callable[..., None], *arguments: Any) -> None:
        self.calls.append(lambda: call(*arguments))

    def turn(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


class Result:
    """A replica's answer, as Ray's: who asks after its end is called too."""

    def __init__(self) -> None:
        self.done = False
        self.callbacks: list[Callable[[Any], None]] = []

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        if self.done:
            callback(None)
        else:
            self.callbacks.append(callback)

    def end(self) -> None:
        self.done = True
        for callback in self.callbacks:
            callback(None)


def identity(name: str) -> ReplicaID:
    return ReplicaID(unique_id=name, deployment_id=None)  # type: ignore[arg-type]


def running(name: str, word: ReplicaReport | None = None) -> Any:
    """A `RunningReplica` that has said ``word``."""
    return SimpleNamespace(replica_id=identity(name), routing_stats=word or {})


def pending(number: int, *keys: str) -> Any:
    """A `PendingRequest` of Serve's, of a call of `Replica.run`."""
    return SimpleNamespace(args=[keys, None], metadata=SimpleNamespace(internal_request_id=f"request {number}"))


@contextmanager
def made() -> Iterator[tuple[ContentRouter, Loop]]:
    """A router whose Serve does nothing by itself."""
    router, loop = ContentRouter.__new__(ContentRouter), Loop()
    router._lazily_fetched_loop = loop  # type: ignore[assignment]
    router.initialize_state(places=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestRouter, "update_replicas", lambda *_: None)
        patch.setattr(RequestRouter, "on_replica_actor_died", lambda *_: None)
        yield router, loop


def word(number: int, requests: int, encodings: int = 0, keys: list[str] | None = None) -> ReplicaReport:
    said = ReplicaReport(number=number, requests=requests, encodings=encodings)
    return said if keys is None else {**said, "keys": keys}


def chosen(router: ContentRouter, *keys: str, of: str = "ab") -> list[list[str]]:
    choice = router.choose_replicas([running(name) for name in of], pending(0, *keys))
    with pytest.raises(StopIteration) as end:  # it waits for nothing
        choice.send(None)  # type: ignore[attr-defined]
    return [[one.replica_id.unique_id for one in rank] for rank in end.value.value]


def test_a_word_counts_once_however_often_serve_repeats_it() -> None:
    """Serve hands on all words whenever one has changed. An old one does not know what was sent since."""
    with made() as (router, loop):
        said = running("a", word(1, requests=3, keys=["v"]))
        router.update_replicas([said, running("b", word(1, 0))])
        assert router._router.load("a") == 3
        result = Result()
        router.on_request_routed(pending(1, "u"), identity("a"), result)
        result.end()
        loop.turn()
        router.update_replicas([said, running("b", word(2, 1))])
        assert router._router.load("a") == 3
        assert chosen(router, "u") == [["a"], ["b"]], "it holds what it was sent"


def test_encodings_of_others_are_told_and_own_ones_taken_off() -> None:
    with made() as (router, _):
        router.update_replicas([running("a"), running("b")])
        router.on_request_routed(pending(1, "u"), identity("a"), Result())
        router.update_replicas([running("a", word(1, 3, encodings=3)), running("b", word(1, 2, encodings=1))])
        assert [router._router.load(name) for name in "ab"] == [3, 2]
        assert [router._router.encodings(name) for name in "ab"] == [3, 1]


class ContentRouterMachine(RuleBasedStateMachine):
    """Replicas come, go, die and say words; requests are routed and end, in any order, with ids that come again."""

    @initialize()
    def open(self) -> None:
        self.around = made()
        self.router, self.loop = self.around.__enter__()
        self.there: set[str] = set()
        self.words: dict[str, ReplicaReport] = {}
        self.flights: list[tuple[str, Result]] = []
        self.ending: list[tuple[str, Result]] = []  # ended, which the router's loop has not heard yet

    def teardown(self) -> None:
        self.around.__exit__(None, None, None)

    def own(self, name: str) -> int:
        return sum(at == name for at, _ in self.flights + self.ending)

    @rule(names=st.sets(st.sampled_from(NAMES)))
    def update(self, names: set[str]) -> None:
        self.there = set(names)
        self.router.update_replicas([running(name, self.words.get(name)) for name in sorted(names)])

    @rule(
        name=st.sampled_from(NAMES),
        requests=st.integers(0, 3),
        keys=st.none() | st.lists(st.sampled_from(KEYS), unique=True),
    )
    def say(self, name: str, requests: int, keys: list[str] | None) -> None:
        number = self.words[name]["number"] + 1 if name in self.words else 1
        self.words[name] = word(number, requests, 1, keys)

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.there.discard(name)
        self.router.on_replica_actor_died(identity(name))

    @rule(
        name=st.sampled_from(NAMES),
        number=st.integers(0, 2),
        keys=st.lists(st.sampled_from(KEYS), unique=True),
        ended=st.booleans(),
    )
    def route(self, name: str, number: int, keys: list[str], ended: bool = False) -> None:
        """To one that has gone since, too; a short answer may have ``ended`` before Serve says where it went."""
        result = Result()
        if ended:
            result.end()
        self.router.on_request_routed(pending(number, *keys), identity(name), result)
        (self.ending if ended else self.flights).append((name, result))

    @rule(number=st.integers(0, 2), keys=st.lists(st.sampled_from(KEYS), unique=True))
    def choose(self, number: int, keys: list[str]) -> None:
        ranks = chosen(self.router, *keys, of="".join(sorted(self.there)))
        if not self.there:
            assert ranks == [], "Serve is told to wait"
            return
        [name], *others = ranks
        assert {name, *(other for rank in others for other in rank)} == self.there
        self.route(name, number, keys)

    @rule(name=st.sampled_from(NAMES), number=st.integers(0, 2))
    def serve_says_that_one_has_completed(self, name: str, number: int) -> None:
        """Of an attempt that was refused, say."""
        self.router.on_request_completed(identity(name), f"request {number}")

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        flight = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        flight[1].end()
        self.ending.append(flight)

    @rule()
    def turn(self) -> None:
        self.loop.turn()
        self.ending.clear()

    @invariant()
    def own_load_is_what_runs_there(self) -> None:
        assert set(self.router._router.replicas) == self.there
        for name in self.there:
            assert self.router._router._replicas[name].own == self.own(name)
            assert self.router._router.load(name) >= self.own(name)

    @invariant()
    def nothing_is_remembered_of_what_has_ended(self) -> None:
        assert sum(map(len, self.router._under_way.values())) == len(self.flights) + len(self.ending)
        assert all(self.router._under_way.values())
        assert set(self.router._heard) == self.there


TestContentRouter = ContentRouterMachine.TestCase
TestContentRouter.settings = settings(stateful_step_count=25)
