"""Tokens that the native library chooses are those that are chosen of its logits, by the same draws."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.core.errors import EngineError
from triolet.core.request import LogitRules, SamplingParams
from triolet.models.memory.rows import Rows
from triolet.models.native.library import Ending, Library
from triolet.models.native.panels import Panels
from triolet.models.native.program import Normed, Program
from triolet.models.native.runner import Runner
from triolet.models.sampler import draw_of
from triolet.models.sampling.logits import SamplerInput, choose, chosen_plainly

pytestmark = pytest.mark.skipif(Library.load() is None, reason="installed without a compiler")

VOCABULARY, HIDDEN, SCALE, MOST_ROWS = 1_997, 48, 1.5, 7


def table(dtype: torch.dtype | None) -> Panels:
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(1))
    return Panels.of(weight, dtype=dtype)


@contextmanager
def running(embedding: Panels, bias: torch.Tensor, *, threads: int = 2, level: int = 0) -> Iterator[Runner]:
    """Embeddings, their norm, and logits of it."""
    program, library = Program(), Library.load()
    assert library is not None
    hidden = program.buffer(HIDDEN)
    program.look_up(hidden, embedding, SCALE)
    last = program.buffer(HIDDEN)
    program.norm(hidden, last, Normed(gain=torch.ones(HIDDEN), epsilon=1e-5), wanted=True)
    head = Panels.of(torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2)) * 0.3, bias)
    program.linear(last, program.buffer(VOCABULARY), head, Ending.STORE, wanted=True)
    program.has_head = program.chooses = True
    runner = Runner.open(library, program, None, rows=MOST_ROWS, positions=99, threads=threads, level=level)
    try:
        yield runner
    finally:
        runner.release()


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 50, 5_000]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.9999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    seed=st.integers(0, 1 << 30),
)


@settings(max_examples=80)
@given(
    asked=st.lists(st.tuples(st.integers(0, VOCABULARY - 1), SAMPLINGS, st.integers(0, 9), st.booleans()), min_size=1),
    dtype=st.sampled_from([None, torch.float16, torch.bfloat16, torch.int8]),
    equal=st.booleans(),
    level=st.sampled_from([1, 3, 4]),
)
def test_tokens_are_those_of_the_sampler(
    asked: list[tuple[int, SamplingParams, int, bool]], dtype: torch.dtype | None, equal: bool, level: int
) -> None:
    """Many rows or one, also where tokens are equally likely; of rows without a draw the logits are told."""
    embedding, rows = table(dtype), Rows.all_of(len(asked))
    tokens = [token for token, *_ in asked]
    inputs = [
        SamplerInput(generated=[0] * length, sampling=sampling, rules=LogitRules(), never=None)
        for _, sampling, length, _ in asked
    ]
    draws = [draw_of(one) if drawn else None for one, (*_, drawn) in zip(inputs, asked, strict=True)]
    bias = torch.where(torch.arange(VOCABULARY) % 3 == 0, 40.0, 0.0) if equal else torch.zeros(VOCABULARY)
    with running(embedding, bias, level=level) as runner:
        found, logits = runner.choose(tokens, rows, draws)
        assert torch.equal(runner.step(embedding.rows(torch.tensor(tokens)) * SCALE, rows), logits)
    expected = zip(*choose(logits, inputs), strict=True)
    for one, draw, (token, logprob) in zip(found, draws, expected, strict=True):
        assert (one is None) == (draw is None)
        if one is not None:
            assert one[0] == token
            assert one[1] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_broken_has_no_log_probability(broken: float, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=1)
    one = SamplerInput(generated=(), sampling=sampling, rules=LogitRules(), never=None)
    bias = torch.zeros(VOCABULARY)
    bias[VOCABULARY - 1] = broken
    with running(table(None), bias) as runner:
        ((told,), _) = runner.choose([3], Rows.all_of(1), [draw_of(one)])
    assert told is not None
    assert math.isnan(told[1])


def test_a_token_that_is_none_is_refused() -> None:
    with running(table(None), torch.zeros(VOCABULARY)) as runner:
        for token in (-1, VOCABULARY):
            with pytest.raises(EngineError, match="token"):
                runner.choose([token], Rows.all_of(1), [None])


@pytest.mark.parametrize(
    ("sampling", "rules"),
    [
        ({"logit_bias": ((3, 1.0),)}, {}),
        ({"presence_penalty": 0.5}, {}),
        ({"frequency_penalty": 0.5}, {}),
        ({"repetition_penalty": 1.5}, {}),
        ({"logprobs": 2}, {}),
        ({"min_tokens": 2}, {}),
        ({"beam_size": 2}, {}),
        ({}, {"suppress": (3,)}),
        ({}, {"allowed": (3, 4)}),
        ({}, {"no_repeat_ngram": 3}),
        ({}, {"begin_suppress": (5,)}),
        ({}, {"forced": ((1, 4),)}),
    ],
)
def test_what_asks_for_more_is_chosen_of_logits(sampling: dict[str, object], rules: dict[str, object]) -> None:
    def plain(length: int, **changes: object) -> bool:
        settings = SamplingParams(**changes.get("sampling", {}))  # type: ignore[arg-type]
        ruled = LogitRules(**changes.get("rules", {}))  # type: ignore[arg-type]
        return chosen_plainly(SamplerInput(generated=[0] * length, sampling=settings, rules=ruled, never=None), (9,))

    assert plain(0)
    assert not plain(0, sampling=sampling, rules=rules)
