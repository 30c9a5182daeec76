"""Draws: the distribution is right, transformers' warpers agree, and a draw is a pure function of (seed, position)."""

from __future__ import annotations

import math
import random

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    WhisperTimeStampLogitsProcessor,
)

from triolet.core.detokenizer import TokenBytes
from triolet.core.reasoning import Reasoning, Stage, Track
from triolet.core.request import LogitRules, SamplingParams, TimestampRules
from triolet.models.native.draws import Draw
from triolet.models.sampling import rules as ruling
from triolet.models.sampling.logits import _nucleus, change, sample
from triolet.models.sampling.rules import ConstantBans, SamplerInput, uniform
from triolet.models.sampling.structure import Guide

from .texts import sample_tokens

EOS = 10
RULES = TimestampRules(begin_id=14, no_timestamps_id=13, max_initial=5)
VOCABULARY = 24


def input_of(generated=(), sampling=None, rules=None, prompt=()):
    rules, sampling = rules or LogitRules(), sampling or SamplingParams()
    return SamplerInput(generated=list(generated), sampling=sampling, rules=rules, prompt=prompt)


def draw_of(*given, **more) -> Draw:
    return ruling.draw_of(input_of(*given, **more), ConstantBans(VOCABULARY), (EOS,))


class Pieces:
    """A tokenizer whose tokens are these texts."""

    texts = ("</think", ">", ">x", ">\n\n", ">\nx", "a</think>", "a</think>b", "nk>{", "</thi", "x>y", "<")

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.texts)}

    def decode(self, tokens: list[int], **_: object) -> str:
        return "".join(self.texts[token] for token in tokens)


@pytest.mark.parametrize(
    ("held", "banned"),
    [((), {"a</think>b"}), ((0,), {">x", ">\nx", "a</think>b"}), ((10, 8), {"nk>{", "a</think>b"})],
)
def test_no_token_is_the_end_of_reasoning_and_the_beginning_of_a_structure(held, banned) -> None:
    """Such a beginning would be no part of the structure."""
    marks = Reasoning("<think>", "</think>", stage=Stage.REASONS)
    following = {"guide": Guide(None), "track": Track.of(marks, TokenBytes(Pieces()))}
    made = ruling.draw_of(evolve(input_of(held), **following), ConstantBans(VOCABULARY), (EOS,))
    assert {Pieces.texts[token] for token, _ in made.bans if token != EOS} == banned
    assert (EOS, EOS + 1) in made.bans
    small = ruling.draw_of(evolve(input_of(held), **following), ConstantBans(4), (EOS,))
    told = {Pieces.texts[token] for token, _ in small.bans if token != EOS}
    assert told == banned & {*Pieces.texts[:4]}, "a tokenizer may have more tokens than the model"


def drawn(logits: torch.Tensor, sampling: SamplingParams, count: int) -> list[int]:
    """The tokens at the first ``count`` positions."""
    draw = draw_of(sampling=sampling)
    return [int(sample(logits, evolve(draw, point=uniform(sampling.seed, position)))) for position in range(count)]


def warped(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The distribution that transformers would draw from."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None])
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1.0:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    if sampling.min_p:
        scores = MinPLogitsWarper(sampling.min_p)(None, scores)
    return scores[0].softmax(-1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.9},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.15},
    ],
    ids=str,
)
def test_draws_follow_transformers_distribution(settings):
    """Chi-square of 4,000 draws against temperature, top-k and top-p as transformers warps them."""
    logits = torch.randn(16, generator=torch.Generator().manual_seed(1)) * 1.5
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 11, **settings})
    expected, count = warped(logits, sampling), 4_000
    counts = torch.zeros(16)
    for token in drawn(logits, sampling, count):
        counts[token] += 1
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token outside top-k or top-p was sampled"
    chi_square = ((counts - count * expected)[possible].square() / (count * expected[possible])).sum().item()
    freedom = int(possible.sum()) - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * max(freedom, 0)) + 1e-3


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_flat_and_steep_nuclei_over_a_large_vocabulary(spread):
    """Over 5,000 tokens, whether a thousand hold top-p or not, the nucleus is transformers' own."""
    logits = torch.randn(5_000, generator=torch.Generator().manual_seed(2)).double() * spread
    sampling = SamplingParams(temperature=1.0, top_p=0.8)
    expected = warped(logits, sampling)
    probabilities, tokens = _nucleus(logits.softmax(-1), 0.8)
    found = torch.zeros(5_000, dtype=torch.double).index_put((tokens,), probabilities)
    torch.testing.assert_close(found / found.sum(), expected)


def test_uniform_is_a_function_of_seed_and_position():
    """Equal arguments, equal numbers; others are spread evenly over [0, 1)."""
    assert uniform(3, 4) == uniform(3, 4)
    assert uniform(3, 4) != uniform(4, 3)
    numbers = [uniform(seed, position) for seed in range(-20, 20) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    tenths = [sum(index / 10 <= number < (index + 1) / 10 for number in numbers) for index in range(10)]
    assert all(abs(count - 400) < 80 for count in tenths)


@pytest.mark.parametrize("temperature", [1e-300, 1e-308, 5e-324])
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_a_minuscule_temperature_is_greedy(temperature, settings):
    """Nothing overflows: the likeliest token is sampled, and a suppressed one never."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(6))
    logits[[0, 49]] = -torch.inf
    sampling = SamplingParams(temperature=temperature, seed=1, **settings)
    assert set(drawn(logits, sampling, 20)) == {int(logits.argmax())}


def test_ties_beyond_top_k_stay_possible():
    """transformers keeps all tokens as likely as the k-th: so do we."""
    logits = torch.tensor([1.0, 2.0, 2.0, 0.0])
    sampling = SamplingParams(temperature=1.0, top_k=1, seed=1)
    assert set(drawn(logits, sampling, 50)) == {1, 2}


@pytest.mark.parametrize("seed", range(20))
def test_timestamp_rules_equal_transformers(seed):
    """Histories of text and timestamps, generated and random, meet the same masks, forced timestamps included."""
    chance = random.Random(seed)
    for length in range(9):
        history = [chance.choice([*range(EOS), *range(14, VOCABULARY)]) for _ in range(length)]
        logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed * 100 + length)) * 2
        logits[:, 14:] -= chance.choice([0.0, 2.0, 8.0])
        maximum = chance.choice([None, 0, 5, 40])
        generation = GenerationConfig(eos_token_id=EOS, no_timestamps_token_id=13, max_initial_timestamp_index=maximum)
        processor = WhisperTimeStampLogitsProcessor(generation, begin_index=2)
        expected = processor(torch.tensor([[11, 12, *history]]), logits)
        rules = LogitRules(timestamps=TimestampRules(begin_id=14, no_timestamps_id=13, max_initial=maximum))
        found = logits.clone()
        change(found, [draw_of(history, rules=rules)])
        assert torch.equal(found, expected), (history, maximum)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 7.0])
def test_the_repetition_penalty_is_transformers_own(penalty):
    """Of prompt and generated tokens, the same float32 numbers; a token that comes twice is penalised once."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 4
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[1, 2, 2, 9, 5, 5, 2]]), logits.clone())
    change(logits, [draw_of((5, 5, 2), SamplingParams(repetition_penalty=penalty), prompt=(1, 2, 9))])
    assert torch.equal(logits, expected)


def test_bias_penalty_and_suppression_follow_transformers_order():
    """A biased token is penalised by the sign it has then, and no bias brings a suppressed one back."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 2
    bias = {2: 5.0, 3: -5.0, 4: 100.0, 7: 0.25}
    history = torch.tensor([[2, 3, 4, 6]])
    expected = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])(history, logits.clone())
    expected = RepetitionPenaltyLogitsProcessor(1.7)(history, expected)
    expected = SuppressTokensLogitsProcessor([4, 8])(history, expected)
    sampling = SamplingParams(logit_bias=bias, repetition_penalty=1.7)
    change(logits, [draw_of((4, 6), sampling, LogitRules(suppress=(4, 8)), prompt=(2, 3))])
    assert torch.equal(logits, expected)


def test_presence_and_frequency_penalties_are_openais():
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, c counting the generated tokens alone."""
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(6))
    generated, expected = [3, 3, 3, 5, 9, 9], logits.clone()
    for token in range(VOCABULARY):
        count = generated.count(token)
        expected[0, token] += -count * 0.75 - float(count > 0) * -0.5
    sampling = SamplingParams(frequency_penalty=0.75, presence_penalty=-0.5)
    change(logits, [draw_of(generated, sampling, prompt=(1, 2, 3))])
    torch.testing.assert_close(logits, expected)


def test_the_likeliest_tokens_are_told_after_rules_and_before_the_temperature():
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(8))
    best = int(logits[0].argmax())
    inputs = [
        input_of(sampling=SamplingParams(logprobs=3, temperature=0.2, seed=1), rules=LogitRules(suppress=(best,))),
        input_of(),
        input_of(sampling=SamplingParams(logprobs=5), rules=LogitRules(allowed=(4, 6))),
    ]
    ruled = logits.clone()
    sampled = sample_tokens(ruled, inputs, (EOS,))
    assert sampled[1].top == ()
    for row, count in ((0, 3), (2, 2)):
        expected = ruled[row].log_softmax(-1).sort(descending=True)
        assert [token for token, _ in sampled[row].top] == expected.indices[:count].tolist()
        assert [value for _, value in sampled[row].top] == pytest.approx(expected.values[:count].tolist())
        told = dict(sampled[row].top)
        assert told.get(sampled[row].token_id, sampled[row].logprob) == pytest.approx(sampled[row].logprob, abs=1e-6)
    assert best not in dict(sampled[0].top)
    assert set(dict(sampled[2].top)) == {4, 6}


def test_a_batch_of_different_rules_equals_rows_alone():
    """Rules touch only their own rows."""
    draws = [
        draw_of(rules=LogitRules(suppress=(1, 2), begin_suppress=(3,))),
        draw_of((3, 4), SamplingParams(min_tokens=3, stop_token_ids=(7,))),
        draw_of((15, 15, 1), rules=LogitRules(timestamps=RULES)),
        draw_of(rules=LogitRules(allowed=(5, 6), suppress=(6,))),
        draw_of((15,), rules=LogitRules(timestamps=RULES, suppress=(1, 2))),
        draw_of((1, 1, 8), SamplingParams(repetition_penalty=1.5, frequency_penalty=0.3), prompt=(2, 9)),
        draw_of((1,), SamplingParams(presence_penalty=1.0, logit_bias={3: 2.0})),
    ]
    logits = torch.randn(7, VOCABULARY, generator=torch.Generator().manual_seed(0))
    together = logits.clone()
    change(together, draws)
    for row, draw in enumerate(draws):
        alone = logits[row : row + 1].clone()
        change(alone, [draw])
        assert torch.equal(together[row], alone[0])
    banned = [set(row.isinf().nonzero()[:, 0].tolist()) for row in together]
    assert banned[0] == {1, 2, 3}
    assert banned[1] == {7, EOS}
    assert set(range(VOCABULARY)) - banned[3] == {5}


@pytest.mark.parametrize(
    ("sampling", "rules"),
    [
        ({"min_tokens": 5, "stop_token_ids": (7,)}, LogitRules(suppress=(1, 2))),
        ({"logit_bias": {3: 2.0}}, LogitRules(begin_suppress=(3,), min_tokens=4)),
        ({"logprobs": 2}, LogitRules(forced=((0, 4), (3, 5)), begin_suppress=(6,))),
        ({"temperature": 0.7, "seed": 1}, LogitRules()),
        ({"presence_penalty": 1.0}, LogitRules()),
        ({"repetition_penalty": 1.5}, LogitRules()),
        ({}, LogitRules(timestamps=RULES)),
        ({}, LogitRules(no_repeat_ngram=2)),
    ],
)
def test_a_sequence_that_grows_has_the_draws_of_its_rules(sampling, rules):
    """What is kept from token to token leaves no rule out."""
    bans, tokens = ConstantBans(VOCABULARY), [4, 15, 15, 5, 4, 16, 16, 4]
    growing = input_of((), SamplingParams(**sampling), rules)
    for token in tokens:
        anew = input_of(growing.generated, growing.sampling, rules)
        anew.settled = math.inf
        assert ruling.draw_of(growing, bans, (EOS,)) == ruling.draw_of(anew, bans, (EOS,))
        growing.generated.append(token)


def test_constant_bans_are_kept_and_bounded():
    """Equal rules share one list; no more than ``capacity`` are kept."""
    bans = ConstantBans(VOCABULARY, capacity=2)
    first = bans.of(LogitRules(suppress=(1,)))
    assert bans.of(LogitRules(suppress=(1,), begin_suppress=(2,))) is first
    for token in (5, 6):
        bans.of(LogitRules(suppress=(token,)))
    assert bans.of(LogitRules(suppress=(1,))) is not first


@given(
    suppress=st.frozensets(st.integers(0, VOCABULARY - 1)),
    allowed=st.none() | st.frozensets(st.integers(0, VOCABULARY - 1)),
)
def test_tokens_that_are_suppressed_or_not_allowed_are_banned(suppress, allowed):
    rules = LogitRules(suppress=tuple(suppress), allowed=None if allowed is None else tuple(allowed))
    logits = torch.zeros(1, VOCABULARY)
    change(logits, [draw_of(rules=rules)])
    banned = suppress if allowed is None else suppress | set(range(VOCABULARY)) - allowed
    assert set(logits[0].isneginf().nonzero()[:, 0].tolist()) == banned
