"""What may be asked of sampling, and what is told of the rest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from triolet import InvalidRequest, SamplingParams
from triolet.core.request import Pooling, Probe, Structure


class Unreadable:
    """Its text, its index and its number are broken."""

    def _broken(self) -> None:
        raise RuntimeError("broken")

    __repr__ = __index__ = __float__ = _broken


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"repetition_penalty": 0.0}, "0.001 or more"),
        ({"repetition_penalty": math.inf}, "up to 1000"),
        ({"presence_penalty": 2.1}, "-2 or more, up to 2"),
        ({"logit_bias": {1: math.inf}}, "finite"),
        ({"logit_bias": {"1": 2.0}}, "integers"),
        ({"logit_bias": {1: "a"}}, "mapping"),
        ({"logit_bias": ((1, 2.0), (1, 3.0))}, "twice"),
        ({"stop": ("a", "")}, "1 to 1024 characters"),
        ({"stop": 3}, "1 to 1024 characters"),
        ({"logprobs": 21}, "0 to 20"),
        ({"n": 0}, "1 to 1024"),
        ({"stop": ["a"] * 65}, "up to 64"),
        ({"stop": "a" * 1025}, "1 to 1024 characters"),
        ({"stop": b"end"}, "a text"),
        ({"stop": "\ud800"}, "a text"),
        ({"stop": itertools.repeat("a")}, "up to 64"),
        ({"stop_token_ids": 3}, r"stop_token_ids=3; allowed: a list of token ids .* \[2\]"),
        ({"stop_token_ids": "a"}, "token ids"),
        ({"stop_token_ids": [True]}, "token ids"),
        ({"stop_token_ids": [-1]}, "0 or more"),
        ({"stop_token_ids": np.array(3)}, "token ids"),
        ({"stop_token_ids": itertools.count()}, "token ids"),
        ({"logit_bias": {True: 1.0}}, "integers"),
        ({"logit_bias": {1: 1e30}}, "1,000,000"),
        ({"logit_bias": [(1, 2, 3)]}, "mapping"),
        ({"top_k": 10**30}, "0 to 2147483647"),
        ({"seed": 10**5000}, "seed=a int; allowed: an integer"),
        ({"seed": "random"}, "None: a fresh seed"),
        ({"temperature": np.float64("nan")}, "a number"),
        ({"temperature": Unreadable()}, "temperature=a Unreadable; allowed: a number"),
        ({"top_p": "1"}, "more than 0"),
        ({"max_tokens": -1}, "1 to"),
        ({"ignore_eos": "yes"}, "True or False"),
        ({"structure": {"type": "object"}}, r"Structure.json_schema"),
        ({"structure": Structure.choice(["a"]), "ignore_eos": True}, "ignore_eos"),
        ({"structure": Structure.choice(["a"]), "min_tokens": 2}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5; allowed: up to max_tokens=4"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_value_that_cannot_work_is_refused_with_what_is_allowed(wrong, told):
    with pytest.raises(InvalidRequest, match=told):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("xml", "a"), ("regex", ""), ("regex", "  "), ("regex", 3), ("regex", "\ud800"), (3, "a"), ([], "a")],
    ids=ascii,
)
def test_a_structure_has_a_known_kind_and_a_text(kind, text):
    with pytest.raises(InvalidRequest, match=r"allowed|surrogate"):
        Structure(kind=kind, text=text)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Structure.choice("yes"), "texts='yes'; allowed: a list of texts"),
        (lambda: Structure.choice(3), "a list of texts"),
        (lambda: Structure.choice([1]), "a list of texts"),
        (lambda: Structure.choice(["a", ""]), "none of them empty"),
        (lambda: Structure.choice(itertools.repeat("a")), "a list of texts"),
        (lambda: Structure.json_schema({"type": object()}), "cannot be written as JSON"),
        (lambda: Structure.json_schema({"a": itself()}), "cannot be written as JSON"),
        (lambda: Pooling(kind="sum"), "'mean', 'cls', 'last' or 'classify'"),
        (lambda: Pooling(kind=np.array(["mean", "cls"])), "Pooling.kind="),
        (lambda: Pooling(kind="mean", normalize="no"), "Pooling.normalize='no'; allowed: True or False"),
        (lambda: Pooling(kind="mean", second=-1), "Pooling.second=-1"),
        (lambda: Probe(position=-1, token_ids=(1,)), "Probe.position=-1"),
        (lambda: Probe(position=0, token_ids=1), "Probe.token_ids=1"),
    ],
)
def test_what_is_asked_beside_it_is_checked_too(make, told):
    with pytest.raises(InvalidRequest, match=told):
        make()


def itself() -> dict[str, object]:
    found: dict[str, object] = {}
    found["itself"] = found
    return found


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
