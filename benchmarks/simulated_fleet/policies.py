"""The ways to choose a replica that are compared. Triolet's own is `triolet_ray.routing.Router`, unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from attrs import define

from triolet_ray.routing import Router, RoutingLimits

_NEVER_BUSY = 1 << 31


@define(eq=False)
class ByLoad(Router):
    """The less loaded of two random replicas, whatever they hold."""

    def choose(self, keys: Sequence[str] = (), *, without: Iterable[str] = ()) -> str:
        """Implements `Router.choose`."""
        del keys
        return super().choose((), without=without)


@define(eq=False)
class ByHash(Router):
    """Consistent hashing with bounded loads: the first replica on the ring after the key that is not busy."""

    def choose(self, keys: Sequence[str] = (), *, without: Iterable[str] = ()) -> str:
        """Implements `Router.choose`."""
        del without
        most = self.most_load
        return next(one for one in self._clockwise(keys[-1]) if self.load(one) < most)

    def told(self, replica: str, keys: Iterable[str], others: int = 0, others_encodings: int = 0) -> None:
        """Implements `Router.told`. The keys that the replica holds are ignored."""
        del keys
        self.told_load(replica, others, others_encodings)

    def sent(self, replica: str, keys: Sequence[str]) -> None:
        """Implements `Router.sent`."""
        del keys
        super().sent(replica, ())

    def ended(self, replica: str, keys: Sequence[str]) -> None:
        """Implements `Router.ended`."""
        del keys
        super().ended(replica, ())


Make = Callable[[int, int], Router]
"""Makes a router from the number of places of a replica, and a seed."""


def _made(kind: type[Router], places: int, seed: int) -> Router:
    return kind(random.Random(f"router {seed}").randrange, RoutingLimits(places=places))


POLICIES: Mapping[str, Make] = {
    "by load": partial(_made, ByLoad),
    "by hash": lambda _, seed: _made(ByHash, _NEVER_BUSY, seed),
    "by bounded hash": partial(_made, ByHash),
    "by content": partial(_made, Router),
}
"""The policies by name. Plain consistent hashing is bounded hashing without a bound."""
