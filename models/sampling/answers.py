"""`Asked`: what a step asks of its rows of logits, and how it is answered: by torch, or by the native library, which
gives the same answers and needs no other call. Logits that are not finite have no answer there, though a rule may ban
the very tokens that are broken; torch looks at what is left.
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
    """The rows of a step, in this order.

    Args:
        tokens: a token is sampled of each.
        beams: the rows of each search's beams, side by side.
        searches: whose they are.
        probes: rows, each with tokens whose log-probabilities are returned, as the model gives them. Some are rows of
            ``tokens``, the others lie after the beams'.
    """

    tokens: Sequence[SamplerInput]
    beams: Sequence[SamplerInput]
    searches: Sequence[Search]
    probes: Sequence[tuple[int, tuple[int, ...]]]

    def with_masks(self, masks: RuleMasks) -> Asked:
        """The same for torch."""
        tokens, beams = (
            [evolve(one, never=masks.mask(one.rules)) for one in inputs] for inputs in (self.tokens, self.beams)
        )
        return evolve(self, tokens=tokens, beams=beams)

    def beams_of(self, rows: Sequence[_T]) -> Iterator[tuple[Search, list[_T]]]:
        """Each search, and those of ``rows`` that are of its beams."""
        left = iter(rows)
        for search in self.searches:
            yield search, list(islice(left, len(search.state.beams)))


@frozen(kw_only=True, eq=False)
class Answers:
    """The answers to `Asked`: sampled tokens, the candidates of each search (none where its logits are broken or
    nothing is allowed), and log-probabilities."""

    tokens: list[SampledToken]
    candidates: list[list[Candidate]]
    probes: list[tuple[float, ...]]


def answer(logits: Tensor, asked: Asked, eos_token_ids: tuple[int, ...]) -> Answers:
    """Answers by torch, from ``logits`` (float32 [rows, vocabulary], written to)."""
    first, second = len(asked.tokens), len(asked.tokens) + len(asked.beams)
    probes = [tuple(logits[row].log_softmax(-1)[list(ids)].tolist()) for row, ids in asked.probes]
    tokens = sample_tokens(logits[:first], asked.tokens, eos_token_ids) if asked.tokens else []
    candidates = find_candidates(logits[first:second], asked, eos_token_ids) if asked.beams else []
    return Answers(tokens=tokens, candidates=candidates, probes=probes)


def find_candidates(logits: Tensor, asked: Asked, eos_token_ids: tuple[int, ...]) -> list[list[Candidate]]:
    """The candidates of each search, of the rows of all beams, which are written to. As in transformers the rules come
    after the softmax, and what they rule out is not shared out among the others."""
    logits.copy_(logits.log_softmax(-1))
    apply_rules(logits, asked.beams, eos_token_ids)
    totals = [beam.total for search in asked.searches for beam in search.state.beams]
    most = min(max(search.state.settings.candidates for search in asked.searches), logits.shape[-1])
    best = (logits + torch.tensor(totals, device=logits.device)[:, None]).topk(most)
    logprobs = logits.gather(-1, best.indices) - logits.logsumexp(-1, keepdim=True)
    rows = zip(best.indices.tolist(), best.values.tolist(), logprobs.tolist(), strict=True)
    found = [list(zip(*row, strict=True)) for row in rows]
    return [merge(own, search.state.settings.candidates) for search, own in asked.beams_of(found)]


def draws_of(asked: Asked, masks: RuleMasks, eos_token_ids: tuple[int, ...]) -> list[Draw]:
    """The same for the native library."""
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
    """The answers of the native library to `draws_of`."""
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
    """The choice that `sample_tokens` makes."""
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
    """Bias, then penalties, as `apply_rules` has them."""
    sampling = one.sampling
    for token, bias in sampling.logit_bias:
        yield token, Change.ADDED, bias
    if sampling.repetition_penalty != 1.0:
        for token in {*one.prompt, *one.generated}:
            yield token, Change.SCALED, sampling.repetition_penalty
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, count in Counter(one.generated).items():
            yield token, Change.ADDED, -(sampling.presence_penalty + sampling.frequency_penalty * count)
