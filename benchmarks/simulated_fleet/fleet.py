"""A player of loads on a fleet: deterministic, on virtual time, in one thread."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from functools import partial

from attrs import define, field, frozen

from triolet_ray.routing import Router

from .load import Load, content
from .outcome import Played, summary
from .policies import Make
from .replica import Costs, Replica, SimRequest


@frozen(kw_only=True)
class Loss:
    """The death of a ``share`` of the replicas at ``at``. After ``seconds``, new ones with empty caches replace
    them."""

    at: float
    share: float
    seconds: float = 30.0


@frozen(kw_only=True)
class Fleet:
    """The parts of a fleet.

    Attributes:
        replicas: the number of replicas.
        costs: the costs of each replica.
        routers: the number of ingresses, each with a router of its own; requests come to them in turn.
        tell_seconds: the seconds between two reports of the keys that a replica holds, to each router.
        load_seconds: the seconds between two reports of a replica's load.
        most_told: the most keys that a report has; the newest are chosen.
        full: the caches start with the most wanted contents, each on the replica that the first router would choose.
    """

    replicas: int = 1_000
    costs: Costs = field(factory=Costs)
    routers: int = 4
    tell_seconds: float = 5.0
    load_seconds: float = 1.0
    most_told: int = 1_024
    full: bool = False


_Event = Callable[[float], None]


@define(eq=False)
class Play:
    """One load on one fleet. ``arrivals`` are in the order of their time; ``losses`` come between them."""

    fleet: Fleet
    make: Make
    seed: int
    losses: tuple[Loss, ...]
    arrivals: Iterator[SimRequest]
    replicas: dict[str, Replica] = field(factory=dict, init=False)
    lost: list[Replica] = field(factory=list, init=False)
    routers: list[Router] = field(init=False)
    ended: list[SimRequest] = field(factory=list, init=False)
    told: int = field(default=0, init=False)  # keys that were reported to each router
    arriving: bool = field(default=True, init=False)  # more requests are to come
    _events: list[tuple[float, int, _Event]] = field(factory=list, init=False)  # a heap
    _order: int = field(default=0, init=False)  # counts events, so that events at the same time keep their order
    _made: int = field(default=0, init=False)  # replicas that were made so far

    def __attrs_post_init__(self) -> None:
        count = self.fleet.routers
        self.routers = [self.make(self.fleet.costs.places, self.seed + index) for index in range(count)]
        for _ in range(self.fleet.replicas):
            self._join(0.0)
        for loss in self.losses:
            self.at(loss.at, partial(self._lose, loss))
        self._next_arrival()

    def fill(self) -> None:
        """Fills the caches with the most wanted contents, and reports these to the routers."""
        kept: dict[str, list[str]] = {name: [] for name in self.replicas}
        for rank in range(self.fleet.replicas * self.fleet.costs.outputs):
            kept[self.routers[0].choose((content(rank),))].append(content(rank))
        for name, keys in kept.items():
            self.replicas[name].fill(keys, 0.0)
            for router in self.routers:
                router.told(name, self.replicas[name].held(0.0))

    def run(self) -> None:
        """Plays until every request has ended and every output is freed."""
        now = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        for replica in self.replicas.values():
            replica.close(now)

    def at(self, time: float, event: _Event) -> None:
        """Schedules ``event`` at ``time``. The event is called with this time."""
        self._order += 1
        heapq.heappush(self._events, (time, self._order, event))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> None:
        request = next(self.arrivals, None)
        self.arriving = request is not None
        if request is not None:
            self.at(request.arrived, partial(self._arrive, request))

    def _arrive(self, request: SimRequest, now: float) -> None:
        self._send(request, now)
        self._next_arrival()

    def _router_of(self, number: int) -> Router:
        return self.routers[number % len(self.routers)]

    def _send(self, request: SimRequest, now: float) -> None:
        router = self._router_of(request.number)
        request.replica = router.choose((request.key,))
        request.sent += 1
        router.sent(request.replica, (request.key,))
        self.replicas[request.replica].submit(request, now)

    def _advance(self, replica: Replica, turn: int, now: float) -> None:
        if turn != replica.turn:
            return
        for request in replica.advance(now):
            self._router_of(request.number).ended(replica.name, (request.key,))
            self.ended.append(request)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _join(self, now: float) -> None:
        name = f"replica {self._made}"
        self._made += 1
        self.replicas[name] = replica = Replica(name, self.fleet.costs, self._wake)
        for router in self.routers:
            router.joined(name)
        part = self._made % 97 / 97  # spreads the reports of the replicas over time
        self.at(now + part * self.fleet.tell_seconds, partial(self._tell, replica))
        self.at(now + part * self.fleet.load_seconds, partial(self._tell_load, replica))

    def _wake(self, replica: Replica, time: float) -> None:
        self.at(time, partial(self._advance, replica, replica.turn))

    def _tells(self, replica: Replica) -> bool:
        return self.arriving and replica.name in self.replicas

    def _tell(self, replica: Replica, now: float) -> None:
        """Reports the keys that the replica holds to every router, and again at intervals while it lives and requests
        come."""
        if not self._tells(replica):
            return
        held = replica.held(now)[-self.fleet.most_told :]
        self.told += len(held)
        for router, others in zip(self.routers, replica.others(len(self.routers)), strict=True):
            router.told(replica.name, held, others.requests, others.encodings)
        self.at(now + self.fleet.tell_seconds, partial(self._tell, replica))

    def _tell_load(self, replica: Replica, now: float) -> None:
        if not self._tells(replica):
            return
        for router, others in zip(self.routers, replica.others(len(self.routers)), strict=True):
            router.told_load(replica.name, others.requests, others.encodings)
        self.at(now + self.fleet.load_seconds, partial(self._tell_load, replica))

    def _lose(self, loss: Loss, now: float) -> None:
        names = sorted(self.replicas)
        count = round(loss.share * len(names))
        dead = [self.replicas.pop(names[index * len(names) // count]) for index in range(count)]
        self.lost += dead
        for router in self.routers:
            for replica in dead:
                router.left(replica.name)
        for replica in dead:
            for request in replica.lose():
                self._send(request, now)
            self.at(now + loss.seconds, self._join)


def play(fleet: Fleet, load: Load, make: Make, *, seed: int = 0, losses: tuple[Loss, ...] = ()) -> Played:
    """Plays ``load`` on ``fleet``. ``make`` makes its routers.

    Args:
        seed: the seed of the requests and the routers; equal seeds give equal numbers.
        losses: see `Loss`.
    """
    run = Play(fleet, make, seed, losses, load.requests(seed))
    if fleet.full:
        run.fill()
    busy: dict[str, float] = {}
    run.at(load.warm_seconds, lambda _: busy.update({one.name: one.busy for one in run.replicas.values()}))
    run.run()
    return summary(
        run.ended,
        warm=load.warm_seconds,
        busy=[one.busy - busy[one.name] for one in run.replicas.values() if one.name in busy],
        encodes=sum(one.encodes for one in (*run.replicas.values(), *run.lost)),
        told=run.told / load.seconds,
    )
