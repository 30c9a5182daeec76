"""The parts that `Engine` and `SyncEngine` are made of, and the table that a notebook shows for them."""

from __future__ import annotations

import math
from collections.abc import Callable

from attrs import fields_dict

from ..actors.statistics import EngineStatistics
from ..actors.supervisor import Supervisor
from ..actors.worker import Worker
from ..core.checks import number, unknown_name
from ..core.config import EngineConfig
from ..core.errors import EngineStateError, InvalidRequest
from ..core.executor import Executor

DRAIN = number(0, math.inf, "; 0 aborts at once")
"""The check of the seconds that running requests have to end."""


def shown(engine: object, statistics: Callable[[], EngineStatistics]) -> str | None:
    """Returns the table that a notebook shows for an engine; ``None``: the engine has no statistics now, and the
    notebook shows its repr."""
    try:
        return statistics().table(repr(engine))
    except EngineStateError:
        return None


def unknown_keyword(name: str, owner: str) -> InvalidRequest:
    """Returns the error for a keyword that ``owner``, such as `Engine`, does not have. If `EngineConfig` has a setting
    of this name, the error says so."""
    settings = {setting: f"config=EngineConfig({setting}=...)" for setting in fields_dict(EngineConfig)}
    return unknown_name(name, ("model", "config"), settings, owner=owner)


def settings_of(config: object) -> EngineConfig:
    """Returns ``config``, or the default settings. Raises `InvalidRequest` for an object of another type."""
    if config is None:
        return EngineConfig()
    if not isinstance(config, EngineConfig):
        raise InvalidRequest(f"config={config!r}; allowed: EngineConfig(...), or no config")
    return config


def supervisor(
    config: EngineConfig, make_executor: Callable[[], Executor], make_worker: Callable[[], Worker]
) -> Supervisor:
    """Returns the supervisor of an engine."""
    return Supervisor(config, make_executor, make_worker())


def free_memory() -> int | None:
    """Returns the bytes that the process can allocate without swapping, in its cgroups; ``None``: nobody says."""
    from ..models.machine.host import available_memory, read_file

    return available_memory(read_file)
