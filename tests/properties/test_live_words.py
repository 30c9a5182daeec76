"""The words of live sessions: each has its time, marks belong to words, and a long utterance is cut between words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from triolet.api.live import agreement
from triolet.api.live.agreement import TimedWord, is_mark, joined, timed
from triolet.api.speech.options import APPENDED, PREPENDED
from triolet.api.speech.words import TextWord, WordRules
from triolet.core.plan import AlignedTokens

RULES = WordRules(decode=str, language="en", prepended=PREPENDED, appended=APPENDED, frame_seconds=0.1)


def placed(*words: tuple[str, int]) -> tuple[TimedWord, ...]:
    """Words that last so many frames of 0.1 s, each of one token."""
    texts = [TextWord(text=text, token_ids=(number,)) for number, (text, _) in enumerate(words)]
    frames = [sum(count for _, count in words[:index]) for index in range(len(words) + 1)]
    aligned = AlignedTokens(frames=tuple(frames), logprobs=(-0.1,) * len(words))
    return timed(texts, aligned, rules=RULES, offset=10.0)


def times(words: Sequence[TimedWord]) -> list[tuple[str, float, float]]:
    return [(one.word.text, one.word.start, one.word.end) for one in words]


def test_a_pause_belongs_to_nobody() -> None:
    """The alignment gives it to the mark, or to the word behind it."""
    first = placed((" Yes", 4), (".", 30), (" Well", 4), (" then", 4))
    assert times(first) == [(" Yes", 10.0, 10.4), (".", 10.4, 10.4), (" Well", 13.4, 13.8), (" then", 13.8, 14.2)]
    second = placed((" Yes", 4), (".", 1), (" Well", 34), (" then", 4))
    assert times(second) == [(" Yes", 10.0, 10.4), (".", 10.4, 10.4), (" Well", 13.1, 13.9), (" then", 13.9, 14.3)]


def test_times_of_a_model_that_knows_where_tokens_end_are_not_mended() -> None:
    texts = [TextWord(text=text, token_ids=(number,)) for number, text in enumerate((" Yes", ".", " Well"))]
    aligned = AlignedTokens(frames=(0, 4, 34, 68), logprobs=(-0.1,) * 3, ends=(3, 5, 68))
    found = times(timed(texts, aligned, rules=RULES, offset=10.0))
    assert found == [(" Yes", 10.0, 10.3), (".", 10.4, 10.5), (" Well", 13.4, 16.8)]


def test_marks_belong_to_their_words() -> None:
    found = joined(placed((" (", 1), ("so", 3), (")", 1), (",", 1), (" no", 3)))
    assert [word.text for word in found] == [" (so),", " no"]
    assert (found[0].start, found[0].end) == (10.1, 10.4)


def test_a_mark_alone_is_a_word_without_length() -> None:
    (mark,) = joined(placed((" so", 3), (".", 5))[1:])
    assert (mark.text, mark.start, mark.end) == (".", 10.3, 10.3)


def test_a_cut_is_behind_the_last_stable_sentence() -> None:
    words = placed((" Yes", 3), (".", 2), (" Well", 4), (" then", 4), (" go", 3))
    assert agreement.cut(words, 4, 10.0) == (2, 10.4)


def test_without_a_sentence_a_cut_is_behind_the_last_stable_word() -> None:
    words = placed((" one", 3), (" two", 4), (" three", 4))
    assert agreement.cut(words, 2, 10.0) == (2, 10.7)
    assert agreement.cut(words, 0, 10.0) is None
    assert agreement.cut(words, 1, 10.5) is None, "it would move back"


def test_a_cut_leaves_a_word_whole() -> None:
    """Its mark is not stable yet."""
    words = placed((" one", 3), (" two", 4), (",", 1), (" three", 4))
    assert agreement.cut(words, 2, 10.0) == (1, 10.3)


texts = st.lists(st.tuples(st.sampled_from([" a", " bb", "c", ",", ".", " (", "?!"]), st.integers(0, 20)), max_size=8)

TEXTS = {"said": texts, "first": st.integers(0, 8), "stable": st.integers(0, 8)}


@given(**TEXTS)
def test_words_are_timed_in_order_and_joined_are_the_text(said: list[tuple[str, int]], first: int, stable: int) -> None:
    words = placed(*said)
    assert [one.word.text for one in words] == [text for text, _ in said]
    for one in words:
        assert 10.0 <= one.word.start <= one.word.end, "a word ends before it begins"
        assert not is_mark(one.word.text) or one.word.start == one.word.end, "a mark has a length"
    for before, one in pairwise(words):
        assert before.word.end <= one.word.start + 1e-9, "words overlap"
    assert "".join(word.text for word in joined(words[first:])) == "".join(text for text, _ in said[first:])
    found = agreement.cut(words, min(stable, len(words)), 10.0)
    if found is not None:
        count, at = found
        assert 0 < count <= stable
        assert at > 10.0
        assert all(one.word.end <= at for one in words[:count])
        assert all(one.word.start >= at - 1e-9 for one in words[count:])
