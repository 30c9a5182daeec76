"""What Triolet's own tests are made of, for yours: a simulated device, deterministic simulation, fault sweeps, a trace
checker, a conformance kit for encoder caches and model adapters, and Hypothesis strategies.

What needs Hypothesis is imported when it is asked for: ``pip install 'triolet[test]'``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .schedule import Batches, Deadlock, Listed, Pct, Schedule, Uniform, run_scheduled
from .sim import SimExecutor, SimModel, SimWorker, expected_tokens, sim_engine
from .simulation import SCENARIOS, Client, Fault, FaultKind, Outcome, Scenario, simulate
from .sweep import sweep_all, sweep_scenario
from .trace import INVARIANTS, InvariantViolation, TraceChecker

if TYPE_CHECKING:
    from .conformance import check_encoder_cache
    from .strategies import schedules

_WITH_HYPOTHESIS = {"check_encoder_cache": "conformance", "schedules": "strategies"}

__all__ = [
    "INVARIANTS",
    "SCENARIOS",
    "Batches",
    "Client",
    "Deadlock",
    "Fault",
    "FaultKind",
    "InvariantViolation",
    "Listed",
    "Outcome",
    "Pct",
    "Scenario",
    "Schedule",
    "SimExecutor",
    "SimModel",
    "SimWorker",
    "TraceChecker",
    "Uniform",
    "check_encoder_cache",
    "expected_tokens",
    "run_scheduled",
    "schedules",
    "sim_engine",
    "simulate",
    "sweep_all",
    "sweep_scenario",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_HYPOTHESIS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_HYPOTHESIS[name]}", __name__), name)
