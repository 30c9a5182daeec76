"""The faults of a body, in words and by place, made of pydantic's.

If a member may be of several kinds, pydantic has a fault for each kind, and names the kind in the place. Here a place
is a path in the body, and of several faults that lie within one another the innermost is reported. A body may have more
faults than there is time for: then their number is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen
from pydantic import ValidationError

_MOST = 3
_LOOKED_AT = 1_000  # faults; pydantic gives all or none, and each costs a microsecond or more
_LONGEST = 200  # characters of a place: its steps are the client's
_LONGEST_WORDS = 1_000  # characters of why: what the client sent may be in it
Place = tuple[str | int, ...]


@frozen
class Fault:
    """One fault. ``place``: the steps to the member that is wrong; ``said``: the reasons, for each kind that it may
    be of."""

    place: Place
    said: tuple[str, ...]

    @property
    def name(self) -> str:
        """The place in words."""
        return ".".join(map(str, self.place))[:_LONGEST]

    def __str__(self) -> str:
        told = "; or ".join(self.said)
        return f"{self.name}: {told}" if self.place else told


def faults_of(error: ValidationError, body: object) -> list[Fault]:
    """Returns the faults of ``body``, which has at least one."""
    if is_beyond_telling(error):
        return [
            Fault((), (f"it has {error.error_count():,} faults, too many to tell; GET /openapi.json says what fits",))
        ]
    found: dict[Place, list[str]] = {}
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        said = found.setdefault(_place(fault, body), [])
        told = fault["msg"].removeprefix("Value error, ")[:_LONGEST_WORDS]
        if told not in said:
            said.append(told)
    holders = {place[:length] for place in found for length in range(1, len(place))}
    return [Fault(place, tuple(said)) for place, said in found.items() if place not in holders]


def is_beyond_telling(error: ValidationError) -> bool:
    """True if a body has so many faults that looking at each would hold up all other requests."""
    return error.error_count() > _LOOKED_AT


def in_words(faults: Sequence[Fault]) -> str:
    """Returns the first of ``faults`` in words."""
    more = f" (and {len(faults) - _MOST} more)" if len(faults) > _MOST else ""
    return "; ".join(map(str, faults[:_MOST])) + more


def _place(fault: Mapping[str, Any], body: Any) -> Place:
    """Returns the steps of pydantic's location that are steps in ``body``, too."""
    place = []
    for step in fault["loc"]:
        within = isinstance(step, int) and 0 <= step < len(body) if isinstance(body, list) else False
        if within or (isinstance(body, dict) and step in body):
            body = body[step]
            place.append(step)
    return (*place, fault["loc"][-1]) if fault["type"] == "missing" else tuple(place)
