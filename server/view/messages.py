"""The messages to watchers, as values for JSON. Pure. Messages have ids, times, counts and keys, but no prompt, text or
audio.

The first message is ``state``: all present requests and encoder outputs. Then ``changes`` and ``figures`` follow some
times a second; each change has its time, ``at``. ``lost`` has the number of changes that a slow watcher did not get,
and another ``state`` follows. ``end`` is the last message: the server stops. Times are seconds of the server's clock;
sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from ...actors.statistics import EngineStatistics
from ...api.engines import ModelStatistics
from ...core import errors
from ...core.log_lines import one_line
from ...core.model import Kind, ModelDescription
from ...core.overview import CacheEntry, Overview, RequestLine

Message: TypeAlias = dict[str, Any]

LONGEST_ID = 128  # characters


def message(kind: str, now: float, **members: Any) -> Message:
    """One message to a watcher."""
    return {"type": kind, "now": _time(now), **members}


def request_change(model: str, line: RequestLine) -> Message:
    """The change of a request that has reached a new stage. Its outcome counts as a stage, too."""
    return {
        "request": line.request_id[:LONGEST_ID],
        "model": model,
        "stage": line.stage,
        "at": _time(line.stage_at),
        "tokens": line.tokens,
        **({"error": public_error(line.error)} if line.error else {}),
    }


def entry_change(model: str, entry: CacheEntry) -> Message:
    """The change of an encoder output that has reached a new state."""
    return {
        "entry": entry.key,
        "model": model,
        "state": entry.state,
        "at": _time(entry.state_at),
        "bytes": entry.size,
    }


def failure_change(model: str, text: str, now: float) -> Message:
    """The change for a failure of more than a single request: of a step, an encode batch or the runner. ``text`` has
    the place and the error."""
    where, _, error = text.partition(": ")
    return {"failure": f"{where}: {public_error(error)}", "model": model, "at": _time(now)}


def state_message(states: Mapping[str, Overview], began: int, now: float) -> Message:
    """The present state of all models, and the last requests that have ended, ``recent``, with all their stages. A
    restarted server is recognised by ``began``, the time of its start."""
    lives = {model: (*state.running.values(), *state.waiting.values()) for model, state in states.items()}
    requests = [_life(model, line) for model, lines in lives.items() for line in lines]
    recent = [_life(model, line) for model, state in states.items() for line in state.recent]
    entries = [entry_change(model, entry) for model, state in states.items() for entry in state.entries()]
    return message("state", now, began=began, requests=requests, recent=recent, entries=entries)


def _life(model: str, line: RequestLine) -> Message:
    stages = [[stage, _time(at)] for stage, at in line.stages]
    return request_change(model, line) | {"stages": stages}


# -- figures -----------------------------------------------------------------------------------------------------------


def model_figures(
    model: ModelStatistics, state: Overview, ended: Mapping[str, int], foreseen: Collection[str] | None
) -> Message:
    """The figures of one model.

    Args:
        model: the statistics of the model.
        state: the state of its engine.
        ended: the number of clients' requests, by outcome.
        foreseen: the abilities of the model while it is not loaded; ``None``: nobody knows yet.
    """
    found: Message = {
        "state": model.state.value,
        "users": model.users,
        "waiting": model.waiting,
        "bytes": model.bytes,
        "loads": model.loads,
        "error": None if model.last_error is None else kind_of(model.last_error),
        "ended": dict(ended),
        "can": foreseen,
        "failures": state.failures,
    }
    if (about := model.description) is not None:
        found["about"] = {
            "architecture": about.architecture,
            "device": about.device,
            "dtype": about.dtype,
            "positions": about.max_positions,
            "page_size": about.page_size,
        }
        found["can"] = abilities(about)
        if model.engine is not None:
            reads_media = about.diarizer is not None or (about.preparer is not None and about.preparer.media)
            found["engine"] = engine_figures(model.engine, state, encodes=bool(about.encoder_bytes or reads_media))
    return found


def engine_figures(statistics: EngineStatistics, state: Overview, *, encodes: bool) -> Message:
    """The figures of one engine. ``encodes``: true if the engine has encoder outputs, and so a cache for them."""
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


def abilities(description: ModelDescription) -> list[str]:
    """The abilities that the page knows: ``transcribe``, with ``words`` if it gives their times, ``chat``, and for a
    chat ``image`` and ``audio``."""
    if description.speech is not None:
        return ["transcribe"] if description.speech.facts.word_times is None else ["transcribe", "words"]
    preparer = description.preparer
    if description.kind in {Kind.POOLING, Kind.ALIGNER} or preparer is None or not preparer.converses:
        return []
    return ["chat", *sorted(preparer.media & {"image", "audio"})]


# -- errors ---------------------------------------------------------------------------------------------------------


def public_error(error: str) -> str:
    """The type and the text of a failure; only the type if the text may quote the caller's request or name files of the
    server."""
    kind = kind_of(error)
    known = getattr(errors, kind, None)
    ours = isinstance(known, type) and issubclass(known, errors.EngineError)
    return one_line(error) if ours else kind


def kind_of(error: str) -> str:
    """The type of a failure. If loading fails, the text contains paths of the server, which `Server.use` hides, too."""
    return error.partition(":")[0]


def _time(seconds: float) -> float:
    return round(seconds, 4)
