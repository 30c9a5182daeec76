"""Fixtures of the engine in simulation: a device, a trace, and settings that check every promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from triolet import EngineConfig
from triolet_testing.sim import SimExecutor

from .shared import Trace


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def executor() -> SimExecutor:
    return SimExecutor()


@pytest.fixture
def config(trace: Trace) -> Callable[..., EngineConfig]:
    return lambda **changes: EngineConfig(**{"observer": trace.append, "verify": True, **changes})
