"""The promise of a structure, judged by another validator: each text that a schema's grammar allows follows the schema.

Until this property the promise rested on llguidance alone: whole numbers beyond 2**53 came out as others, a name with
an escape passed as an additional property, and February 29 came in any year.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from triolet.core.errors import InvalidRequest
from triolet.core.request import Structure
from triolet.models.sampling.structure import Grammars, Guide

from .conftest import Ids, make_tokenizer
from .schemas import bits, exact_json, judge, schemas, walk

IDS = Ids()


def texts(schema: str, count: int) -> Iterator[str]:
    """Random texts that the schema's grammar allows, whole ones alone.

    Raises:
        InvalidRequest: the schema cannot be followed.
    """
    grammars = Grammars(make_tokenizer, IDS.vocabulary, (IDS.eos,))
    compiled = grammars.compile(Structure.json_schema(schema))
    for seed in range(count):
        guide = Guide(compiled.matcher)

        def allowed(tokens: list[int], guide: Guide = guide) -> set[int] | None:
            mask = guide.allowed(tokens)
            return None if mask is None else bits(mask.tobytes())

        if (found := walk(allowed, {IDS.eos}, seed)) is not None:
            yield bytes(found).decode()


def wrong(schema: str, count: int, seen: Counter[str]) -> list[str]:
    """The faults of some texts of a schema's grammar; empty if the schema is refused."""
    try:
        found = list(texts(schema, count))
    except InvalidRequest:
        seen["refused"] += 1
        return []
    seen["accepted"] += 1
    seen["texts"] += len(found)
    checked = judge(exact_json(schema))
    return [f"{text!r}: {error.message}" for text in found for error in checked.iter_errors(exact_json(text))]


def test_each_text_that_a_grammar_allows_follows_its_schema():
    seen = Counter[str]()

    @settings(max_examples=100, phases=[Phase.explicit, Phase.generate])
    @given(schemas())
    def follow(schema: Any) -> None:
        assert not wrong(json.dumps(schema), 4, seen)

    follow()
    assert seen["accepted"] >= 30
    assert seen["texts"] >= 100


@pytest.mark.thorough
@settings(max_examples=5_000, suppress_health_check=list(HealthCheck))
@given(schemas())
def test_5_000_schemas_are_followed_or_refused(schema):
    assert not wrong(json.dumps(schema), 8, Counter())
