"""Plays a load on a fleet: deterministic, on virtual time, in one thread."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from statistics import fmean

from attrs import define, field, frozen

from ...core.routing import Router
from .load import Load
from .policies import Make
from .replica import SimRequest, Costs, Replica


@frozen(kw_only=True)
class Loss:
    """At ``at`` a ``share`` of the replicas dies. New ones, which hold nothing, are there ``seconds`` later."""

    at: float
    share: float
    seconds: float = 30.0


@frozen(kw_only=True)
class Fleet:
    """What a fleet is made of.

    Attributes:
        replicas: how many.
        costs: of each replica.
        routers: ingresses, each with a router of its own; requests come to them in turn.
        tell_seconds: how often a replica tells each router what it holds, and its load.
        most_told: keys that it tells at most, the newest.
    """

    replicas: int = 1_000
    costs: Costs = field(factory=Costs)
    routers: int = 4
    tell_seconds: float = 5.0
    most_told: int = 1_024


@frozen(kw_only=True)
class Played:
    """What a load came to. Seconds are virtual.

    Attributes:
        requests: that ended: all that arrived.
        encodes: that were computed.
        hit_rate: the share of the requests that needed none of their own.
        p50, p99: seconds from the arrival to the end of a request, those of ``seconds`` that it was sent again included.
        again: requests that were sent again, since their replica died.
        imbalance: the longest device time of a replica that lived throughout, over the mean.
        told: keys that one router was told, a second.
    """

    requests: int
    encodes: int
    hit_rate: float
    mean: float
    p50: float
    p99: float
    again: int
    imbalance: float
    told: float


_Event = Callable[[float], None]


@define(eq=False)
class _Play:
    fleet: Fleet
    make: Make
    seed: int
    losses: tuple[Loss, ...]
    arrivals: Iterator[SimRequest]
    replicas: dict[str, Replica] = field(factory=dict, init=False)
    gone: list[Replica] = field(factory=list, init=False)
    routers: list[Router] = field(init=False)
    ended: list[SimRequest] = field(factory=list, init=False)
    told: int = field(default=0, init=False)
    last: float = field(default=0.0, init=False)
    _events: list[tuple[float, int, _Event]] = field(factory=list, init=False)
    _order: int = field(default=0, init=False)
    _made: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.routers = [self.make(self.fleet.costs.places, self.seed + index) for index in range(self.fleet.routers)]
        for _ in range(self.fleet.replicas):
            self._join(0.0)
        for loss in self.losses:
            self._at(loss.at, lambda now, loss=loss: self._lose(loss, now))
        self._next_arrival()

    def run(self) -> None:
        """Until every request has ended."""
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)

    def _at(self, time: float, event: _Event) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, event))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        asked = next(self.arrivals, None)
        if asked is not None:
            self._at(asked.arrived, lambda now: self._arrive(asked, now))

    def _arrive(self, asked: SimRequest, now: float) -> None:
        self.last = now
        self._send(asked, now)
        self._next_arrival()

    def _send(self, asked: SimRequest, now: float) -> None:
        router = self.routers[asked.number % len(self.routers)]
        asked.replica = router.choose((asked.key,))
        asked.sent += 1
        router.sent(asked.replica, (asked.key,))
        self.replicas[asked.replica].submit(asked, now)

    def _advance(self, replica: Replica, turn: int, now: float) -> None:
        if turn != replica.turn:
            return
        for asked in replica.advance(now):
            self.routers[asked.number % len(self.routers)].ended(replica.name, (asked.key,))
            self.ended.append(asked)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _join(self, now: float) -> None:
        name = f"replica {self._made}"
        self._made += 1
        self.replicas[name] = replica = Replica(name, self.fleet.costs, self._wake)
        for router in self.routers:
            router.joined(name)
        self._at(now + self.fleet.tell_seconds * (self._made % 97) / 97, lambda then: self._tell(replica, then))

    def _wake(self, replica: Replica, time: float) -> None:
        turn = replica.turn
        self._at(time, lambda now: self._advance(replica, turn, now))

    def _tell(self, replica: Replica, now: float) -> None:
        """The replica tells every router, as long as it lives and requests come."""
        if replica.name not in self.replicas or now > self.last + self.fleet.tell_seconds:
            return
        held = replica.held()[-self.fleet.most_told :]
        self.told += len(held)
        mine = [sum(number % len(self.routers) == index for number in replica.numbers()) for index in range(len(self.routers))]
        for router, own in zip(self.routers, mine, strict=True):
            router.told(replica.name, held, replica.requests - own)
        self._at(now + self.fleet.tell_seconds, lambda then: self._tell(replica, then))

    def _lose(self, loss: Loss, now: float) -> None:
        names = sorted(self.replicas)
        count = round(loss.share * len(names))
        dead = [self.replicas.pop(name) for name in names[:: max(len(names) // max(count, 1), 1)][:count]]
        for router in self.routers:
            for replica in dead:
                router.left(replica.name)
        self.gone += dead
        for replica in dead:
            for asked in replica.lose():
                self._send(asked, now)
            self._at(now + loss.seconds, self._join)


def play(fleet: Fleet, load: Load, make: Make, *, seed: int = 0, losses: tuple[Loss, ...] = ()) -> Played:
    """Plays ``load`` on ``fleet``, whose routers ``make`` makes.

    Args:
        seed: of the requests and of the routers: the same seed gives the same numbers, everywhere.
        losses: see `Loss`.
    """
    run = _Play(fleet, make, seed, losses, load.requests(seed))
    run.run()
    seconds = sorted(asked.ended - asked.arrived for asked in run.ended)
    encodes = sum(replica.encodes for replica in (*run.replicas.values(), *run.gone))
    busy = [replica.encode_seconds + replica.step_seconds for replica in run.replicas.values()]
    return Played(
        requests=len(seconds),
        encodes=encodes,
        hit_rate=1 - encodes / len(seconds) if seconds else math.nan,
        mean=fmean(seconds),
        p50=_quantile(seconds, 0.5),
        p99=_quantile(seconds, 0.99),
        again=sum(asked.sent > 1 for asked in run.ended),
        imbalance=max(busy) / fmean(busy) if any(busy) else math.nan,
        told=run.told / load.seconds,
    )


def _quantile(values: list[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)] if values else math.nan
