"""`Asked`: the questions of a step about its rows of logits. Torch answers them, or the native library within the call
that computes the step. Both give the same answers, with one exception. If a logit is not finite, the native library
gives no answer for its row, while torch ignores logits of banned tokens.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from ...core.beams import Candidate
from ...core.plan import SampledToken
from ..native.draws import NONE, NOTHING, Chosen, Draw
from ..native.library import Change, Choice
from .beams import Search, merge
from .logits import RuleMasks, SamplerInput, apply_rules, banned_now, sample_tokens, timestamp_bans, told, uniform

_T = TypeVar("_T")


@frozen(kw_only=True, eq=False)
class Asked:
    """The rows of a step, in the order of the arguments, and what is asked about each.

    Args:
        tokens: rows from each of which one token is sampled.
        beams: rows of beams; the beams of one search are side by side.
        searches: the searches that the beams belong to, in the same order.
        probes: numbers of rows, each with tokens; the log-probabilities of these tokens are returned as the model
            gives them, without rules. A row is one of ``tokens`` or comes after all ``beams``.
    """

    tokens: Sequence[SamplerInput]
    beams: Sequence[SamplerInput]
    searches: Sequence[Search]
    probes: Sequence[tuple[int, tuple[int, ...]]]

    def with_masks(self, masks: RuleMasks) -> Asked:
        """Returns the same questions with the masks of banned tokens, which torch needs."""
        tokens, beams = (
            [evolve(one, never=masks.mask(one.rules)) for one in inputs] for inputs in (self.tokens, self.beams)
        )
        return evolve(self, tokens=tokens, beams=beams)

    def beams_of(self, rows: Sequence[_T]) -> Iterator[tuple[Search, list[_T]]]:
        """Yields each search with the items of ``rows`` that belong to its beams."""
        left = iter(rows)
        for search in self.searches:
            yield search, list(islice(left, len(search.state.beams)))


@frozen(kw_only=True, eq=False)
class Answers:
    """The answers to `Asked`: sampled tokens, the candidates of each search, and log-probabilities.

    A search has no candidates if its logits are broken or no token is allowed."""

    tokens: list[SampledToken]
    candidates: list[list[Candidate]]
    probes: list[tuple[float, ...]]


def answer(logits: Tensor, asked: Asked, eos_token_ids: tuple[int, ...]) -> Answers:
    """Answers with torch. ``logits`` (float32 [rows, vocabulary]) is overwritten."""
    first, second = len(asked.tokens), len(asked.tokens) + len(asked.beams)
    probes = [tuple(logits[row].log_softmax(-1)[list(ids)].tolist()) for row, ids in asked.probes]
    tokens = sample_tokens(logits[:first], asked.tokens, eos_token_ids) if asked.tokens else []
    candidates = find_candidates(logits[first:second], asked, eos_token_ids) if asked.beams else []
    return Answers(tokens=tokens, candidates=candidates, probes=probes)


def find_candidates(logits: Tensor, asked: Asked, eos_token_ids: tuple[int, ...]) -> list[list[Candidate]]:
    """Returns the candidates of each search. ``logits`` has the rows of all beams and is overwritten.

    As in transformers, the rules are applied after the softmax, so that the other tokens do not get the probability of
    banned tokens.
    """
    logits.copy_(logits.log_softmax(-1))
    apply_rules(logits, asked.beams, eos_token_ids)
    totals = [beam.total for search in asked.searches for beam in search.state.beams]
    most = min(max(search.state.settings.candidates for search in asked.searches), logits.shape[-1])
    best = (logits + torch.tensor(totals, dtype=logits.dtype, device=logits.device)[:, None]).topk(most)
    logprobs = logits.gather(-1, best.indices) - logits.logsumexp(-1, keepdim=True)
    rows = zip(best.indices.tolist(), best.values.tolist(), logprobs.tolist(), strict=True)
    found = [list(zip(*row, strict=True)) for row in rows]
    return [merge(own, search.state.settings.candidates) for search, own in asked.beams_of(found)]


def draws_of(asked: Asked, masks: RuleMasks, eos_token_ids: tuple[int, ...]) -> list[Draw]:
    """Returns the questions in ``asked`` as draws for the native library, one for each row."""
    draws = [draw_of(one, masks, eos_token_ids) for one in asked.tokens]
    for search, inputs in asked.beams_of(asked.beams):
        for beam, one in zip(search.state.beams, inputs, strict=True):
            draw = draw_of(one, masks, eos_token_ids)
            draws.append(evolve(draw, choice=Choice.BEAM, told=search.state.settings.candidates, total=beam.total))
    for row, ids in asked.probes:
        if row < len(draws):
            draws[row] = evolve(draws[row], asked=ids)
        else:
            draws.append(evolve(NOTHING, asked=ids))
    return draws


def answers_of(chosen: Sequence[Chosen], asked: Asked, eos_token_ids: tuple[int, ...]) -> Answers:
    """Returns the native library's answers to the draws of `draws_of`."""
    first, second = len(asked.tokens), len(asked.tokens) + len(asked.beams)
    tokens = []
    for one, found in zip(asked.tokens, chosen[:first], strict=True):
        top = tuple((token, logprob) for token, _, logprob in found.found if token != NONE)
        sampled = SampledToken(token_id=found.token, logprob=found.logprob, top=top)
        tokens.append(told(one, sampled, eos_token_ids, left=found.token != NONE))
    candidates = []
    for search, own in asked.beams_of(chosen[first:second]):
        rows = [[(token, score, logprob) for token, score, logprob in each.found if token != NONE] for each in own]
        candidates.append(merge(rows, search.state.settings.candidates))
    return Answers(tokens=tokens, candidates=candidates, probes=[chosen[row].asked for row, _ in asked.probes])


def draw_of(one: SamplerInput, masks: RuleMasks, eos_token_ids: tuple[int, ...]) -> Draw:
    """Returns the draw with which the native library makes the same choice as `sample_tokens`."""
    sampling, rules, count = one.sampling, one.rules, len(one.generated)
    warm = sampling.temperature > 0.0
    assert not warm or sampling.seed is not None, "a fresh seed is chosen when a request is built"
    draw = Draw(
        temperature=max(sampling.temperature, sys.float_info.min) if warm else 0.0,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        point=uniform(sampling.seed or 0, count) if warm else 0.0,
        told=sampling.logprobs or 0,
    )
    forced = [token for index, token in rules.forced if index == count]
    if forced:
        last = forced[-1]
        others = [(0, last), (last + 1, masks.vocabulary)]
        return evolve(draw, edits=[(last, Change.REPLACED, 0.0)], bans=others)
    bans: list[Sequence[int]] = [masks.bans(rules), *((token, token + 1) for token in banned_now(one, eos_token_ids))]
    if rules.timestamps is not None:
        bans += timestamp_bans(one.generated, rules.timestamps, eos_token_ids[0], masks.vocabulary)
    bits = None if one.guide is None else one.guide.allowed(one.generated)
    return evolve(
        draw,
        edits=list(_edits(one)),
        bans=bans,
        timestamps=0 if rules.timestamps is None else rules.timestamps.begin_id,
        allowed=None if bits is None else bits.tobytes(),
    )


def _edits(one: SamplerInput) -> Iterator[tuple[int, Change, float]]:
    """Yields the changes of bias, then those of penalties, in the order of `apply_rules`."""
    sampling = one.sampling
    for token, bias in sampling.logit_bias:
        yield token, Change.ADDED, bias
    if sampling.repetition_penalty != 1.0:
        for token in {*one.prompt, *one.generated}:
            yield token, Change.SCALED, sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(one.generated).items():
            yield token, Change.ADDED, -(sampling.presence_penalty + sampling.frequency_penalty * count)
