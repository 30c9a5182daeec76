"""Fixtures for tests of `triolet.api`."""

from __future__ import annotations

import pytest

from .hosts import HOSTS, Bench


@pytest.fixture(params=HOSTS, ids=lambda host: host.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)
