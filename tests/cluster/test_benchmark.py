"""The runs of clusters in `make soak` fail where a claim does."""

from __future__ import annotations

import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.real_time

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "cluster.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script's own ``main``, whose measurements run on nothing."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "equal", "--count", "7"])
    names: dict[str, Any] = runpy.run_path(str(SCRIPT))["main"].__globals__
    names["machines"] = nullcontext
    return names


@pytest.mark.parametrize(("claims", "status"), [([], 0), ([True], 0), ([True, False, True], 1)])
def test_the_status_is_1_where_a_claim_does_not_hold(
    script: dict[str, Any], claims: list[bool], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(count: int) -> None:
        assert count == 7
        for holds in claims:
            script["claim"](holds, "something")

    script["COMMANDS"]["equal"] = (measure, 200)
    with pytest.raises(SystemExit) as ended:
        script["main"]()
    assert ended.value.code == status
    assert capsys.readouterr().out.count("FAILS: something") == claims.count(False)


def test_an_error_of_a_request_is_no_success(script: dict[str, Any]) -> None:
    async def measure(_: int) -> None:
        raise RuntimeError("lost")

    script["COMMANDS"]["equal"] = (measure, 200)
    with pytest.raises(RuntimeError, match="lost"):
        script["main"]()


def test_soak_runs_every_claim() -> None:
    makefile = (SCRIPT.parents[1] / "Makefile").read_text(encoding="utf-8")
    assert (
        "for what in equal kill zipf scale; do $(BIN)/python benchmarks/cluster.py $$what || exit 1; done" in makefile
    )
