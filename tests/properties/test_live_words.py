"""The words of live sessions: stable text is only added to, each word becomes stable once and has its time, marks
belong to words, and a long utterance is cut between words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.live import agreement
from triolet.api.live.agreement import Agreement, TimedWord, agreed, is_mark, joined, text_of, timed
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


# ---- agreement -------------------------------------------------------------------------------------------------------

hypotheses = st.lists(st.sampled_from([" a", " b", "."]), max_size=5)
heard = st.tuples(st.just("hear"), hypotheses)
ACTS = st.lists(
    heard
    | st.tuples(st.just("settle"), st.none() | st.integers(0, 3))
    | st.tuples(st.just("forget"), st.integers(0, 4)),
    max_size=12,
)


def written(found: Sequence[str], number: int = 0) -> tuple[TextWord, ...]:
    """Words with tokens that tell which hypothesis they are of."""
    return tuple(TextWord(text=text, token_ids=(number, index)) for index, text in enumerate(found))


def test_the_last_word_of_speech_that_goes_on_is_not_stable() -> None:
    """It may be cut off: "deg" of "degrees" in two hypotheses."""
    agreement = Agreement()
    agreement.hear(written([" five", " deg"]), goes_on=True)
    assert text_of(agreement.hear(written([" five", " deg"]), goes_on=True)) == " five"
    assert text_of(agreement.hear(written([" degrees"]))) == ""
    assert agreement.hear((), goes_on=True) == ()


@given(acts=ACTS)
def test_stable_text_is_only_added_to_and_has_every_word_once(acts: list[tuple[str, object]]) -> None:
    agreement = Agreement()
    told: list[TextWord] = []  # all that ever became stable, forgotten or not
    left = 0
    whole: tuple[str, ...] = ()  # the hypotheses of the latest hypothesis, with what was stable before it
    for number, (act, value) in enumerate(acts):
        before, count = list(told), len(told)
        if act == "hear":
            heard = written(value, number)  # type: ignore[arg-type]
            new = agreement.hear(heard)
            now = (*(word.text for word in told), *(word.text for word in heard))
            common = next((i for i, (a, b) in enumerate(zip(whole, now, strict=False)) if a != b), None)
            common = min(len(whole), len(now)) if common is None else common
            told += new
            assert len(told) == max(count, common), "a word is stable by two hypotheses, and no other one is"
            assert (*new, *agreement.provisional) == heard, "stable and provisional words are the hypothesis"
            whole = now
        elif act == "settle":
            rest = agreement.provisional
            new = agreement.settle(value if value is None else min(value, len(rest)))  # type: ignore[type-var,arg-type]
            told += new
            assert (*new, *agreement.provisional) == rest, "settling changes no word"
            assert value is not None or not agreement.provisional, "something is left"
        else:
            dropped = agreement.forget(min(value, len(agreement.stable)))  # type: ignore[type-var,arg-type]
            assert list(dropped) == told[left : left + len(dropped)], "other words than the first are forgotten"
            left += len(dropped)
        assert told[:count] == before, "stable text has changed"
        assert list(agreement.stable) == told[left:], "a stable word is lost or repeated"


@given(hypotheses, hypotheses)
@settings(max_examples=100)
def test_agreed_is_the_length_of_the_longest_common_beginning(first: list[str], second: list[str]) -> None:
    count = agreed(written(first), written(second))
    assert first[:count] == second[:count]
    assert first[count : count + 1] != second[count : count + 1] or count == len(first) == len(second)
