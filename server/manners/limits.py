"""Limits of how often a thing may happen: `RateLimit` of requests, `WrongKeys` of keys, `Flood` of lines in the log.

`RateLimit` and `WrongKeys` are the generic cell rate algorithm (ITU-T I.371): of each caller one number is kept, the
time until which its requests are paid for.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from typing import Any

from attrs import define, field

MOST = 4_096  # addresses that are remembered, and pairs of an address and a key that was right there
_MANY = 10_000  # callers, above which those that have nothing to wait for are forgotten


@define
class RateLimit:
    """Allows ``per_minute`` requests at once, and as many in each minute after."""

    per_minute: int
    _paid_until: dict[str, float] = field(factory=dict, init=False)

    def seconds_to_wait(self, who: str, now: float) -> float:
        """Returns 0 if ``who`` may make a request at ``now``, and counts it. Else returns the seconds until it may."""
        wait, paid = _wait(self._paid_until.get(who, now), now, 60.0 / self.per_minute, self.per_minute)
        if wait:
            return wait
        self._paid_until[who] = paid
        if len(self._paid_until) > _MANY:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        return 0.0


def _wait(paid_until: float, now: float, interval: float, at_once: int) -> tuple[float, float]:
    """Returns the seconds until one more is allowed, and the time until which the caller has paid after that one."""
    paid = max(paid_until, now) + interval
    wait = paid - now - at_once * interval
    return (wait if wait > 1e-9 else 0.0), paid


@define
class WrongKeys:
    """Allows ``at_once`` wrong keys of one address, and one more every ``seconds`` after.

    After too many a key that is new to its address is not judged: else the right key among many wrong ones would open
    the server. So that nobody is kept out by a neighbour, of the same proxy say, a key that was right at an address
    before passes there always. So this does not hold up who tries, from an address, to hit a key in use at that
    address: the one that is right passes, however many were wrong. Against that only keys help that are long and
    random. Those who were seen longest ago are forgotten first, so the memory has a bound.
    """

    at_once: int = 10
    seconds: float = 6.0
    _paid_until: OrderedDict[str, float] = field(factory=OrderedDict, init=False)
    _known: OrderedDict[tuple[str, str], None] = field(factory=OrderedDict, init=False)

    def seconds_to_wait(self, address: str, who: str | None, now: float) -> float:
        """Returns 0 if a key of ``who`` (``None``: a wrong one) may be judged at ``now``, and counts it.
        Else returns the seconds until a key may be judged that was not right at this address before."""
        place = _place(address)
        if who is not None and (place, who) in self._known:
            self._known.move_to_end((place, who))
            return 0.0
        wait, paid = _wait(self._paid_until.get(place, now), now, self.seconds, self.at_once)
        if wait:
            return wait
        if who is None:
            _remember(self._paid_until, place, paid)
        else:
            _remember(self._known, (place, who), None)
        return 0.0


def _remember(memory: OrderedDict[Any, Any], key: object, value: object) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MOST:
        memory.popitem(last=False)


def _place(address: str) -> str:
    """Returns the network of an IPv6 address: one client may have any address of its 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    inner = found.ipv4_mapped
    return str(inner) if inner is not None else str(ipaddress.IPv6Address(int(found) >> 64 << 64))


@define
class Flood:
    """Counts things of one kind: one line in ``seconds`` reports all that came since the last."""

    seconds: float = 60.0
    _unreported: int = field(default=0, init=False)
    _next: float = field(default=-math.inf, init=False)

    def came(self, now: float) -> int:
        """Counts one more at ``now``. Returns how many a line is to report, this one among them; 0: none yet."""
        self._unreported += 1
        if now < self._next:
            return 0
        count, self._unreported, self._next = self._unreported, 0, now + self.seconds
        return count
