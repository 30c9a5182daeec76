"""What may be asked of sampling, and what is told of the rest."""

from __future__ import annotations

import math

import pytest

from triolet import InvalidRequest, SamplingParams
from triolet.core.request import Structure


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"min_p": 1.5}, "0 .off. to 1"),
        ({"min_p": "a"}, "a number"),
        ({"repetition_penalty": 0.0}, "positive"),
        ({"repetition_penalty": math.inf}, "positive"),
        ({"repetition_penalty": math.nan}, "positive"),
        ({"presence_penalty": 2.1}, "-2 to 2"),
        ({"frequency_penalty": -3}, "-2 to 2"),
        ({"logit_bias": {1: math.inf}}, "finite"),
        ({"logit_bias": {"1": 2.0}}, "an integer"),
        ({"logit_bias": {1: "a"}}, "mapping"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "twice"),
        ({"logit_bias": 3}, "mapping"),
        ({"stop": ("a", "")}, "none of them empty"),
        ({"stop": ""}, "none of them empty"),
        ({"stop": 3}, "none of them empty"),
        ({"stop": (3,)}, "none of them empty"),
        ({"logprobs": 21}, "0 to 20"),
        ({"logprobs": -1}, "0 to 20"),
        ({"logprobs": True}, "an integer"),
        ({"n": 0}, "1 or more"),
        ({"n": 1.5}, "an integer"),
        ({"structure": "[0-9]"}, "Structure"),
        ({"structure": Structure.choice(["a"]), "ignore_eos": True}, "ignore_eos"),
        ({"structure": Structure.choice(["a"]), "min_tokens": 2}, "min_tokens"),
    ],
    ids=str,
)
def test_a_value_that_cannot_work_is_refused_with_what_is_allowed(wrong, told):
    with pytest.raises(InvalidRequest, match=told):
        SamplingParams(**wrong)


@pytest.mark.parametrize(("kind", "text"), [("xml", "a"), ("regex", ""), ("regex", "  "), ("regex", 3)])
def test_a_structure_has_a_known_kind_and_a_text(kind, text):
    with pytest.raises(InvalidRequest, match="allowed"):
        Structure(kind=kind, text=text)


def test_values_are_kept_so_that_equal_ones_are_equal_and_can_be_keys():
    one = SamplingParams(stop="end", logit_bias={5: 1.0, 2: -1}, structure=Structure.json_schema({"type": "null"}))
    two = SamplingParams(
        stop=["end"], logit_bias=[(5, 1.0), (2, -1)], structure=Structure.json_schema('{"type": "null"}')
    )
    assert one == two
    assert len({one, two}) == 1
    assert one.stop == ("end",)
    assert one.logit_bias == ((5, 1.0), (2, -1))


def test_siblings_have_seeds_of_their_own_that_never_change():
    params = SamplingParams(seed=7, n=4, temperature=1.0)
    siblings = [params.sibling(index) for index in range(4)]
    assert siblings[0] == SamplingParams(seed=7, temperature=1.0)
    assert {sibling.n for sibling in siblings} == {1}
    assert len({sibling.seed for sibling in siblings}) == 4
    assert siblings == [params.sibling(index) for index in range(4)]
    others = {SamplingParams(seed=seed, n=50).sibling(index).seed for seed in range(50) for index in range(50)}
    assert len(others) == 2_500
