"""The kit for builders of other engines. Simulated clients and a simulated device play with the engine's manager or
scheduler, through an adapter of a few lines. The kit reports every broken promise, the worst first, with its shortest
history and a regression test. The kit is seeded, reads and writes no files, and does not need Hypothesis.
"""

from __future__ import annotations

from .findings import BrokenPromise, Finding, Findings, Promise, Replay, Severity
from .paged_device import EOS
from .schedulers import (
    Chunk,
    Item,
    Limits,
    NewRequest,
    Scheduler,
    SchedulerDeclaration,
    SchedulerWorkload,
    Step,
    examine_scheduler,
    play_scheduler,
    replay_scheduler,
)
from .step_loop import StepLoop
from .steps import StepCache, StepDeclaration, StepWorkload, examine_steps, play_steps, replay_steps

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
    "Replay",
    "Scheduler",
    "SchedulerDeclaration",
    "SchedulerWorkload",
    "Severity",
    "Step",
    "StepCache",
    "StepDeclaration",
    "StepLoop",
    "StepWorkload",
    "examine_scheduler",
    "examine_steps",
    "play_scheduler",
    "play_steps",
    "replay_scheduler",
    "replay_steps",
]
