"""The tools of Triolet's own tests, for yours: a simulated device, deterministic simulation, fault sweeps, a trace
checker, a conformance kit for model adapters, and Hypothesis strategies.

The tools for any trio program are in `triolet_testing.trio_tools`. Those for other engines are `triolet-kit`, a
distribution of its own.
Each name is imported at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triolet.core.config import Speculation
    from triolet.core.errors import InvariantViolation
    from triolet.core.model import Kind
    from triolet.core.request import Alignment, Pooling
    from triolet.core.trace import INVARIANTS, TraceChecker

    from .adapters import ADAPTER_INVARIANTS, check_model_adapter
    from .clients import SCENARIOS, Client, Scenario
    from .faults import Fault, FaultKind
    from .sim import SimExecutor, SimWorker, sim_engine
    from .sim_model import SimModel, SimPreparer, expected_alignment, expected_tokens, expected_vector
    from .simulation import Outcome, simulate
    from .strategies import image_requests, requests, scenarios, schedules
    from .sweep import Failure, Report, sweep_all, sweep_scenario
    from .tensors import live_bytes

_HOMES = {
    "triolet.core.config": "Speculation",
    "triolet.core.errors": "InvariantViolation",
    "triolet.core.model": "Kind",
    "triolet.core.request": "Alignment Pooling",
    "triolet.core.trace": "INVARIANTS TraceChecker",
    ".adapters": "ADAPTER_INVARIANTS check_model_adapter",
    ".clients": "SCENARIOS Client Scenario",
    ".faults": "Fault FaultKind",
    ".sim": "SimExecutor SimWorker sim_engine",
    ".sim_model": "SimModel SimPreparer expected_alignment expected_tokens expected_vector",
    ".simulation": "Outcome simulate",
    ".strategies": "image_requests requests scenarios schedules",
    ".sweep": "Failure Report sweep_all sweep_scenario",
    ".tensors": "live_bytes",
}
"""The module of each name. A module is imported when one of its names is first used, so that no other module is
needed."""

__all__ = [
    "ADAPTER_INVARIANTS",
    "INVARIANTS",
    "SCENARIOS",
    "Alignment",
    "Client",
    "Failure",
    "Fault",
    "FaultKind",
    "InvariantViolation",
    "Kind",
    "Outcome",
    "Pooling",
    "Report",
    "Scenario",
    "SimExecutor",
    "SimModel",
    "SimPreparer",
    "SimWorker",
    "Speculation",
    "TraceChecker",
    "check_model_adapter",
    "expected_alignment",
    "expected_tokens",
    "expected_vector",
    "image_requests",
    "live_bytes",
    "requests",
    "scenarios",
    "schedules",
    "sim_engine",
    "simulate",
    "sweep_all",
    "sweep_scenario",
]


_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
