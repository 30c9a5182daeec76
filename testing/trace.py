"""`TraceChecker` and the names of its invariants, where tests look for them. The checker lives in core, because
``EngineConfig(verify=True)`` runs it in production too, where no code may need this package."""

from __future__ import annotations

from ..core.errors import InvariantViolation
from ..core.trace import INVARIANTS, TEARDOWN, TraceChecker

__all__ = ["INVARIANTS", "TEARDOWN", "InvariantViolation", "TraceChecker"]
