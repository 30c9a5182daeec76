"""Limits of how often something may happen: `RateLimit` for requests, `WrongKeys` for wrong keys, `Flood` for lines in
the log.

`RateLimit` and `WrongKeys` use the generic cell rate algorithm (ITU-T I.371). It keeps one number for each caller: the
time until which the caller's requests are paid for.
"""

from __future__ import annotations

import ipaddress
import math
from collections import OrderedDict
from typing import Any

from attrs import define, field

MOST = 4_096  # remembered addresses, and remembered pairs of an address and a right key
_MANY = 10_000  # above this number of callers, those that need not wait are forgotten


@define
class RateLimit:
    """Allows each caller ``per_minute`` requests at once, and as many in each later minute."""

    per_minute: int
    _paid_until: dict[str, float] = field(factory=dict, init=False)

    def seconds_to_wait(self, who: str, now: float) -> float:
        """Returns 0 if ``who`` may make a request at ``now``, and counts the request; otherwise returns the seconds to
        wait."""
        wait, paid = _wait(self._paid_until.get(who, now), now, 60.0 / self.per_minute, self.per_minute)
        if wait:
            return wait
        self._paid_until[who] = paid
        if len(self._paid_until) > _MANY:
            self._paid_until = {one: until for one, until in self._paid_until.items() if until > now}
        return 0.0


def _wait(paid_until: float, now: float, interval: float, at_once: int) -> tuple[float, float]:
    """Returns the seconds until one more request is allowed, and the time until which the caller has paid if the
    request is made."""
    paid = max(paid_until, now) + interval
    wait = paid - now - at_once * interval
    return (wait if wait > 1e-9 else 0.0), paid


@define
class WrongKeys:
    """Allows each address ``at_once`` wrong keys, and one more every ``seconds`` after that.

    After too many wrong keys from an address, keys that are new to the address are not judged: otherwise somebody could
    try many keys until the right one opens the server. A key that was right at the address before always passes, so
    that nobody is kept out by a neighbour, for example behind the same proxy. Therefore this limit does not stop a
    client that tries to guess a key in use at its own address: the right guess passes, however many wrong ones came
    before. Only long and random keys help against that. The addresses and keys that were seen longest ago are forgotten
    first, so that the memory is bounded.
    """

    at_once: int = 10
    seconds: float = 6.0
    _paid_until: OrderedDict[str, float] = field(factory=OrderedDict, init=False)
    _known: OrderedDict[tuple[str, str], None] = field(factory=OrderedDict, init=False)

    def seconds_to_wait(self, address: str, who: str | None, now: float) -> float:
        """Returns 0 if a key of ``who`` (``None``: a wrong key) may be judged at ``now``, and counts the key. Otherwise
        returns the seconds until the next key that is new to this address may be judged."""
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
    """Returns ``address``, or for IPv6 its /64 network: a client may use any address in its network."""
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
    """Counts events of one kind, so that at most one line in ``seconds`` reports all events since the last line."""

    seconds: float = 60.0
    _unreported: int = field(default=0, init=False)
    _next: float = field(default=-math.inf, init=False)

    def came(self, now: float) -> int:
        """Counts an event at ``now``. Returns the number of events that a line shall report now, this one included; 0:
        write no line yet."""
        self._unreported += 1
        if now < self._next:
            return 0
        count, self._unreported, self._next = self._unreported, 0, now + self.seconds
        return count
