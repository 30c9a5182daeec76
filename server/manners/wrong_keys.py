"""`WrongKeys`: how many wrong keys one address may present."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from typing import Any

from attrs import define, field

MOST = 4_096  # addresses that are remembered, and pairs of an address and a key that was right there


@define
class WrongKeys:
    """``at_once`` wrong keys, and one more every ``seconds`` after (the generic cell rate algorithm, as `RateLimit`).

    Behind too many a key that is new to its address is not judged: else the right key among many wrong ones would open
    the server. So that nobody is kept out by a neighbour, behind one proxy say, a key that was right at an address
    before passes there always. So this does not hold up who tries, from an address, to hit a key in use at that
    address: the one that is right passes, however many were wrong. Against that only keys help that are long and
    random. Those who were seen longest ago are forgotten first, so the memory has a bound.
    """

    at_once: int = 10
    seconds: float = 6.0
    _paid_until: OrderedDict[str, float] = field(factory=OrderedDict, init=False)
    _known: OrderedDict[tuple[str, str], None] = field(factory=OrderedDict, init=False)

    def seconds_to_wait(self, address: str, who: str | None, now: float) -> float:
        """0: a key of ``who`` (``None``: a wrong one) may be judged at ``now``, and was. Else the seconds until a key
        may be that was not right at this address before."""
        place = _place(address)
        if who is not None and (place, who) in self._known:
            self._known.move_to_end((place, who))
            return 0.0
        paid = max(self._paid_until.get(place, now), now)
        wait = paid + self.seconds - now - self.at_once * self.seconds
        if wait > 1e-9:
            return wait
        if who is None:
            _remember(self._paid_until, place, paid + self.seconds)
        else:
            _remember(self._known, (place, who), None)
        return 0.0


def _remember(memory: OrderedDict[Any, Any], key: object, value: object) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > MOST:
        memory.popitem(last=False)


def _place(address: str) -> str:
    """One client may have any address of an IPv6 network of 64 bits."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    inner = found.ipv4_mapped
    return str(inner) if inner is not None else str(ipaddress.IPv6Address(int(found) >> 64 << 64))
