"""Beam search on the simulated device: made-up candidates, and beams with KV in pages as on a real device.

`triolet.core.beams` decides a search, and `triolet.core.beam_pages` its pages, as on a real device. Only the model is
simulated: a beam's candidates are a function of the fingerprint of its last position.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Self

from attrs import define, field

from triolet.core.beam_pages import BeamPages
from triolet.core.beams import Beam, BeamSearch, BeamSettings, Candidate
from triolet.core.plan import Chunk, Hypothesis, SampledToken, SequenceStart
from triolet.core.recurrent import BeamStates
from triolet.core.request import Placeholder, SamplingParams

from .sim_model import EOS, SimModel, _chain, _read

_ENDS = 6  # one of this many candidates is an end-of-text


def _candidates(search: BeamSearch, fingerprints: Sequence[int], vocabulary: int) -> list[Candidate]:
    """Returns the candidates of the beams. ``fingerprints`` are those of the beams' last positions. Log-probabilities
    are multiples of 1/256, so that sums are exact."""
    found: dict[tuple[int, int], Candidate] = {}
    for index, (beam, fingerprint) in enumerate(zip(search.beams, fingerprints, strict=True)):
        for choice in range(search.settings.candidates):
            number = zlib.crc32(f"{fingerprint}*{choice}".encode())
            token_id = EOS if number % _ENDS == 0 else 1 + number % (vocabulary - 1)
            logprob = -float(256 + number % 997) / 256
            found.setdefault((index, token_id), Candidate(index, token_id, beam.total + logprob, logprob))
    return sorted(found.values(), key=_rank)


def _rank(candidate: Candidate) -> tuple[float, int, int]:
    return -candidate.total, candidate.beam, candidate.token_id


def _grown(search: BeamSearch, fingerprints: Sequence[list[int]], key: str | None) -> list[list[int]]:
    """Returns the fingerprints of each beam's positions after the prompt: those of its parent, and one more."""
    return [[*fingerprints[beam.parent], _next(fingerprints[beam.parent], beam, key)] for beam in search.beams]


def _next(before: list[int], beam: Beam, key: str | None) -> int:
    return _chain(before[-1], beam.token_ids[-1], key)


@define(eq=False)
class SimSearch:
    """One sequence's search. ``fingerprints`` has those of each beam's positions, from the last position of the prompt
    on."""

    prompt_length: int
    state: BeamSearch
    pages: BeamPages
    states: BeamStates
    fingerprints: list[list[int]] = field(factory=list)

    @classmethod
    def of(cls, start: SequenceStart, page_size: int) -> Self | None:
        """Returns the search of a sequence that starts; ``None``: the sequence does not search."""
        if start.sampling.beam_size == 1 or start.pooling is not None:
            return None
        settings = BeamSettings(sampling=start.sampling, max_tokens=start.max_tokens, stops=start.stops)
        shared = start.prompt_length // page_size
        pages = BeamPages(page_size=page_size, shared=shared, size=settings.size)
        return cls(start.prompt_length, BeamSearch(settings=settings), pages, BeamStates(settings.size))

    def begin(self, fingerprint: int, vocabulary: int, key: str | None) -> SampledToken:
        """Begins the search after the prompt is read. ``fingerprint`` is that of the prompt's last position."""
        self.fingerprints = [[fingerprint]]
        return self._advance(vocabulary, key)

    def go_on(
        self,
        part: Chunk,
        held: dict[int, list[int | None]],
        prompt: list[int],
        vocabulary: int,
        key: str | None,
        states: dict[int, int | None] | None,
    ) -> SampledToken:
        """Feeds a token of each beam. The pages ``held`` must hold what the beam has read: the fingerprints ``prompt``,
        then its own; and so must its state in ``states``, if the model has any."""
        if self.state.done:
            return SampledToken(token_id=None)
        assert part.start == self.prompt_length + self.state.length - 1, "every position of a beam is fed once"
        size = self.pages.page_size
        for source, target in self.pages.enter(part.start, part.page_table):
            held[target] = list(held[source])
        tables = [self.pages.table(index, part.page_table) for index in range(len(self.state.beams))]
        for table, own in zip(tables, self.fingerprints, strict=True):
            written = table[part.start // size]
            assert sum(written in other for other in tables) == 1, "a page is written while another beam reads it"
            held.setdefault(written, [None] * size)[part.start % size] = own[-1]
        for table, own in zip(tables, self.fingerprints, strict=True):
            read = [held[page][offset] for page in table for offset in range(size)]
            true = [*prompt[:-1], *own]
            assert read[: len(true)] == true, "a beam's pages hold another beam's KV"
        if states is not None:
            self._read_on(part, states)
        return self._advance(vocabulary, key)

    def _read_on(self, part: Chunk, states: dict[int, int | None]) -> None:
        for source, target in self.states.enter(part.states):
            states[target] = states[source]
        own = [self.states.of(index, part.states) for index in range(len(self.state.beams))]
        assert len(set(own)) == len(own), "two beams have the same state"
        for state, read in zip(own, self.fingerprints, strict=True):
            assert states.get(state) == read[-2], "a beam's state has read what another beam has read"
        states.update(dict.fromkeys(part.states))
        states.update({state: read[-1] for state, read in zip(own, self.fingerprints, strict=True)})

    def _advance(self, vocabulary: int, key: str | None) -> SampledToken:
        last = [own[-1] for own in self.fingerprints]
        self.state = self.state.advance(_candidates(self.state, last, vocabulary))
        if self.state.done:
            return SampledToken(token_id=None, hypotheses=self.state.hypotheses)
        self.pages.go_on([beam.parent for beam in self.state.beams])
        self.states.go_on([beam.parent for beam in self.state.beams])
        self.fingerprints = _grown(self.state, self.fingerprints, key)
        return SampledToken(token_id=None)


def expected_hypotheses(
    prompt_token_ids: Sequence[int],
    key: str | None,
    max_tokens: int,
    sampling: SamplingParams,
    model: SimModel | None = None,
    placeholders: Sequence[Placeholder] = (),
) -> tuple[Hypothesis, ...]:
    """Returns the hypotheses that a beam search must find, whatever the engine does beside it."""
    stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else {EOS})
    search = BeamSearch(settings=BeamSettings(sampling=sampling, max_tokens=max_tokens, stops=stops))
    fingerprints = [[_read(prompt_token_ids, key, placeholders)]]
    vocabulary = (model or SimModel()).vocabulary_size
    while not search.done:
        search = search.advance(_candidates(search, [own[-1] for own in fingerprints], vocabulary))
        fingerprints = _grown(search, fingerprints, key)
    return search.hypotheses
