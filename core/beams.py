"""Beam search, pure: which continuations go on as beams, which end as hypotheses, and when the search is over.

The decisions are those of transformers' `generate(num_beams=...)`; ``patience`` is that of Kasai et al. 2022, "A Call
for Clarity in Beam Search", section 3. One step of a search::

    beams, best first         candidates, best first            hypotheses
    [a b]    -1.2             [a b] + c      -1.5  goes on
    [a d]    -1.9        ->   [a d] + end    -2.0  ends    ->   [a d end]    -2.0 / 3 ** length_penalty
                              [a b] + e      -2.4  goes on
                              [a d] + f      -2.9  not needed

Who computes the candidates is `triolet.models.sampling.beams`; where the beams' KV lies is `triolet.core.beam_pages`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

from attrs import evolve, frozen

from .plan import Hypothesis
from .request import SamplingParams


@frozen(kw_only=True)
class BeamSettings:
    """The settings of a search.

    Args:
        size: most beams.
        length_penalty: a hypothesis' score is its sum of log-probabilities over ``length ** length_penalty``; the end
            token counts in the length, the prompt does not.
        kept: most hypotheses.
        early: the search is over with ``kept`` hypotheses. Otherwise it is over when, beside that, none of them would
            be replaced by the best beam if that ended now.
        max_tokens: beams of this length end.
        stops: tokens that end a beam.
    """

    size: int
    length_penalty: float
    kept: int
    early: bool
    max_tokens: int
    stops: frozenset[int]

    @classmethod
    def of(cls, sampling: SamplingParams, *, max_tokens: int, stops: frozenset[int]) -> Self:
        """The settings of a request."""
        return cls(
            size=sampling.beam_size,
            length_penalty=sampling.length_penalty,
            kept=sampling.most_hypotheses,
            early=sampling.patience is not None,
            max_tokens=max_tokens,
            stops=stops,
        )

    @property
    def candidates(self) -> int:
        """The number of candidates that a step needs: so many that ``size`` of them go on even where each beam's
        likeliest tokens are all those that end it."""
        return max(2, 1 + len(self.stops)) * self.size

    def score(self, total: float, length: int) -> float:
        """The score of ``length`` tokens whose log-probabilities add up to ``total``."""
        return total / math.pow(length, self.length_penalty)


@frozen
class Candidate:
    """Beam ``beam`` with one more token. ``total`` is the sum of the log-probabilities that the search goes by, this
    token's included; ``logprob`` is this token's as callers get it."""

    beam: int
    token_id: int
    total: float
    logprob: float


@frozen
class Beam:
    """A beam: its tokens after the prompt, their log-probabilities, and ``total`` as in `Candidate`. ``parent`` is the
    index, among the beams of the step before, of the one that it continues."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    parent: int = 0

    def grown(self, candidate: Candidate) -> Beam:
        """The beam that ``candidate`` makes of this one."""
        return Beam(
            (*self.token_ids, candidate.token_id),
            (*self.logprobs, candidate.logprob),
            candidate.total,
            candidate.beam,
        )


@frozen(kw_only=True)
class BeamSearch:
    """A search between two steps. It begins with one beam, the prompt. ``hypotheses`` are those found, best first.
    ``beams``, best first, all have one length; a search that is ``done`` has none."""

    settings: BeamSettings
    beams: tuple[Beam, ...] = (Beam(),)
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def done(self) -> bool:
        """True if ``hypotheses`` are the answer."""
        return not self.beams

    @property
    def length(self) -> int:
        """The number of tokens of each beam."""
        assert self.beams, "a search that is done has no beams"
        return len(self.beams[0].token_ids)

    def advance(self, candidates: Sequence[Candidate]) -> BeamSearch:
        """The search after one more step.

        Args:
            candidates: the best continuations of all beams together, the best first: `BeamSettings.candidates` of
                them, or as many as there are, but at least one.
        """
        assert candidates, "a search goes on from at least one candidate"
        settings, length = self.settings, self.length + 1
        going_on: list[Beam] = []
        found = list(self.hypotheses)
        for place, candidate in enumerate(candidates[: settings.candidates]):
            ends = length >= settings.max_tokens or candidate.token_id in settings.stops
            beam = self.beams[candidate.beam].grown(candidate)
            if ends and place < settings.size:  # later candidates are there in the place of beams that end
                found.append(Hypothesis(beam.token_ids, beam.logprobs, settings.score(beam.total, length)))
            elif not ends and len(going_on) < settings.size:
                going_on.append(beam)
        found = sorted(found, key=lambda hypothesis: hypothesis.score, reverse=True)[: settings.kept]
        over = self._is_over(going_on, found, length)
        return evolve(self, beams=() if over else tuple(going_on), hypotheses=tuple(found))

    def _is_over(self, beams: list[Beam], found: list[Hypothesis], length: int) -> bool:
        if not beams:
            return True
        if len(found) < self.settings.kept:
            return False
        best = self.settings.score(beams[0].total, length)
        return self.settings.early or best <= found[-1].score
