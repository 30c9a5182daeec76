"""The kit for builders of other engines: clients and a device that the kit simulates play with a manager or scheduler,
through an adapter of a few lines, and every promise that it breaks is reported, the worst first, with the
shortest history and a regression test. Seeded, without files, and without Hypothesis.
"""

from __future__ import annotations

from .findings import BrokenPromise, Finding, Findings, Promise, Severity
from .paged_device import EOS
from .schedulers import Chunk, Item, Limits, NewRequest, Scheduler, SchedulerDeclaration, Step, examine_scheduler
from .steps import StepCache, StepDeclaration, examine_steps
from .wrong_adapter import WrongAdapter

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
