"""The messages to watchers, as values for JSON. Pure. Ids, times, counts and keys: no prompt, no text, no audio.

``state`` comes first: all requests and encoder outputs as they are. Then ``changes``, each with the time ``at`` which
it was, and ``figures`` some times a second. ``lost`` says how many changes a slow watcher did not get; another
``state`` follows it. ``end`` is the last: the server stops. Times are seconds of the server's clock, sizes are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ...actors.statistics import EngineStatistics
from ...api.engines import ModelStatistics
from ...core import errors
from ...core.log_lines import one_line
from ...core.model import Kind, ModelDescription
from ...core.overview import CacheEntry, Overview, RequestLine

Told: TypeAlias = dict[str, Any]

LONGEST_ID = 128  # characters


def compact(told: Mapping[str, Any]) -> str:
    """Returns ``told`` as JSON, without a space."""
    return json.dumps(told, ensure_ascii=False, separators=(",", ":"))


def request_told(model: str, line: RequestLine) -> Told:
    """A request that has come to a new stage, which may be its outcome."""
    told: Told = {"request": line.request_id[:LONGEST_ID], "model": model, "stage": line.stage}
    told |= {"at": _time(line.stage_at), "tokens": line.tokens}
    if line.error:
        told["error"] = public_error(line.error)
    return told


def entry_told(model: str, entry: CacheEntry) -> Told:
    """An encoder output that has come to a new state."""
    return {
        "entry": entry.key,
        "model": model,
        "state": entry.state,
        "at": _time(entry.state_at),
        "bytes": entry.size,
    }


def failure_told(model: str, text: str, now: float) -> Told:
    """Something failed that is no single request: a step, an encode batch, the runner. ``text`` is where and what."""
    where, _, error = text.partition(": ")
    return {"failure": f"{where}: {public_error(error)}", "model": model, "at": _time(now)}


def state_told(states: Mapping[str, Overview], began: int, now: float) -> Told:
    """The state of everything now. ``began`` tells one server from the next."""
    requests = [
        request_told(model, line) | {"since": _time(line.queued_at)}
        for model, state in states.items()
        for line in (*state.running.values(), *state.waiting.values())
    ]
    entries = [entry_told(model, entry) for model, state in states.items() for entry in state.entries()]
    return {"type": "state", "now": _time(now), "began": began, "requests": requests, "entries": entries}


def changes_told(changes: Iterable[Told], now: float) -> Told:
    """The changes since the last message."""
    return {"type": "changes", "now": _time(now), "changes": list(changes)}


def lost_told(count: int, now: float) -> Told:
    """The number of changes that were lost."""
    return {"type": "lost", "now": _time(now), "count": count}


def end_told(now: float) -> Told:
    """The end: the server stops."""
    return {"type": "end", "now": _time(now)}


# -- figures -----------------------------------------------------------------------------------------------------------


def figures_told(models: Mapping[str, Told], now: float) -> Told:
    """The figures of all models."""
    return {"type": "figures", "now": _time(now), "models": dict(models)}


def model_told(model: ModelStatistics, state: Overview) -> Told:
    """The figures of one model; ``model``: its statistics among those of several models."""
    told: Told = {
        "state": model.state.value,
        "users": model.users,
        "waiting": model.waiting,
        "bytes": model.bytes,
        "loads": model.loads,
        "error": None if model.last_error is None else kind_of(model.last_error),
        "ended": dict(state.ended),
        "failures": state.failures,
    }
    if model.description is not None:
        told["about"] = description_told(model.description)
        if model.engine is not None:
            told["engine"] = engine_told(model.engine, state, encodes=_encodes(model.description))
    return told


def engine_told(statistics: EngineStatistics, state: Overview, *, encodes: bool) -> Told:
    """The figures of one engine; ``encodes``: it has encoder outputs, and so a cache for them."""
    requests, cache = statistics.requests, statistics.encoder_cache
    return {
        "power": statistics.power.value,
        "running": requests.running + requests.leaving,
        "waiting": requests.waiting,
        "steps": requests.steps,
        "tokens": requests.tokens_committed,
        "fed": requests.tokens_fed,
        "preemptions": requests.preemptions,
        "pages": [requests.pages, requests.pages_free, requests.pages_cached],
        "slots": [requests.cross_slots, requests.cross_slots_used, requests.cross_slots_idle],
        "cache": {
            "capacity": cache.capacity if encodes else 0,
            "taken": cache.taken,
            "acquires": cache.acquires,
            "hits": cache.hits,
            "encoded": cache.encoded,
            "evicted": cache.evicted,
            "by_state": {name: count for name, count in state.bytes_in.items() if count},
        },
        "written": {line.request_id[:LONGEST_ID]: line.tokens for line in state.running.values() if line.tokens},
        "memory": {owner: count for owner, count in statistics.device.by_owner.items() if count},
    }


def description_told(description: ModelDescription) -> Told:
    """The description of a loaded model, and its abilities."""
    return {
        "architecture": description.architecture,
        "device": description.device,
        "dtype": description.dtype,
        "positions": description.max_positions,
        "page_size": description.page_size,
        "can": abilities(description),
    }


def _encodes(description: ModelDescription) -> bool:
    preparer = description.preparer
    return bool(description.encoder_bytes or (preparer is not None and preparer.media))


def abilities(description: ModelDescription) -> list[str]:
    """The abilities that the page knows: ``transcribe``, ``chat``, and for a chat ``image`` and ``audio``."""
    if description.whisper is not None:
        return ["transcribe"]
    preparer = description.preparer
    if description.kind is Kind.POOLING or preparer is None or not preparer.converses:
        return []
    return ["chat", *sorted(preparer.media & {"image", "audio"})]


# -- errors ---------------------------------------------------------------------------------------------------------


def public_error(error: str) -> str:
    """Type and text of a failure; the type alone where the text may quote what the caller sent, or name the server's
    files."""
    kind = kind_of(error)
    known = getattr(errors, kind, None)
    ours = isinstance(known, type) and issubclass(known, errors.EngineError)
    return one_line(error) if ours else kind


def kind_of(error: str) -> str:
    """The type of a failure. The text of an error of a load has paths of the server; `Server.use` hides it, too."""
    return error.partition(":")[0]


def _time(seconds: float) -> float:
    return round(seconds, 4)
