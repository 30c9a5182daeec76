"""Ways to choose a replica, to be compared. Triolet's own is `triolet.core.routing.Router` itself."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from ...core.routing import Router, RoutingLimits

_NEVER_BUSY = 1 << 31


@define(eq=False)
class ByChance(Router):
    """Any replica, whatever its load."""

    _draws: random.Random = field(init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self._draws = random.Random(self.seed)

    def choose(self, keys: Sequence[str] = (), *, without: Iterable[str] = ()) -> str:
        """See `Router.choose`."""
        del keys, without
        return self._draws.choice(self.replicas)


@define(eq=False)
class ByLoad(Router):
    """The less loaded of two by chance, whatever they hold."""

    def choose(self, keys: Sequence[str] = (), *, without: Iterable[str] = ()) -> str:
        """See `Router.choose`."""
        del keys
        return super().choose((), without=without)


@define(eq=False)
class ByHash(Router):
    """Plain consistent hashing: each content has its replica, whatever its load."""

    def told(self, replica: str, keys: Iterable[str], others: int = 0) -> None:
        """See `Router.told`; what is held does not count."""
        del replica, keys, others

    def sent(self, replica: str, keys: Sequence[str]) -> None:
        """See `Router.sent`."""
        del keys
        super().sent(replica, ())

    def ended(self, replica: str, keys: Sequence[str]) -> None:
        """See `Router.ended`."""
        del keys
        super().ended(replica, ())


Make = Callable[[int, int], Router]
"""Makes a router: of the places of a replica, and a seed."""

POLICIES: Mapping[str, Make] = {
    "by chance": lambda places, seed: ByChance(RoutingLimits(places=places), seed),
    "by load": lambda places, seed: ByLoad(RoutingLimits(places=places), seed),
    "by hash": lambda _, seed: ByHash(RoutingLimits(places=_NEVER_BUSY), seed),
    "by content": lambda places, seed: Router(RoutingLimits(places=places), seed),
}
