"""Turns pydantic's faults of a body into words, with the place of each fault.

If a member may be of several kinds, pydantic reports a fault for each kind, and its place contains the name of the
kind. Here a place is a path in the body. If one faulty place lies within another, only the inner one is reported. If
there are too many faults to look at, only their number is reported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

_MOST = 3
_LOOKED_AT = 1_000  # faults; pydantic lists all or none, and each costs a microsecond or more
LONGEST = 200  # characters of a place, which the client's names make
_LONGEST_WORDS = 1_000  # characters of a reason, which may quote the client
Place = tuple[str | int, ...]


def faults_of(error: ValidationError, body: object) -> dict[str, str]:
    """Returns the faults of ``body``, at least one. The key is the place in words; the value has the reasons, one for
    each kind that the member may be of."""
    if is_beyond_telling(error):
        return {"": f"it has {error.error_count():,} faults, too many to list; GET /openapi.json says what is allowed"}
    found: dict[Place, list[str]] = {}
    for fault in error.errors(include_url=False, include_input=False):
        said = found.setdefault(_place(fault, body), [])
        told = _words(fault)[:_LONGEST_WORDS]
        if told not in said:
            said.append(told)
    holders = {place[:length] for place in found for length in range(1, len(place))}
    innermost = {place: said for place, said in found.items() if place not in holders}
    return {".".join(map(str, place)): "; or ".join(said) for place, said in innermost.items()}


def is_beyond_telling(error: ValidationError) -> bool:
    """True if a body has so many faults that looking at each would hold up all other requests."""
    return error.error_count() > _LOOKED_AT


def in_words(faults: Mapping[str, str]) -> str:
    """Returns a text with the first of ``faults`` and the number of the others."""
    told = [f"{name[:LONGEST]}: {why}" if name else why for name, why in faults.items()]
    more = f" (and {len(told) - _MOST} more)" if len(told) > _MOST else ""
    return "; ".join(told[:_MOST]) + more


def _words(fault: Mapping[str, Any]) -> str:
    context = fault.get("ctx", {})
    match fault["type"]:
        case "missing":
            return "it is missing"
        case "extra_forbidden":
            return "there is no such member"
        case "union_tag_not_found":
            return "its type is missing"
        case "union_tag_invalid":
            return f"the type {context['tag']!r}; allowed: {context['expected_tags']}"
        case "too_short":
            return f"{context['actual_length']} items; allowed: {context['min_length']} or more"
    return str(fault["msg"]).removeprefix("Value error, ")


def _place(fault: Mapping[str, Any], body: Any) -> Place:
    """Returns the steps of pydantic's location that are keys or indexes in ``body``."""
    place = []
    for step in fault["loc"]:
        within = isinstance(step, int) and 0 <= step < len(body) if isinstance(body, list) else False
        if within or (isinstance(body, dict) and step in body):
            body = body[step]
            place.append(step)
    return (*place, fault["loc"][-1]) if fault["type"] == "missing" else tuple(place)
