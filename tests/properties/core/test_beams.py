"""Beam search, pure: what is found, and that no beam writes into what another one reads."""

from __future__ import annotations

import itertools
import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import given

from triolet.core.beam_pages import BeamPages, pages_of_beams, prompt_pages
from triolet.core.beams import BeamSearch, BeamSettings, Candidate
from triolet.core.errors import InvalidRequest
from triolet.core.plan import Hypothesis
from triolet.core.request import SamplingParams

END = 0


def settings_of(max_tokens: int = 8, stops: frozenset[int] = frozenset({END}), **sampling: object) -> BeamSettings:
    return BeamSettings(sampling=SamplingParams(**sampling), max_tokens=max_tokens, stops=stops)


# -- the pages ---------------------------------------------------------------------------------------------------------


class Device:
    """Pages that hold tokens. Each beam writes its newest token at its position; all that it reads must be its own."""

    def __init__(self, prompt: int, size: int, page_size: int) -> None:
        self.size, self.page_size, self.prompt = size, page_size, prompt
        self.shared = prompt // page_size
        self.pages = BeamPages(page_size=page_size, shared=self.shared, size=size)
        self.table: list[int] = []  # grows as the planner's does
        self.held: dict[tuple[int, int], tuple[int, ...]] = {}  # page and offset: the token there, and all before it
        self.beams: list[tuple[int, ...]] = [()]
        self.take(prompt)
        for position in range(prompt):
            page = prompt_pages(self.table, self.shared)[position // page_size]
            self.held[page, position % page_size] = self.read((), position)

    def take(self, positions: int) -> None:
        """Page numbers tell nothing of their order."""
        needed = pages_of_beams(positions, page_size=self.page_size, shared=self.shared, size=self.size)
        self.table += [7 * (number + 1) % 1009 for number in range(len(self.table), needed)]

    def read(self, beam: tuple[int, ...], position: int) -> tuple[int, ...]:
        """What lies at ``position``: the tokens up to it, by number."""
        whole = (*range(-self.prompt, 0), *beam)
        return whole[: position + 1]

    def go_on(self, parents: list[int]) -> None:
        self.beams = [(*self.beams[parent], 100 + index) for index, parent in enumerate(parents)]
        self.pages.go_on(parents)

    def step(self) -> None:
        position = self.prompt + len(self.beams[0]) - 1
        self.take(position + 1)
        copies = self.pages.enter(position, self.table)
        assert not {source for source, _ in copies} & {target for _, target in copies}, "a page is read and written"
        for source, target in copies:
            self.held.update({(target, offset): what for (page, offset), what in self.held.items() if page == source})
        tables = [self.pages.table(index, self.table) for index in range(len(self.beams))]
        for beam, table in zip(self.beams, tables, strict=True):
            page, offset = table[position // self.page_size], position % self.page_size
            assert sum(page in other for other in tables) == 1, "a page is written while two beams read it"
            self.held[page, offset] = self.read(beam, position)
        self.check(tables, position)

    def check(self, tables: list[tuple[int, ...]], position: int) -> None:
        for beam, table in zip(self.beams, tables, strict=True):
            assert set(table) <= set(self.table), "a page that the planner has not given"
            assert table[: self.shared] == tuple(self.table[: self.shared]), "the prompt's full pages are shared"
            for place in range(position + 1):
                page, offset = table[place // self.page_size], place % self.page_size
                assert self.held[page, offset] == self.read(beam, place), "a beam's pages spell its own tokens"


@given(
    prompt=st.integers(1, 9),
    page_size=st.integers(1, 4),
    size=st.integers(2, 4),
    choices=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=14),
)
def test_no_page_is_written_while_two_beams_read_it_and_pages_spell_their_beams_tokens(
    prompt: int, page_size: int, size: int, choices: list[list[int]]
) -> None:
    """Beams fork, die and go on in any order, behind prompts that end within a page or at its end."""
    device = Device(prompt, size, page_size)
    for choice in choices:
        device.go_on([parent % len(device.beams) for parent in choice[:size]])
        device.step()


def test_beams_that_go_on_alone_move_no_page() -> None:
    """Only a fork copies, and only the page that is written next."""
    pages = BeamPages(page_size=2, shared=1, size=3)
    pages.go_on([0, 0, 0])
    assert pages.enter(2, range(4)) == ()  # a new block: a page each
    pages.go_on([2, 0, 1])
    assert pages.enter(3, range(4)) == ()
    assert [pages.table(beam, range(4)) for beam in range(3)] == [(0, 3), (0, 1), (0, 2)]
    pages.go_on([1, 1, 0])
    assert pages.enter(4, range(7)) == (), "full pages are shared, and never copied"
    assert [pages.table(beam, range(7))[1] for beam in range(3)] == [1, 1, 3]
    pages.go_on([0, 0, 2])
    assert pages.enter(5, range(7)) == ((4, 5),), "the second of two beams on one page gets a copy of it"


# -- the search --------------------------------------------------------------------------------------------------------


def logprob(token_ids: tuple[int, ...], seed: int) -> float:
    return -float(1 + zlib.crc32(repr((token_ids, seed)).encode()) % 512) / 128


def run_search(settings: BeamSettings, vocabulary: int, seed: int) -> list[BeamSearch]:
    """Every state of the search of a made-up model, the last one first."""
    states = [BeamSearch(settings=settings)]
    while not states[0].done:
        candidates = [
            Candidate(index, token, beam.total + logprob((*beam.token_ids, token), seed), -1.0)
            for index, beam in enumerate(states[0].beams)
            for token in range(vocabulary)
        ]
        ordered = sorted(candidates, key=lambda one: -one.total)
        states.insert(0, states[0].advance(ordered[: settings.candidates]))
        assert len(states) <= settings.max_tokens + 1, "a search is over when its beams have all their tokens"
    return states


def total(token_ids: tuple[int, ...], seed: int) -> float:
    return sum(logprob(token_ids[: index + 1], seed) for index in range(len(token_ids)))


@given(
    size=st.integers(2, 5),
    penalty=st.sampled_from((-1.0, 0.0, 0.7, 1.0, 2.0)),
    patience=st.sampled_from((None, 0.5, 1.0, 2.0)),
    most=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_hypotheses_are_scored_ranked_and_ended_as_they_say(
    size: int, penalty: float, patience: float | None, most: int, seed: int
) -> None:
    settings = settings_of(most, beam_size=size, length_penalty=penalty, patience=patience)
    last, *before = run_search(settings, vocabulary=12, seed=seed)
    found = last.hypotheses
    assert 0 < len(found) <= settings.sampling.most_hypotheses
    assert len({one.token_ids for one in found}) == len(found), "no text is found twice"
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True), "the best comes first"
    for one in found:
        length = len(one.token_ids)
        assert one.score == pytest.approx(total(one.token_ids, seed) / length**penalty)
        assert len(one.logprobs) == length <= most
        assert END not in one.token_ids[:-1], "nothing follows the end"
        assert one.token_ids[-1] == END or length == most, "a text ends with the end, or when it is too long"
    for state in before:
        assert len({beam.token_ids for beam in state.beams}) == len(state.beams) <= size
        totals = [beam.total for beam in state.beams]
        assert totals == sorted(totals, reverse=True), "the best beam comes first"
        few = len(state.hypotheses) < settings.sampling.most_hypotheses
        assert few or patience is None, "a patient search ends when it has enough"


@given(penalty=st.sampled_from((-2.0, 0.0, 1.0, 3.0)), seed=st.integers(0, 10**6))
def test_a_search_wide_enough_for_all_texts_ranks_them_all(penalty: float, seed: int) -> None:
    """As many beams as there are texts."""
    most, vocabulary = 3, 3
    settings = settings_of(most, beam_size=40, length_penalty=penalty)
    found = run_search(settings, vocabulary, seed)[0].hypotheses
    bodies = [body for length in range(most) for body in itertools.product(range(1, vocabulary), repeat=length)]
    texts = [(*body, END) for body in bodies] + list(itertools.product(range(1, vocabulary), repeat=most))
    scores = sorted((total(text, seed) / len(text) ** penalty for text in texts), reverse=True)
    assert [one.score for one in found] == pytest.approx(scores)


def cand(beam: int, token: int, value: float) -> Candidate:
    return Candidate(beam, token, value, value)


def test_only_the_best_candidates_may_end_and_those_behind_take_their_beams_place() -> None:
    search = BeamSearch(settings=settings_of(beam_size=2, n=2))
    search = search.advance([cand(0, 5, -1.0), cand(0, END, -2.0), cand(0, 6, -3.0), cand(0, 7, -4.0)])
    assert [beam.token_ids for beam in search.beams] == [(5,), (6,)]
    assert search.hypotheses == (Hypothesis((END,), (-2.0,), -2.0),)
    search = search.advance([cand(0, 5, -1.5), cand(1, 5, -3.5), cand(0, END, -4.0), cand(1, END, -4.5)])
    assert len(search.hypotheses) == 1, "an end behind the best two counts for nothing"
    assert [(beam.token_ids, beam.parent) for beam in search.beams] == [((5, 5), 0), ((6, 5), 1)]


@pytest.mark.parametrize(("going_on", "over"), [(-2.9, False), (-3.0, True), (-3.1, True)])
def test_without_patience_a_search_is_over_when_its_best_beam_can_do_no_better(going_on: float, over: bool) -> None:
    """``early_stopping=False``: the best beam's score, as if it ended now, against the worst hypothesis kept: -3 / 2
    against -1.5."""
    search = BeamSearch(settings=settings_of(beam_size=2))
    search = search.advance([cand(0, END, -1.5), cand(0, 5, -1.6), cand(0, 6, -1.7), cand(0, 7, -9.0)])
    search = search.advance([cand(0, END, -2.0), cand(0, 5, going_on), cand(1, 5, -8.0), cand(1, END, -9.0)])
    assert [one.score for one in search.hypotheses] == [-1.0, -1.5]
    assert search.done is over


@pytest.mark.parametrize(("patience", "kept"), [(None, 5), (1.0, 5), (2.0, 10), (0.5, 2), (0.7, 4), (0.01, 1)])
def test_patience_says_how_many_hypotheses_are_enough(patience: float | None, kept: int) -> None:
    assert SamplingParams(beam_size=5, patience=patience).most_hypotheses == kept


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": 0.5}, "temperature=0.5 with beam_size=4; allowed: 0"),
        ({"stop": "end"}, "stop=('end',) with beam_size=4; allowed: stop_token_ids, or beam_size=1"),
        ({"logprobs": 2}, "logprobs=2 with beam_size=4; allowed: None"),
        ({"n": 5}, "n=5 with beam_size=4 and patience=None; allowed: up to 4"),
        ({"n": 3, "patience": 0.5}, "n=3 with beam_size=4 and patience=0.5; allowed: up to 2"),
        ({"patience": 0}, "patience=0; allowed: a number, more than 0"),
        ({"length_penalty": 11}, "length_penalty=11; allowed: a number"),
        ({"beam_size": 0}, "beam_size=0; allowed: an integer, 1 to 256"),
    ],
    ids=str,
)
def test_what_a_beam_search_cannot_do_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(**{"beam_size": 4, **wrong})
    assert says in str(refused.value)
