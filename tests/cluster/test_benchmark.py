"""What `make soak` runs of clusters fails where a claim does."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytestmark = pytest.mark.real_time

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster.py"


@pytest.fixture
def script() -> Any:
    """The benchmark as a module, whose measurements run on nothing."""
    spec = importlib.util.spec_from_file_location("benchmark_of_clusters", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.machines = nullcontext  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(("claims", "status"), [([], 0), ([True], 0), ([True, False, True], 1)])
def test_the_status_is_1_where_a_claim_does_not_hold(script: Any, claims: list[bool], status: int) -> None:
    async def measure(count: int) -> None:
        assert count == 7
        for holds in claims:
            script.claim(holds, "something")

    script.COMMANDS["equal"] = (measure, 200)
    result = CliRunner().invoke(script.main, ["equal", "--count", "7"])
    assert result.exit_code == status
    assert result.output.count("FAILS: something") == claims.count(False)


def test_an_error_of_a_request_is_no_success(script: Any) -> None:
    async def measure(_: int) -> None:
        raise RuntimeError("lost")

    script.COMMANDS["kill"] = (measure, 20)
    assert CliRunner().invoke(script.main, ["kill"]).exit_code == 1


def test_soak_runs_every_claim() -> None:
    makefile = (SCRIPT.parents[1] / "Makefile").read_text(encoding="utf-8")
    assert (
        "for what in equal kill zipf scale; do $(BIN)/python benchmarks/cluster.py $$what || exit 1; done" in makefile
    )
