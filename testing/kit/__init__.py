"""The kit for builders of other engines: clients and a device that the kit simulates play with a manager or scheduler,
through an adapter of a few lines, and every promise that it breaks is reported, the worst first, with the
shortest history and a regression test. Seeded, without files, and without Hypothesis.

Each name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .findings import BrokenPromise, Finding, Findings, Promise, Severity
    from .paged_device import EOS
    from .schedulers import Chunk, Item, Limits, NewRequest, Scheduler, SchedulerDeclaration, Step, examine_scheduler
    from .steps import StepCache, StepDeclaration, examine_steps
    from .wrong_adapter import WrongAdapter

_HOMES = {
    ".findings": "BrokenPromise Finding Findings Promise Severity",
    ".paged_device": "EOS",
    ".schedulers": "Chunk Item Limits NewRequest Scheduler SchedulerDeclaration Step examine_scheduler",
    ".steps": "StepCache StepDeclaration examine_steps",
    ".wrong_adapter": "WrongAdapter",
}

__all__ = [
    "EOS",
    "BrokenPromise",
    "Chunk",
    "Finding",
    "Findings",
    "Item",
    "Limits",
    "NewRequest",
    "Promise",
    "Scheduler",
    "SchedulerDeclaration",
    "Severity",
    "Step",
    "StepCache",
    "StepDeclaration",
    "WrongAdapter",
    "examine_scheduler",
    "examine_steps",
]

_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
