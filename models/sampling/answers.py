"""`Asked`: the questions of a step about its rows of logits. Each row gets a `Draw`, which the native library answers
within the call that computes the step, or torch (`logits.choose`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeVar

from attrs import evolve, frozen

from ...core.beams import Candidate
from ...core.plan import SampledToken
from ..native.draws import NONE, NOTHING, Chosen, Draw
from ..native.library import Choice
from .beams import Search, merge
from .rules import ConstantBans, SamplerInput, draw_of

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


def draws_of(asked: Asked, constant: ConstantBans, eos_token_ids: tuple[int, ...]) -> list[Draw]:
    """Returns the questions in ``asked`` as draws, one for each row."""
    draws = [draw_of(one, constant, eos_token_ids) for one in asked.tokens]
    for search, inputs in asked.beams_of(asked.beams):
        for beam, one in zip(search.state.beams, inputs, strict=True):
            draw = draw_of(one, constant, eos_token_ids)
            draws.append(evolve(draw, choice=Choice.BEAM, told=search.state.settings.candidates, total=beam.total))
    for row, ids in asked.probes:
        if row < len(draws):
            draws[row] = evolve(draws[row], asked=ids)
        else:
            draws.append(evolve(NOTHING, asked=ids))
    return draws


def answers_of(chosen: Sequence[Chosen], asked: Asked, eos_token_ids: tuple[int, ...]) -> Answers:
    """Returns the answers to ``asked``, which was given as the draws of `draws_of`."""
    first, second = len(asked.tokens), len(asked.tokens) + len(asked.beams)
    tokens = []
    for one, found in zip(asked.tokens, chosen[:first], strict=True):
        top = tuple((token, logprob) for token, _, logprob in found.found if token != NONE)
        sampled = SampledToken(token_id=found.token, logprob=found.logprob, top=top)
        tokens.append(_told(one, sampled, eos_token_ids, left=found.token != NONE))
    candidates = []
    for search, own in asked.beams_of(chosen[first:second]):
        rows = [[(token, score, logprob) for token, score, logprob in each.found if token != NONE] for each in own]
        candidates.append(merge(rows, search.state.settings.candidates))
    return Answers(tokens=tokens, candidates=candidates, probes=[chosen[row].asked for row, _ in asked.probes])


def _told(one: SamplerInput, sampled: SampledToken, eos_token_ids: tuple[int, ...], *, left: bool) -> SampledToken:
    """Returns ``sampled``; if the structure has an error, with that error and an end-of-text token in place of the
    sampled one. A model without an end-of-text token keeps the sampled one.

    Args:
        left: true if structure and rules allow at least one token, as far as the logits show.
    """
    guide = one.guide
    if guide is None:
        return sampled
    nothing = "the structure leaves no token that the model may sample; ask for another one"
    error = guide.error or ("" if left else nothing)  # the guide does not keep it: perhaps a draft token led here
    return SampledToken(token_id=(*eos_token_ids, sampled.token_id)[0], error=error) if error else sampled
