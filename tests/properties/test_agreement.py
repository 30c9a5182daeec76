"""Local agreement: stable text is only added to, and each word becomes stable once, by two hypotheses or by order."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.live.agreement import Agreement, agreed, text_of
from triolet.api.speech.words import TextWord

texts = st.lists(st.sampled_from([" a", " b", "."]), max_size=5)
hypothesis = st.tuples(st.just("hear"), texts)
ACTS = st.lists(
    hypothesis
    | st.tuples(st.just("settle"), st.none() | st.integers(0, 3))
    | st.tuples(st.just("forget"), st.integers(0, 4)),
    max_size=12,
)


def words(found: Sequence[str], number: int = 0) -> tuple[TextWord, ...]:
    """Words with tokens that tell which hypothesis they are of."""
    return tuple(TextWord(text=text, token_ids=(number, index)) for index, text in enumerate(found))


def test_the_last_word_of_speech_that_goes_on_is_not_stable() -> None:
    """It may be cut off: "deg" of "degrees" in two hypotheses."""
    agreement = Agreement()
    agreement.hear(words([" five", " deg"]), goes_on=True)
    assert text_of(agreement.hear(words([" five", " deg"]), goes_on=True)) == " five"
    assert text_of(agreement.hear(words([" degrees"]))) == ""
    assert agreement.hear((), goes_on=True) == ()


@given(acts=ACTS)
def test_stable_text_is_only_added_to_and_has_every_word_once(acts: list[tuple[str, object]]) -> None:
    agreement = Agreement()
    told: list[TextWord] = []  # all that ever became stable, forgotten or not
    left = 0
    whole: tuple[str, ...] = ()  # the texts of the latest hypothesis, with what was stable before it
    for number, (act, value) in enumerate(acts):
        before, count = list(told), len(told)
        if act == "hear":
            heard = words(value, number)  # type: ignore[arg-type]
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


@given(texts, texts)
@settings(max_examples=100)
def test_agreed_is_the_length_of_the_longest_common_beginning(first: list[str], second: list[str]) -> None:
    count = agreed(words(first), words(second))
    assert first[:count] == second[:count]
    assert first[count : count + 1] != second[count : count + 1] or count == len(first) == len(second)
