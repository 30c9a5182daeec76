"""Beam search at work: a sequence's search between its steps, and the candidates that logits give it.

What is decided is in `triolet.core.beams`, which page holds which beam in `triolet.core.beam_pages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import torch
from attrs import define
from torch import Tensor

from ...core.beam_pages import BeamPages
from ...core.beams import BeamSearch, BeamSettings, Candidate
from ...core.plan import SampledToken, SequenceStart


@define(eq=False)
class Search:
    """One sequence's beam search."""

    prompt_length: int
    state: BeamSearch
    pages: BeamPages

    @classmethod
    def of(cls, start: SequenceStart, page_size: int) -> Self:
        """The search of a sequence that starts."""
        settings = BeamSettings.of(start.sampling, max_tokens=start.max_tokens, stops=start.stops)
        pages = BeamPages(page_size=page_size, shared=start.prompt_length // page_size, size=settings.size)
        return cls(start.prompt_length, BeamSearch(settings=settings), pages)

    def advance(self, candidates: Sequence[Candidate]) -> SampledToken:
        """Goes on with the ``candidates`` of a step. Returns the step's result, which is no token where there is no
        candidate (see `triolet.models.sampler.is_token`)."""
        if not candidates:
            return SampledToken(token_id=None, logprob=math.nan)
        self.state = self.state.advance(candidates)
        if self.state.done:
            return SampledToken(token_id=None, hypotheses=self.state.hypotheses)
        self.pages.go_on([beam.parent for beam in self.state.beams])
        return SampledToken(token_id=None)


def find_candidates(scores: Tensor, searches: Sequence[Search]) -> list[list[Candidate]]:
    """The candidates of each search, best first; none where a score is NaN or all tokens are ruled out.

    Args:
        scores: float32 [rows, vocabulary]: log-probabilities with the rules applied. One row for each beam of each
            search, in order.
    """
    totals = [beam.total for search in searches for beam in search.state.beams]
    most = min(max(search.state.settings.candidates for search in searches), scores.shape[-1])
    best = (scores + torch.tensor(totals, device=scores.device)[:, None]).topk(most)
    told = scores.gather(-1, best.indices) - scores.logsumexp(-1, keepdim=True)
    rows = list(zip(best.values.tolist(), best.indices.tolist(), told.tolist(), strict=True))
    found: list[list[Candidate]] = []
    first = 0
    for search in searches:
        count = len(search.state.beams)
        found.append(_merged(rows[first : first + count], search.state.settings.candidates))
        first += count
    return found


def _merged(rows: list[tuple[list[float], list[int], list[float]]], most: int) -> list[Candidate]:
    """The best of all beams' candidates. Of equal ones the first beam's comes first."""
    every = [
        Candidate(beam, token_id, total, logprob)
        for beam, row in enumerate(rows)
        for total, token_id, logprob in zip(*row, strict=True)
        if total != -math.inf
    ]
    if any(math.isnan(one.total) for one in every):
        return []
    return sorted(every, key=_total, reverse=True)[:most]


def _total(candidate: Candidate) -> float:
    return candidate.total
