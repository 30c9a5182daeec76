"""Beam search, pure: which continuations go on as beams, which end as hypotheses, and when the search is over.

The decisions are those of transformers' `generate(num_beams=...)`; ``patience`` is that of Kasai et al. 2022, "A Call
for Clarity in Beam Search", section 3. One step of a search::

    beams, best first         candidates, best first            hypotheses
    [a b]    -1.2             [a b] + c      -1.5  goes on
    [a d]    -1.9        ->   [a d] + end    -2.0  ends    ->   [a d end]    -2.0 / 3 ** length_penalty
                              [a b] + e      -2.4  goes on
                              [a d] + f      -2.9  not needed

`triolet.models.sampling.beams` computes the candidates, and `triolet.core.beam_pages` places the KV of the beams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, frozen

from .plan import Hypothesis
from .request import SamplingParams


@frozen(kw_only=True)
class BeamSettings:
    """The settings of a beam search.

    Args:
        sampling: the parameters of the request.
        max_tokens: the length at which beams end.
        stops: tokens that end a beam.
    """

    sampling: SamplingParams
    max_tokens: int
    stops: frozenset[int]

    @property
    def size(self) -> int:
        """The largest number of beams."""
        return self.sampling.beam_size

    @property
    def candidates(self) -> int:
        """The number of candidates that a step needs. It leaves ``size`` candidates that go on even if the likeliest
        tokens of each beam are those that end it.
        """
        return max(2, 1 + len(self.stops)) * self.size

    def score(self, total: float, length: int) -> float:
        """Returns the score of ``length`` tokens whose log-probabilities add up to ``total``. The end token counts in
        the length, the prompt does not."""
        return total / math.pow(length, self.sampling.length_penalty)


@frozen
class Candidate:
    """A beam with one more token. ``beam`` is the index of the beam. ``total`` is the sum of the log-probabilities that
    the search ranks by, including that of the token. ``logprob`` is the token's log-probability as callers get it.
    """

    beam: int
    token_id: int
    total: float
    logprob: float


@frozen
class Beam:
    """A beam: its tokens after the prompt, their log-probabilities, and ``total`` as in `Candidate`. The beam continues
    the one with the index ``parent`` among the beams of the step before."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0
    parent: int = 0

    def grown(self, candidate: Candidate) -> Beam:
        """Returns the beam that continues this one with ``candidate``."""
        return Beam(
            (*self.token_ids, candidate.token_id), (*self.logprobs, candidate.logprob), candidate.total, candidate.beam
        )


@frozen(kw_only=True)
class BeamSearch:
    """The state of a search between two steps. A search begins with one beam, the prompt. ``hypotheses`` has those
    found so far, best first. All ``beams``, best first, have the same length. A search that is ``done`` has no
    beams."""

    settings: BeamSettings
    beams: tuple[Beam, ...] = (Beam(),)
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def done(self) -> bool:
        """True if the search is over, and ``hypotheses`` are its answer."""
        return not self.beams

    @property
    def length(self) -> int:
        """The number of tokens of each beam."""
        assert self.beams, "a search that is done has no beams"
        return len(self.beams[0].token_ids)

    def advance(self, candidates: Sequence[Candidate]) -> BeamSearch:
        """Returns the search after one more step.

        Args:
            candidates: the best continuations of all beams together, the best first. There are
                `BeamSettings.candidates` of them, or fewer if fewer exist, but at least one.
        """
        assert candidates, "a search goes on from at least one candidate"
        settings, length = self.settings, self.length + 1
        going_on: list[Beam] = []
        found = list(self.hypotheses)
        for place, candidate in enumerate(candidates[: settings.candidates]):
            ends = length >= settings.max_tokens or candidate.token_id in settings.stops
            beam = self.beams[candidate.beam].grown(candidate)
            if ends and place < settings.size:  # later candidates only replace beams that end
                found.append(Hypothesis(beam.token_ids, beam.logprobs, settings.score(beam.total, length)))
            elif not ends and len(going_on) < settings.size:
                going_on.append(beam)
        found = sorted(found, key=lambda hypothesis: hypothesis.score, reverse=True)[
            : settings.sampling.most_hypotheses
        ]
        over = self._is_over(going_on, found, length)
        return evolve(self, beams=() if over else tuple(going_on), hypotheses=tuple(found))

    def _is_over(self, beams: list[Beam], found: list[Hypothesis], length: int) -> bool:
        """True if the search has enough hypotheses. With patience it then ends. Without, it ends when the best beam
        would not score above the worst of them if it ended now."""
        if not beams:
            return True
        if len(found) < self.settings.sampling.most_hypotheses:
            return False
        best = self.settings.score(beams[0].total, length)
        return self.settings.sampling.patience is not None or best <= found[-1].score
