"""Routing: chooses the replica for each request, so that encoder outputs are used again, but no request waits for that.

Pure: no clock, no network. The caller informs `Router` of the replicas and of what each holds. The router counts the
requests that it sends. A request names its contents by keys, the most specific first. The rules apply in this order:

1. *Affinity.* The router draws two of the replicas that hold the content at random, and takes the better one (the power
   of two choices: Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
2. *Bounded load.* A replica is busy if its load has reached its places and ``spread`` times the mean load (Mirrokni et
   al., "Consistent Hashing with Bounded Loads", 2018). A busy replica is not taken while another is not busy.
3. *Consistent hashing.* If no replica holds the content, the router considers the first two replicas after its key on
   the ring that are not busy (Karger et al., "Consistent Hashing and Random Trees", 1997). It takes the second if fewer
   encodings are to come there, else the first. So routers that know nothing of each other agree on the two, and a
   replica that comes or goes moves few keys.

The better of two replicas is the one with fewer encodings to come; if these are equal, the one with the smaller load.
Encodings come first, since an encoding makes all other work on its device wait, while one more request hardly makes a
step longer. Encodings do not make a replica busy. Otherwise content that a busy replica holds would be encoded again
elsewhere, and routing is to avoid that cost.

A request without keys goes to the better of two replicas that are drawn at random.
"""

from __future__ import annotations

import hashlib
from bisect import bisect, bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from attrs import define, field, frozen

from triolet.core.errors import Overloaded


@frozen(kw_only=True)
class RoutingLimits:
    """The limits of a `Router`.

    Attributes:
        places: the number of requests that a replica runs at once. Below it no request waits, and affinity costs
            nothing.
        spread: a replica counts as busy only if its load is at least the mean load times this factor.
        points: the number of points that each replica has on the ring. With more points the shares are more even, and a
            change of the replicas is slower.
        most_keys: the largest number of keys remembered for one replica. The newest keys are kept.
    """

    places: int = 16
    spread: float = 1.25
    points: int = 64
    most_keys: int = 4_096


@define(eq=False)
class _Replica:
    load: int = 0  # requests sent there that have not ended, and those of other routers as last reported
    others: int = 0  # the part of `load` that is from other routers
    others_encodings: int = 0  # encodings to come, for requests of other routers
    most_own: int = 0  # the largest value of `own` since the last `Router.told_total`
    most_missed: int = 0  # the largest length of `missed` since then
    asked: Counter[str] = field(factory=Counter)  # how many requests of this router have each key
    missed: set[str] = field(factory=set)  # keys of `asked` not held when sent, until a request ends
    keys: OrderedDict[str, None] = field(factory=OrderedDict)  # held, as far as is known; newest last

    @property
    def encodings(self) -> int:
        """The number of encodings that are to come."""
        return len(self.missed) + self.others_encodings

    @property
    def own(self) -> int:
        """The number of requests from this router."""
        return self.load - self.others


_FEW = 16  # so many changed replicas are moved on the ring one by one; more are sorted in together


def _point(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@define(eq=False)
class Router:
    """The decisions of one ingress. ``draw`` returns a random integer below its argument, as `random.Random.randrange`
    does.
    """

    draw: Callable[[int], int]
    limits: RoutingLimits = field(factory=RoutingLimits)
    _replicas: dict[str, _Replica] = field(factory=dict, init=False)
    _names: list[str] = field(factory=list, init=False)  # sorted
    _ring: list[tuple[int, str]] = field(factory=list, init=False)  # sorted; see `_points`
    _on_ring: set[str] = field(factory=set, init=False)
    _changed: set[str] = field(factory=set, init=False)  # replicas that have come or gone since the ring was last read
    _holders: dict[str, dict[str, None]] = field(factory=dict, init=False)  # by key; an ordered set
    _load: int = field(default=0, init=False)  # of all replicas together

    # -- facts -------------------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> Sequence[str]:
        """The names of the known replicas, sorted."""
        return self._names

    def load(self, replica: str) -> int:
        """Returns the number of requests at ``replica``: those sent there that have not ended, and those of other
        routers as last reported."""
        return self._replicas[replica].load

    def encodings(self, replica: str) -> int:
        """Returns the number of encodings that are to come at ``replica``. This is an estimate, based on what the
        replica held when requests were sent to it."""
        return self._replicas[replica].encodings

    def joined(self, replica: str) -> None:
        """Adds ``replica``, which holds nothing. A replica that is known already stays as it is."""
        if replica in self._replicas:
            return
        self._replicas[replica] = _Replica()
        insort(self._names, replica)
        self._changed.add(replica)

    def left(self, replica: str) -> None:
        """Removes ``replica`` and all that it held. An unknown replica changes nothing."""
        gone = self._replicas.pop(replica, None)
        if gone is None:
            return
        self._load -= gone.load
        self._names.remove(replica)
        self._changed.add(replica)
        for key in gone.keys:
            self._forget_holder(key, replica)

    def told(self, replica: str, keys: Iterable[str], others: int = 0, others_encodings: int = 0) -> None:
        """Notes a report of ``replica`` that it holds ``keys``. The keys of requests that were sent there are added,
        since the replica will hold them soon. The other arguments are as for `told_load`. A report of an unknown
        replica is late, and changes nothing."""
        if replica not in self._replicas:
            return
        there = self._replicas[replica]
        held = OrderedDict.fromkeys(keys)
        for key in sorted(there.asked):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self.limits.most_keys:
            held.popitem(last=False)
        for key in there.keys.keys() - held.keys():
            self._forget_holder(key, replica)
        for key in held:
            holders = self._holders.get(key)
            if holders is None:
                self._holders[key] = {replica: None}
            elif len(holders) > 1 or replica not in holders:  # the replica becomes the last holder
                holders.pop(replica, None)
                holders[replica] = None
        there.keys = held
        self.told_load(replica, others, others_encodings)

    def told_load(self, replica: str, others: int, others_encodings: int = 0) -> None:
        """Notes the load of other routers: ``others`` requests that they have sent to ``replica``, and
        ``others_encodings`` encodings to come for these requests. Such a report has a few bytes, and is soon out of
        date. So a replica should report its load more often than what it holds."""
        if replica not in self._replicas:
            return
        told = self._replicas[replica]
        self._count(told, others - told.others)
        told.others, told.others_encodings = others, others_encodings

    def told_total(self, replica: str, requests: int, encodings: int = 0) -> None:
        """Notes the load that a replica reports if it does not distinguish its routers. This router's own share of
        ``requests`` and ``encodings`` is subtracted. The moment at which the replica counted is unknown, so the share
        is the largest one since the last report.
        """
        if replica not in self._replicas:
            return
        there = self._replicas[replica]
        self.told_load(replica, max(0, requests - there.most_own), max(0, encodings - there.most_missed))
        there.most_own, there.most_missed = there.own, len(there.missed)

    def sent(self, replica: str, keys: Sequence[str]) -> None:
        """Notes that a request with ``keys`` was sent to ``replica``, which will hold them soon."""
        there = self._replicas[replica]
        self._count(there, 1)
        there.asked.update(keys)
        there.missed.update(key for key in keys[:1] if key not in there.keys)
        there.most_own = max(there.most_own, there.own)
        there.most_missed = max(there.most_missed, len(there.missed))
        for key in reversed(keys):
            self._note(replica, key)

    def ended(self, replica: str, keys: Sequence[str]) -> None:
        """Notes the end of a request with ``keys`` that was sent to ``replica``. An unknown replica changes nothing."""
        if replica not in self._replicas:
            return
        there = self._replicas[replica]
        self._count(there, -1)
        there.asked.subtract(keys)
        there.missed.difference_update(keys)
        for key in keys:
            if not there.asked[key]:
                del there.asked[key]

    def _count(self, replica: _Replica, more: int) -> None:
        replica.load += more
        self._load += more

    def _note(self, replica: str, key: str) -> None:
        held = self._replicas[replica].keys
        held[key] = None
        held.move_to_end(key)
        self._holders.setdefault(key, {})[replica] = None
        if len(held) > self.limits.most_keys:
            self._drop(replica, next(iter(held)))

    def _drop(self, replica: str, key: str) -> None:
        del self._replicas[replica].keys[key]
        self._forget_holder(key, replica)

    def _forget_holder(self, key: str, replica: str) -> None:
        holders = self._holders[key]
        del holders[replica]
        if not holders:
            del self._holders[key]

    # -- decisions ---------------------------------------------------------------------------------------------------

    @property
    def most_load(self) -> float:
        """The load at which a replica becomes busy."""
        mean = (self._load + 1) / max(len(self._names), 1)
        return max(self.limits.places, self.limits.spread * mean)

    def choose(self, keys: Sequence[str] = (), *, without: Iterable[str] = ()) -> str:
        """Returns the replica for a request with ``keys``, the most specific first. For a prompt the first key is that
        of its longest prefix.

        Args:
            without: replicas that must not be taken, since they have refused or lost the request.

        Raises:
            Overloaded: there is no replica.
        """
        barred = frozenset(without)
        found = self._holder(keys, barred) or self._hashed(keys, barred) or self._of_two(barred)
        if found is None:
            tried = f" that can take the request ({', '.join(sorted(barred))} cannot)" if barred else ""
            raise Overloaded(f"there is no replica{tried}; wait until a replica has started")
        return found

    def _holder(self, keys: Sequence[str], barred: frozenset[str]) -> str | None:
        most = self.most_load
        for key in keys:
            holders = self._holders.get(key, ())
            able = [one for one in holders if one not in barred and self._replicas[one].load < most]
            if able:
                return self._better_of_two(able)
        return None

    def _hashed(self, keys: Sequence[str], barred: frozenset[str]) -> str | None:
        """Returns a replica by its place on the ring. The last key counts, so that prompts that begin alike go to the
        same replica.
        """
        if not keys:
            return None
        most = self.most_load
        able = (one for one in self._clockwise(keys[-1]) if one not in barred and self._replicas[one].load < most)
        return min(islice(able, 2), key=self.encodings, default=None)

    def _points(self) -> list[tuple[int, str]]:
        """Returns the ring. Sorts many new or gone replicas in together, and moves a few one by one, which is
        faster.
        """
        gone = {name for name in self._changed if name not in self._replicas and name in self._on_ring}
        come = {name for name in self._changed if name in self._replicas and name not in self._on_ring}
        self._changed.clear()
        self._on_ring = self._on_ring - gone | come if gone or come else self._on_ring
        if len(gone) + len(come) > _FEW:
            self._ring = [point for point in self._ring if point[1] not in gone]
            self._ring += [point for name in come for point in self._points_of(name)]
            self._ring.sort()
            return self._ring
        for name in gone:
            for point in self._points_of(name):
                del self._ring[bisect_left(self._ring, point)]
        for name in come:
            for point in self._points_of(name):
                insort(self._ring, point)
        return self._ring

    def _points_of(self, name: str) -> list[tuple[int, str]]:
        return [(_point(f"{name} {number}"), name) for number in range(self.limits.points)]

    def _clockwise(self, key: str) -> Iterator[str]:
        ring = self._points()
        begin, seen = bisect(ring, (_point(key), "")), set[str]()
        for index in range(len(ring)):
            _, replica = ring[(begin + index) % len(ring)]
            if replica not in seen:
                seen.add(replica)
                yield replica

    def _of_two(self, barred: frozenset[str]) -> str | None:
        able = [name for name in self._names if name not in barred] if barred else self._names
        if not able:
            return None
        found = self._better_of_two(able)
        return min(able, key=self.load) if self.load(found) >= self.most_load else found

    def _better_of_two(self, able: Sequence[str]) -> str:
        first = self.draw(len(able))
        if len(able) == 1:
            return able[first]
        second = self.draw(len(able) - 1)
        return min(able[first], able[second + (second >= first)], key=self._burden)

    def _burden(self, replica: str) -> tuple[int, int]:
        one = self._replicas[replica]
        return one.encodings, one.load
