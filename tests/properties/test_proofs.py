"""The models of ``proofs``, checked by Spin where it is installed; ``make proofs`` checks their larger worlds too."""

from __future__ import annotations

import re
import shutil

import pytest
from hypothesis import settings

from triolet.core.ledger_table import TRANSITIONS

from .proofs import check

pytestmark = pytest.mark.real_time  # Spin and its search are processes, which are waited for
with_spin = pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc")


def test_the_models_table_is_the_ledgers() -> None:
    assert check.table().count("-> s = ") == len(TRANSITIONS)
    assert "s == ready && c == release && h == 0 -> s = idle" in check.table()


@with_spin
@pytest.mark.parametrize("model", [pytest.param("ledger", marks=pytest.mark.thorough), "steps"])
def test_a_model_keeps_its_promises_in_every_state(model: str) -> None:
    """Of the smallest world; one formula of liveness, or all of them in a soak. The ledger itself goes through every
    state of small worlds in `test_exhaustive.py`."""
    formulas = check.FORMULAS[model] if settings.get_current_profile_name() == "soak" else check.FORMULAS[model][1:2]
    for search in check.explore(model, {}, formulas):
        assert search.states > 10_000
        assert not search.failed


@with_spin
@pytest.mark.parametrize("number", [0, -1])
@pytest.mark.parametrize("model", [pytest.param("ledger", marks=pytest.mark.thorough), "steps"])
def test_the_checker_finds_a_bug_in_a_model(model: str, number: int) -> None:
    """One of safety and one of liveness in each. ``make proofs`` plants all of them."""
    bug, formula, expected = check.BUGS[model][number]
    [search] = check.explore(model, {}, [formula], bug)
    assert search.failed.startswith(expected)


def test_every_assertion_and_every_formula_has_a_bug() -> None:
    """And every bug that a model can have is planted."""
    for model in check.FORMULAS:
        text = (check.HERE / f"{model}.pml").read_text(encoding="utf-8")
        planted = [bug for bug, _, _ in check.BUGS[model]]
        assert set(planted) == set(re.findall(r"BUG_\w+", text)) - {"BUG_"}
        assert {formula for _, formula, told in check.BUGS[model] if told == check.CYCLE} == set(check.FORMULAS[model])
        expected = {told for _, _, told in check.BUGS[model] if told != check.CYCLE}
        assertions = len(re.findall(r"\bassert\(", text)) + ("look_up" in text)
        assert len(expected) == assertions, f"{model}: {assertions} assertions"


@with_spin
def test_a_search_that_did_not_see_all_states_is_no_proof() -> None:
    with pytest.raises(RuntimeError, match="did not see all states"):
        list(check.explore("steps", {}, ["first"], depth=100))
