"""The tool that makes mistakes fails where tests notice few of them."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from .mutation import BOUND, Judge, Run, _judge_room, _order, function_of, mutants, plant


@pytest.mark.parametrize("room", ["core", "actors"])
def test_a_room_whose_mistakes_no_test_reaches_fails(room: str, tmp_path: Path) -> None:
    said: list[str] = []
    drawn = list(islice(mutants(room), 20))
    complaints = list(_judge_room(room, Run([], tmp_path, 1), [], drawn, lambda line, **_: said.append(line)))
    assert [complaint.split(",")[0] for complaint in complaints] == [
        "0.0 percent are noticed",
        "0.0 percent are reached",
    ]
    assert sum(line.startswith("is not reached") for line in said) > 10


def test_each_file_has_its_say_within_the_bound() -> None:
    """However many quick tests another file has."""
    quick = [Judge(place, "quick", 0.1, frozenset()) for place in range(1_000)]
    slow = [Judge(1_000 + place, "slow", 5.0, frozenset()) for place in range(9)]
    chosen = _order([*slow, *quick])
    assert [test.file for test in chosen[:6]] == ["quick"] * 3 + ["slow"] * 3
    assert sum(test.seconds for test in chosen) <= BOUND
    assert _order([Judge(0, "one", 2 * BOUND, frozenset())]), "one test is always tried"


def test_a_call_of_super_can_be_left_out() -> None:
    """The function's closure stays, as Python demands of another code."""
    mutant = next(one for one in mutants("core/errors.py") if "super()" in one.mistake)
    function = function_of(mutant)
    before = function.__code__
    try:
        plant(mutant)
        assert function.__code__.co_freevars == before.co_freevars == ("__class__",)
        assert function.__code__.co_code != before.co_code
    finally:
        function.__code__ = before
