"""Conversion of events to lines of JSON and back. An event log consists of such lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from attrs import NOTHING, asdict, fields_dict

from . import events
from .checks import shown
from .errors import InvalidRequest

_KINDS: Mapping[str, type[events.Event]] = {
    name: kind for name, kind in vars(events).items() if isinstance(kind, type) and issubclass(kind, events.Event)
}


def line_of(event: events.Event) -> str:
    """Returns the event as a JSON object: its name, its time in seconds (null if it has no time) and its fields."""
    values = asdict(event)
    time = values.pop("time")
    return json.dumps({"event": type(event).__name__, "time": None if math.isnan(time) else time, **values})


def event_of(line: str) -> events.Event:
    """Returns the event in ``line``.

    Raises:
        InvalidRequest: the line is not an event, or is one that this version does not know.
    """
    allowed = "allowed: lines that triolet.EventLog writes"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{shown(line.strip())} is not JSON ({error}); {allowed}") from error
    kind = _KINDS.get(str(values.pop("event", ""))) if isinstance(values, dict) else None
    if kind is None:
        raise InvalidRequest(f"{shown(line.strip())} is not an event of this version; {allowed}")
    known = fields_dict(kind)
    missing = [name for name, field in known.items() if field.default is NOTHING and name not in values]
    wrong = [name for name, value in values.items() if name not in known or not _fits(str(known[name].type), value)]
    if missing or wrong:
        named = ", ".join([*missing, *wrong])
        raise InvalidRequest(f"the event {kind.__name__} lacks {named}, or has a wrong type of value there; {allowed}")
    time = values.pop("time", None)
    told = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**told, time=math.nan if time is None else time)


def read_events(lines: Iterable[str]) -> Iterator[events.Event]:
    """Yields the events of one engine in ``lines``, in their order.

    Raises:
        InvalidRequest: a line is not an event, or its event is earlier than the one before it. The message has the
            line's number.
    """
    latest = -math.inf
    for number, line in enumerate(lines, 1):
        try:
            event = event_of(line)
        except InvalidRequest as error:
            raise InvalidRequest(f"line {number}: {error}") from error
        if event.time < latest:
            raise InvalidRequest(
                f"line {number} is earlier than the line before it: the log has events of several engines; give each "
                "engine a log of its own"
            )
        latest = max(latest, event.time)
        yield event


_JSON: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float, type(None)),  # a time, or null
    "bool": (bool,),
    "str": (str,),
    "tuple[str, ...]": (list,),
    "tuple[int, ...]": (list,),
}


def _fits(kind: str, value: Any) -> bool:
    """True if ``value`` has the type that a field of this ``kind`` has in JSON."""
    if type(value) is list and not all(type(one) is (int if "int" in kind else str) for one in value):
        return False
    return type(value) in _JSON[kind] and not (type(value) is float and not math.isfinite(value))
