"""Tools for the tests of any trio program: schedules that can be sampled, shrunk and replayed, virtual time, and faults
at every step of every task. The tools know nothing of engines, and import nothing else of Triolet.

`schedules` decides which task runs next, and `virtual` runs programs that use threads on virtual time. A `trial` is one
run of a program under a schedule and a fault, which its `disturber` makes happen; the run must keep the `promises`. The
`sweep` runs all trials, and `shrink` finds the shortest schedule that fails. Only `hooks` uses private parts of trio.
"""

from __future__ import annotations

from .faults import Fault, TrioFault
from .hooks import TrioChanged
from .promises import PROMISES, Broken
from .schedules import Batches, Deadlock, InTurn, Listed, Pct, Schedule, Uniform, run_scheduled, shrink
from .sweep import ProgramBroken, ProgramFailure, ProgramReport, check_program, replay_program, sweep_program
from .trial import Case, Subject, Trial
from .virtual import run_virtually

__all__ = [
    "PROMISES",
    "Batches",
    "Broken",
    "Case",
    "Deadlock",
    "Fault",
    "InTurn",
    "Listed",
    "Pct",
    "ProgramBroken",
    "ProgramFailure",
    "ProgramReport",
    "Schedule",
    "Subject",
    "Trial",
    "TrioChanged",
    "TrioFault",
    "Uniform",
    "check_program",
    "replay_program",
    "run_scheduled",
    "run_virtually",
    "shrink",
    "sweep_program",
]
