"""Words that nobody spoke, without a model."""

from __future__ import annotations

from itertools import pairwise

import pytest
from attrs import evolve

from triolet.api.outputs.results import Segment, Word
from triolet.api.speech.windows import Surroundings, is_strange, strangeness, without_hallucinations

from .speech import segment

WINDOW = Surroundings(start=30.0, stop=60.0, full=60.0, audio=100.0, last_speech=29.0, closed=False)


def spoken(start: float, end: float, probability: float = 0.9, words: int = 3) -> Segment:
    """``words`` words that share the time."""
    edges = [start + (end - start) / words * index for index in range(words + 1)]
    told = [Word(text=" a", start=one, end=other, probability=probability) for one, other in pairwise(edges)]
    return segment(" a" * words, start, end, told)


def ghost(start: float, end: float) -> Segment:
    return spoken(start, end, probability=0.01)


@pytest.mark.parametrize(
    ("seconds", "probability", "expected"), [(0.5, 0.9, 0.0), (0.5, 0.1, 1.0), (0.033, 0.9, 1.5), (3.0, 0.9, 1.0)]
)
def test_a_word_is_strange_by_its_probability_and_its_length(
    seconds: float, probability: float, expected: float
) -> None:
    assert strangeness(Word(text="a", start=1.0, end=1.0 + seconds, probability=probability)) == pytest.approx(expected)


def test_a_segment_is_strange_by_its_words_alone() -> None:
    assert is_strange(ghost(40, 41))
    assert not is_strange(spoken(40, 41))
    assert not is_strange(None)
    assert not is_strange(evolve(ghost(40, 41), words=()))


def test_what_is_spoken_stays_and_the_next_window_begins_behind_it_where_silence_follows() -> None:
    told = (spoken(30, 35), spoken(36, 40))
    kept = without_hallucinations(told, WINDOW, 2.0)
    assert (kept.segments, kept.seek) == (told, 40)
    assert without_hallucinations(told, evolve(WINDOW, closed=True), 2.0).seek is None
    assert without_hallucinations((spoken(30, 59, words=60),), WINDOW, 2.0).seek == 60


def test_a_hallucination_behind_a_silence_is_skipped_and_heard_again() -> None:
    kept = without_hallucinations((ghost(40, 41), spoken(41, 42)), WINDOW, 2.0)
    assert (kept.segments, kept.seek) == ((), 40)


def test_a_hallucination_between_silences_ends_the_window_and_one_beside_speech_stays() -> None:
    first, lone, beside = spoken(30, 35), ghost(45, 46), ghost(35.5, 36)
    kept = without_hallucinations((first, lone, spoken(50, 55)), WINDOW, 2.0)
    assert (kept.segments, kept.seek) == ((first,), 45)
    together = (first, beside, spoken(36, 40))
    assert without_hallucinations(together, WINDOW, 2.0).segments == together


def test_a_hallucination_at_the_end_of_the_audio_ends_it() -> None:
    told = spoken(30, 35), ghost(58.2, 59)
    for audio, seek in ((60.0, 60.0), (100.0, 58.2), (None, 58.2)):
        kept = without_hallucinations(told, evolve(WINDOW, audio=audio), 2.0)
        assert (kept.segments, kept.seek) == (told[:1], seek)
