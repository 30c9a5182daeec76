"""Settings that every test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Tiny models gain nothing from a second thread of torch, and on a busy machine the two wait for each other: set before
# anybody imports it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Same examples in every run: a red test is red for everybody. `make soak` looks for new ones.
settings.register_profile(
    "repeatable",
    derandomize=True,
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.register_profile(
    "soak", deadline=None, max_examples=20_000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What is imported by now stays. Set apart, it need not be looked at by every collection and every count of live
    tensors, which would otherwise take up most of the time of the tests of memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What engines remember of this machine is not the user's, and nothing of other runs is remembered."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What dies in the test dies by reference count."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
