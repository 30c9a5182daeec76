"""The tools of Triolet's own tests, for yours: a simulated device, deterministic simulation, fault sweeps, a trace
checker, a conformance kit for encoder caches and model adapters, tiny random checkpoints, and Hypothesis strategies.

Names that need Hypothesis (``pip install 'triolet[test]'``) are imported at their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..core.config import Speculation
from ..core.model import Kind
from ..core.request import Alignment, Pooling
from .adapters import ADAPTER_INVARIANTS, check_model_adapter
from .clients import SCENARIOS, Client, Scenario
from .families import FAMILIES, make_checkpoint
from .faults import Fault, FaultKind
from .schedule import Batches, Deadlock, Listed, Pct, Schedule, Uniform, run_scheduled
from .sim import SimExecutor, SimWorker, sim_engine
from .sim_model import SimModel, SimPreparer, expected_alignment, expected_tokens, expected_vector
from .simulation import Outcome, simulate
from .sweep import Failure, Report, sweep_all, sweep_scenario
from .tensors import live_bytes
from .trace import INVARIANTS, InvariantViolation, TraceChecker
from .trio_hooks import TrioChanged
from .virtual import run_virtually

if TYPE_CHECKING:
    from .cache_workloads import Ask, Encoded, Free, Release, Workload
    from .conformance import Answer, EncoderCache, check_encoder_cache, play
    from .strategies import image_requests, requests, scenarios, schedules, workloads

_CONFORMANCE = (
    "Answer",
    "Ask",
    "Encoded",
    "EncoderCache",
    "Failure",
    "Free",
    "Release",
    "Report",
    "Workload",
    "check_encoder_cache",
    "play",
)
_STRATEGIES = ("image_requests", "requests", "scenarios", "schedules", "workloads")

__all__ = [
    "ADAPTER_INVARIANTS",
    "FAMILIES",
    "INVARIANTS",
    "SCENARIOS",
    "Alignment",
    "Answer",
    "Ask",
    "Batches",
    "Client",
    "Deadlock",
    "Encoded",
    "EncoderCache",
    "Failure",
    "Fault",
    "FaultKind",
    "Free",
    "InvariantViolation",
    "Kind",
    "Listed",
    "Outcome",
    "Pct",
    "Pooling",
    "Release",
    "Report",
    "Scenario",
    "Schedule",
    "SimExecutor",
    "SimModel",
    "SimPreparer",
    "SimWorker",
    "Speculation",
    "TraceChecker",
    "TrioChanged",
    "Uniform",
    "Workload",
    "check_encoder_cache",
    "check_model_adapter",
    "expected_alignment",
    "expected_tokens",
    "expected_vector",
    "image_requests",
    "live_bytes",
    "make_checkpoint",
    "play",
    "requests",
    "run_scheduled",
    "run_virtually",
    "scenarios",
    "schedules",
    "sim_engine",
    "simulate",
    "sweep_all",
    "sweep_scenario",
    "workloads",
]


def __getattr__(name: str) -> Any:
    module = ".conformance" if name in _CONFORMANCE else ".strategies" if name in _STRATEGIES else None
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(module, __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ImportError(f"triolet.testing.{name} needs Hypothesis: pip install 'triolet[test]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
