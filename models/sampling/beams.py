"""Beam search at work: a sequence's search between its steps, and the best candidates of its beams.

`triolet.core.beams` decides how a search goes on, and `triolet.core.beam_pages` which beam is in which page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from operator import attrgetter
from typing import Self

from attrs import define

from ...core.beam_pages import BeamPages
from ...core.beams import BeamSearch, BeamSettings, Candidate
from ...core.plan import SampledToken, SequenceStart
from ...core.reasoning import Track
from ...core.recurrent import BeamStates


@define(eq=False)
class Search:
    """One sequence's beam search."""

    prompt_length: int
    state: BeamSearch
    pages: BeamPages
    states: BeamStates
    tracks: list[Track | None]  # of the beams, through the marks of their reasoning

    @classmethod
    def of(cls, start: SequenceStart, page_size: int, track: Track | None = None) -> Self:
        """Returns the search for a sequence that starts."""
        settings = BeamSettings(sampling=start.sampling, max_tokens=start.max_tokens, stops=start.stops)
        pages = BeamPages(page_size=page_size, shared=start.prompt_length // page_size, size=settings.size)
        return cls(start.prompt_length, BeamSearch(settings=settings), pages, BeamStates(settings.size), [track])

    def advance(self, candidates: Sequence[Candidate]) -> SampledToken:
        """Continues the search with the ``candidates`` of a step, and returns the result of the step.

        Without candidates the result counts as no token (its log-probability is NaN)."""
        if not candidates:
            return SampledToken(token_id=None, logprob=math.nan)
        self.state = self.state.advance(candidates)
        if self.state.done:
            return SampledToken(token_id=None, hypotheses=self.state.hypotheses)
        parents = [beam.parent for beam in self.state.beams]
        self.pages.go_on(parents)
        self.states.go_on(parents)
        self.tracks = [copy(self.tracks[beam.parent]) for beam in self.state.beams]
        return SampledToken(token_id=None)


def merge(found: Sequence[Sequence[tuple[int, float, float]]], most: int) -> list[Candidate]:
    """Returns the ``most`` best candidates of one search, best first. Equal candidates are in the order of their beams.
    The list is empty if any score is NaN.

    Args:
        found: for each beam, its tokens, each with its score and its log-probability.
    """
    every = [
        Candidate(beam, token, score, logprob)
        for beam, told in enumerate(found)
        for token, score, logprob in told
        if score != -math.inf
    ]
    if any(math.isnan(one.total) for one in every):
        return []
    return sorted(every, key=attrgetter("total"), reverse=True)[:most]
