"""The requests of a fleet: Zipf contents, Poisson arrivals, bursts."""

from __future__ import annotations

import math
import random
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate

from attrs import frozen

from .replica import SimRequest


@frozen(kw_only=True)
class Burst:
    """A time with more requests: for ``seconds`` from ``begin`` on, ``times`` as many requests arrive. A ``share`` of
    them asks for one new content."""

    begin: float
    seconds: float
    times: float = 2.0
    share: float = 0.3


def content(rank: int) -> str:
    """Returns the key of one content; content 0 is the most wanted."""
    return f"content {rank}"


@frozen(kw_only=True)
class Load:
    """The requests of a fleet.

    Attributes:
        rate: requests a second, of the whole fleet.
        seconds: how long requests arrive.
        warm_seconds: how long the warm-up is; its requests fill the caches and are not in the figures.
        contents: the number of different contents; the n-th most wanted is wanted in proportion to ``n ** -zipf``.
        tokens: the mean number of a request's tokens, above 1; the numbers are geometrically distributed.
        bursts: see `Burst`.
    """

    rate: float
    seconds: float
    warm_seconds: float = 0.0
    contents: int = 50_000
    zipf: float = 1.0
    tokens: float = 20.0
    bursts: tuple[Burst, ...] = ()

    def requests(self, seed: int) -> Iterator[SimRequest]:
        """Yields the requests, in the order of their arrival."""
        chance = random.Random(f"requests {seed}")
        weights = list(accumulate(rank**-self.zipf for rank in range(1, self.contents + 1)))
        now, number = 0.0, 0
        while True:
            burst = next((one for one in self.bursts if one.begin <= now < one.begin + one.seconds), None)
            now += chance.expovariate(self.rate * (burst.times if burst else 1.0))
            if now >= self.seconds:
                return
            if burst is not None and chance.random() < burst.share:
                key = f"hit of {burst.begin:g}"
            else:
                key = content(bisect(weights, chance.random() * weights[-1], 0, self.contents - 1))
            yield SimRequest(number, key, self._tokens(chance), now)
            number += 1

    def _tokens(self, chance: random.Random) -> int:
        return 1 + int(math.log(1.0 - chance.random()) / math.log1p(-1.0 / self.tokens))
