"""The promises of the router, each under its own name."""

from __future__ import annotations

import random
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.properties.machines import Machine
from triolet.core.errors import Overloaded
from triolet_ray.routing import Router, RoutingLimits, _point

REPLICAS = tuple("abcdef")
KEYS = tuple("uvwxyz")
ASKED = st.lists(st.sampled_from(KEYS), max_size=2, unique=True)


class RoutingMachine(Machine):
    """Replicas come, go and tell what they hold; requests are sent and end. A book of our own says what is known."""

    @initialize(places=st.integers(1, 3), spread=st.sampled_from([1.0, 1.25, 2.0]), most_keys=st.integers(1, 8))
    def open(self, places: int, spread: float, most_keys: int) -> None:
        self.limits = RoutingLimits(places=places, spread=spread, points=4, most_keys=most_keys)
        self.router = Router(random.Random(0).randrange, self.limits)
        self.flights: list[tuple[str, list[str]]] = []  # requests, where they are
        self.others: Counter[str] = Counter()  # requests of other routers at each replica, as it told last
        self.others_encodings: Counter[str] = Counter()  # the encodings to come for these
        self.most: dict[str, tuple[int, int]] = {}  # own requests and encodings, since a replica told its total
        self.missed: dict[str, set[str]] = {}  # what each replica did not hold when it was sent there
        self.known: dict[str, list[str]] = {}  # what each replica holds; the last is the newest

    def own(self, replica: str) -> int:
        return sum(where == replica for where, _ in self.flights)

    def load(self, replica: str) -> int:
        return self.own(replica) + self.others[replica]

    def encodings(self, replica: str) -> int:
        return len(self.missed[replica]) + self.others_encodings[replica]

    def burden(self, replica: str) -> tuple[int, int]:
        return self.encodings(replica), self.load(replica)

    def behind(self, key: str) -> list[str]:
        """All that are there, in the order of the ring behind ``key``."""
        points = sorted((_point(f"{one} {number}"), one) for one in self.known for number in range(self.limits.points))
        turned = [point for point in points if point[0] >= _point(key)] + points
        return list(dict.fromkeys(one for _, one in turned))

    def busy(self, replica: str) -> bool:
        return self.load(replica) >= self.most_load()

    def most_load(self) -> float:
        mean = (sum(map(self.load, self.known)) + 1) / max(len(self.known), 1)
        return max(self.limits.places, self.limits.spread * mean)

    def note(self, replica: str, key: str) -> None:
        held = [one for one in self.known[replica] if one != key]
        self.known[replica] = [*held, key][-self.limits.most_keys :]

    @rule(replica=st.sampled_from(REPLICAS))
    def join(self, replica: str) -> None:
        self.router.joined(replica)
        self.known.setdefault(replica, [])
        self.missed.setdefault(replica, set())
        self.most.setdefault(replica, (0, 0))

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: str) -> None:
        self.router.left(replica)
        self.known.pop(replica, None)
        self.missed.pop(replica, None)
        self.most.pop(replica, None)
        del self.others[replica], self.others_encodings[replica]
        self.flights = [flight for flight in self.flights if flight[0] != replica]

    @rule(
        replica=st.sampled_from(REPLICAS),
        keys=st.lists(st.sampled_from(KEYS), unique=True),
        others=st.integers(0, 3),
        encodings=st.integers(0, 2),
    )
    def tell(self, replica: str, keys: list[str], others: int, encodings: int) -> None:
        self.router.told(replica, keys, others, encodings)
        if replica in self.known:
            self.others[replica], self.others_encodings[replica] = others, encodings
            self.known[replica] = []
            asked = [key for where, asked in self.flights if where == replica for key in asked]
            for key in (*keys, *sorted(set(asked))):
                self.note(replica, key)

    @rule(
        replica=st.sampled_from(REPLICAS), requests=st.integers(0, 3), encodings=st.integers(0, 2), total=st.booleans()
    )
    def tell_load(self, replica: str, requests: int, encodings: int, total: bool) -> None:
        (self.router.told_total if total else self.router.told_load)(replica, requests, encodings)
        if replica not in self.known:
            return
        own, own_encodings = self.most[replica] if total else (0, 0)
        self.others[replica] = max(0, requests - own)
        self.others_encodings[replica] = max(0, encodings - own_encodings)
        if total:
            self.most[replica] = self.own(replica), len(self.missed[replica])

    @rule(keys=ASKED, barred=st.sets(st.sampled_from(REPLICAS), max_size=2))
    def send(self, keys: list[str], barred: set[str]) -> None:
        able = set(self.known) - barred
        if not able:
            with pytest.raises(Overloaded, match="no replica"):
                self.router.choose(keys, without=barred)
            return
        chosen = self.router.choose(keys, without=barred)
        assert chosen in able, "a replica that is there, and that may be taken"
        self.judge(chosen, keys, able)
        self.router.sent(chosen, keys)
        self.flights.append((chosen, keys))
        self.missed[chosen].update(key for key in keys[:1] if key not in self.known[chosen])
        own, own_encodings = self.most[chosen]
        self.most[chosen] = max(own, self.own(chosen)), max(own_encodings, len(self.missed[chosen]))
        for key in reversed(keys):
            self.note(chosen, key)

    def judge(self, chosen: str, keys: list[str], able: set[str]) -> None:
        idle = {one for one in able if not self.busy(one)}
        if not idle:
            assert self.load(chosen) == min(map(self.load, able)), "of many that are busy the least loaded is taken"
            return
        assert chosen in idle, "nobody busy is taken while another is not"
        held = next((held for key in keys if (held := {one for one in idle if key in self.known[one]})), None)
        if held is not None:
            assert chosen in held, "what somebody holds who is not busy is not computed elsewhere"
            self.judge_of_two(chosen, held)
        elif keys:
            first, second, *_ = [one for one in self.behind(keys[-1]) if one in idle] * 2
            better = second if self.encodings(second) < self.encodings(first) else first
            assert chosen == better, "what nobody holds goes to the better of the first two on the ring"
        elif idle == able:
            self.judge_of_two(chosen, able)

    def judge_of_two(self, chosen: str, able: set[str]) -> None:
        others = [self.burden(one) for one in able - {chosen}]
        assert not others or self.burden(chosen) <= max(others), "the worst of all is never the better of two"

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        where, keys = self.flights.pop(data.draw(st.integers(0, len(self.flights) - 1)))
        self.missed[where].difference_update(keys)
        self.router.ended(where, keys)

    @invariant()
    def loads_are_those_of_the_requests_that_run(self) -> None:
        assert list(self.router.replicas) == sorted(self.known)
        assert all(self.router.load(replica) == self.load(replica) for replica in self.known)

    @invariant()
    def busy_is_who_exceeds_the_mean_of_those_who_are_there(self) -> None:
        assert self.router.most_load == self.most_load()

    @invariant()
    def encodings_to_come_are_those_of_what_was_not_held(self) -> None:
        assert all(self.router.encodings(replica) == self.encodings(replica) for replica in self.known)

    @invariant()
    def memory_is_bounded_and_of_those_who_are_there(self) -> None:
        held = {(key, one) for key, holders in self.router._holders.items() for one in holders}
        assert held == {(key, one) for one, keys in self.known.items() for key in keys}
        assert len(self.router._points()) == self.limits.points * len(self.known)


TestRouting = RoutingMachine.TestCase
TestRouting.settings = settings(max_examples=settings.default.max_examples // 4)


def fleet(*replicas: str) -> Router:
    router = Router(random.Random(0).randrange)
    for replica in replicas:
        router.joined(replica)
    return router


@given(st.lists(st.integers(0, 40), max_size=60))
def test_the_ring_is_that_of_those_who_are_there_however_many_come_and_go_at_once(numbers: list[int]) -> None:
    """Those who come twice leave in between. The ring is read now and then, so that few or many have changed since."""
    router = fleet("one")
    for number in numbers:
        name = f"replica {number}"
        (router.left if name in router.replicas else router.joined)(name)
        if not number % 7:
            router.choose(["key"])
    others = fleet(*router.replicas)
    assert router._points() == others._points() == sorted(others._points())
    assert len(router._points()) == router.limits.points * len(router.replicas)


def test_shares_of_the_ring_are_about_even() -> None:
    """64 points leave a standard deviation of an eighth of the share."""
    router = fleet(*(f"replica {number}" for number in range(20)))
    shares = dict.fromkeys(router.replicas, 0)
    for key in range(20_000):
        shares[router.choose([str(key)])] += 1
    assert 600 < min(shares.values()) <= max(shares.values()) < 1_500
