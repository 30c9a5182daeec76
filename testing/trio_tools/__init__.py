"""Tools for the tests of any trio program: schedules that can be sampled, shrunk and replayed, virtual time, and faults
at every step of every task. They know nothing of engines, and import nothing of Triolet but themselves.

`schedules` says which task runs next, and `virtual` runs programs that use threads on virtual time. What is private to
trio is in `hooks` alone.
"""

from __future__ import annotations

from .hooks import TrioChanged
from .schedules import Batches, Deadlock, Listed, Pct, Schedule, Uniform, run_scheduled
from .virtual import run_virtually

__all__ = [
    "Batches",
    "Deadlock",
    "Listed",
    "Pct",
    "Schedule",
    "TrioChanged",
    "Uniform",
    "run_scheduled",
    "run_virtually",
]
