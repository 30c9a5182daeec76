"""The cut of texts into words, the times between words, and CTC paths, against all paths."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triolet.core.aligning import Timed, between, cut_words, least_frames, spoken_words
from triolet.models.networks.ctc_path import best_path

BLANK = 0


def collapsed(path):
    """The tokens of a path: without repetitions, then without blanks."""
    return tuple(token for token, _ in itertools.groupby(path) if token != BLANK)


@given(
    tokens=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    more=st.integers(0, 3),
    seed=st.integers(0, 99),
    ties=st.booleans(),
)
def test_the_path_of_tokens_is_the_likeliest_of_all_paths(tokens, more, seed, ties):
    frames = least_frames(tokens) + more
    scores = np.random.default_rng(seed).normal(size=(frames, 3))
    logprobs = np.round(scores) if ties else scores
    paths = [path for path in itertools.product(range(3), repeat=frames) if collapsed(path) == tuple(tokens)]
    likeliest = max(sum(logprobs[np.arange(frames), path]) for path in paths)

    found = best_path(logprobs, tokens, BLANK)

    path = np.full(frames, BLANK)
    for token, start, end in zip(tokens, found.frames, found.ends, strict=False):
        path[start:end] = token
    assert collapsed(path) == tuple(tokens)
    assert sum(logprobs[np.arange(frames), path]) == pytest.approx(likeliest)
    means = [logprobs[start:end, one].mean() for one, start, end in zip(tokens, found.frames, found.ends, strict=False)]
    assert found.logprobs == pytest.approx(means)
    assert found.frames[-1] == found.ends[-1]


@given(tokens=st.lists(st.integers(1, 2), max_size=4), frames=st.integers(0, 6))
def test_tokens_fit_the_frames_exactly_if_a_path_has_them(tokens, frames):
    paths = itertools.product(range(3), repeat=frames)
    assert (least_frames(tokens) <= frames) == any(collapsed(path) == tuple(tokens) for path in paths)


@given(
    parts=st.lists(
        st.tuples(st.text(" .,«", max_size=3), st.text("abé你", min_size=1, max_size=3), st.text(".,'»", max_size=2)),
        max_size=5,
    ),
    end=st.text(" .", max_size=2),
)
def test_a_text_is_cut_into_its_words_and_nothing_is_lost(parts, end):
    text = "".join(before + word + after for before, word, after in parts) + end
    spoken = [word for _, word, _ in parts]

    words = cut_words(text, spoken)

    assert "".join(words) == text
    assert len(words) == max(1, len(spoken))
    for word, whole in zip(spoken, words, strict=False):
        assert word in whole


def test_a_mark_belongs_to_the_word_that_it_touches():
    assert cut_words(" «Oui», dit-il — (bas).", ["Oui", "ditil", "bas"]) == (" «Oui»,", " dit-il", " — (bas).")
    assert cut_words("你好，世界。", ["你", "好", "世", "界"]) == ("你", "好，", "世", "界。")
    assert cut_words("...", []) == ("...",)
    assert spoken_words(" «Oui», d’accord: 你好。é 3%") == ["Oui", "d’accord", "你", "好", "é", "3"]
    with pytest.raises(ValueError, match="substring"):
        cut_words("one", ["two"])


@given(text=st.text("a é'’你。 ,\u0301ก", max_size=12))
def test_a_text_can_be_cut_at_its_spoken_words(text):
    words = cut_words(text, spoken_words(text))
    assert "".join(words) == text
    assert len(words) == max(1, len(spoken_words(text)))


times = st.one_of(st.none(), st.builds(Timed, st.floats(-1, 12), st.floats(-1, 12), st.floats(0, 1)))


@given(times=st.lists(times, max_size=6), start=st.floats(0, 4), lasting=st.floats(0, 8))
def test_words_without_a_time_lie_between_their_neighbours(times, start, lasting):
    end = start + lasting
    found = between(times, start, end)
    borders = [start, *(edge for time in found for edge in (time.start, time.end)), end]
    assert borders == sorted(borders)
    assert [one.probability for one in found] == [0.0 if one is None else one.probability for one in times]


def test_words_without_a_time_share_the_time_evenly():
    known = Timed(3.0, 4.0, 0.5)
    assert between([None, None, known, None], 1.0, 6.0) == (Timed(1, 2), Timed(2, 3), known, Timed(4, 6))
