"""The callers' objects among the options of a transcription, which the engine's loop calls: aligner and diarizer."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from attrs import evolve

from ...core.errors import InvalidRequest
from .options import TranscribeOptions

_METHODS = {"aligner": "align", "diarizer": "diarize"}


async def _ask(ask: Callable[..., Awaitable[Any]], function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return await ask(partial(function, *given, **named))


def reachable(
    options: TranscribeOptions, *, awaits: bool, ask: Callable[..., Awaitable[Any]] | None = None
) -> TranscribeOptions:
    """Returns ``options`` with an aligner and a diarizer that the engine's loop can call. ``ask`` calls a function on
    the callers' side; ``None``: the engine's loop is the callers'.

    Raises:
        InvalidRequest: a method is async and should be plain, or the other way round, as ``awaits`` says.
    """
    for name, method in _METHODS.items():
        given = getattr(options, name)
        function = getattr(given, method, None)  # None: there is no such object, or it is a list of turns
        if function is None:
            continue
        if inspect.iscoroutinefunction(function) is not awaits:
            kind = "an Engine, or an object with an async" if awaits else "a SyncEngine, or an object with a plain"
            raise InvalidRequest(f"{name}={given!r:.200}; allowed here: {kind} method {method}")
        if ask is not None:
            changes: dict[str, Any] = {name: SimpleNamespace(**{method: partial(_ask, ask, function)})}
            options = evolve(options, **changes)
    return options
