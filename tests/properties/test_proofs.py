"""The models of ``proofs/``, checked by Spin where it is installed; ``make proofs`` checks their larger worlds too."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

from triolet.core.ledger_table import TRANSITIONS

CHECK = Path(__file__).resolve().parents[2] / "proofs" / "check.py"
with_spin = pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc")


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_models_table_is_the_ledgers(check: ModuleType) -> None:
    assert check.table().count("-> s = ") == len(TRANSITIONS)
    assert "s == ready && c == release && h == 0 -> s = idle" in check.table()


@with_spin
@pytest.mark.parametrize("model", ["ledger", "steps"])
def test_a_model_keeps_its_promises_in_every_state(check: ModuleType, model: str) -> None:
    """Of the smallest world; one formula of liveness, or all of them in a soak."""
    formulas = check.FORMULAS[model] if settings.get_current_profile_name() == "soak" else check.FORMULAS[model][1:2]
    for _, states, errors in check.explore(model, {}, formulas):
        assert states > 10_000
        assert not errors


@with_spin
@pytest.mark.parametrize(("model", "bug"), [("ledger", "BUG_HITS_OVERTAKE"), ("steps", "BUG_PHANTOM")])
def test_the_checker_finds_a_bug_in_a_model(check: ModuleType, model: str, bug: str) -> None:
    """One of each kind: a promise of liveness, a promise of safety. ``make proofs`` plants all of them."""
    [(_, _, errors)] = check.explore(model, {}, [check.BUGS[model][bug]], bug)
    assert errors
