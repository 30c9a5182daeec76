"""Words: how tokens become words, how marks are merged, and what becomes of words that last too long."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import InvalidRequest
from triolet.api.outputs.results import Word
from triolet.api.speech.options import APPENDED, PREPENDED
from triolet.api.speech.words import (
    WordRules,
    check_alignment,
    merge_marks,
    place_words,
    places,
    split_words,
    unfinished,
)
from triolet.core.plan import AlignedTokens
from triolet.core.request import EncoderItem
from triolet.core.speech import WordTokens
from triolet.models.speech.whisper_speech import LEAD

from .speech import describe, segment

TEXT = 256  # tokens below are bytes
START, LANGUAGE, TASK, PLAIN = 257, 258, 259, 260
STAMPS = 300


def decode(token_ids) -> str:
    return bytes(token for token in token_ids if token < TEXT).decode(errors="replace")


RULES = WordRules(decode=decode, language="en", prepended=PREPENDED, appended=APPENDED, lead=LEAD)


def stamp(seconds):
    return STAMPS + round(seconds / 0.02)


def texts(pieces):
    return [piece.text for piece in pieces]


# -- tokens to words -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "language", "words"),
    [
        (" The cat sat.", "en", [" The", " cat", " sat", "."]),
        ("The cat", "en", ["The", " cat"]),
        (" don't", "en", [" don't"]),
        (" 3.5 m", "en", [" 3.5", " m"]),
        (" it costs £43,000.", "en", [" it", " costs", " £43,000", "."]),
        (" anti-state, he", "en", [" anti-state", ",", " he"]),
        (" a--b -c", "en", [" a", "-", "-b", " ", "-c"]),
        (" की-मदद", "hi", [" की-मदद"]),  # the hyphen follows a vowel sign
        (" müde", "de", [" müde"]),
        (" «Oui»", "fr", [" «Oui»"]),
        ("今日は", "ja", ["今", "日", "は"]),
        ("今日は", "en", ["今日は"]),
        ("你好。", "zh", ["你", "好", "。"]),
        ("a b", "th", ["a", " ", "b"]),
        ("", "en", []),
    ],
)
def test_words_begin_with_a_space_or_are_a_mark(text, language, words):
    """Each letter is a token here. A mark between two letters or digits begins no word."""
    assert texts(split_words(tuple(text.encode()), decode, language)) == words


def test_tokens_of_several_letters_stay_whole():
    vocabulary = {1: " do", 2: "n't", 3: " go", 4: "ing", 5: "."}
    pieces = split_words((1, 2, 3, 4, 5), lambda ids: "".join(vocabulary[one] for one in ids), "en")
    assert [(piece.text, len(piece.token_ids)) for piece in pieces] == [(" don't", 2), (" going", 2), (".", 1)]


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), (" 4", 1), (" 4,", 2), (" a,", 1), (" a-", 2), (" don'", 2), (" U.", 2), (" --", 1)]
)
def test_a_word_may_go_on_behind_a_mark_that_may_be_inside_of_it(text, count):
    """Live, ``don't`` became two words."""
    assert unfinished(split_words(tuple(text.encode()), decode, "en")) == count


@settings(max_examples=150)
@given(data=st.binary(max_size=20), language=st.sampled_from(["en", "ja"]))
def test_every_token_is_in_one_word_and_the_text_is_whole(data, language):
    pieces = split_words(tuple(data), decode, language)
    assert "".join(texts(pieces)) == decode(data), "the words are the text"
    assert sum(len(piece.token_ids) for piece in pieces) == len(data), "each token is in one word"
    assert all(texts(pieces)) or not decode(data)


# -- marks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "merged"),
    [
        ([" Yes", ".", " No", "!"], [" Yes.", " No!"]),
        ([" ¿", "Que", "?"], [" ¿Que?"]),
        (["¿", "Que"], ["¿", "Que"]),  # marks are prepended where a space stands before them
        ([' "', "Go", '"', " he"], [' "Go"', " he"]),
        ([" he", ' "', "Go", ",", '"'], [" he", ' "Go,"']),
        ([" (", " [", "a", "]", ")"], [" ( [a])"]),
        ([" well", "-", "known"], [" well", "-", "known"]),  # a hyphen is prepended alone
        ([" -", "known"], [" -known"]),
        ([" a", ".", ".", "."], [" a..."]),
        ([".", " a"], [".", " a"]),
        ([" a", " ", "."], [" a", " ."]),  # a lone space goes to the word behind
        ([" a ", "."], [" a ", "."]),
        ([" ("], [" ("]),
        (["你", "好", "。"], ["你", "好。"]),
        ([], []),
    ],
)
def test_marks_belong_to_the_words_beside_them(words, merged):
    made = [Word(text=text, start=float(i), end=i + 1.0, probability=0.5) for i, text in enumerate(words)]
    assert texts(merge_marks(made, PREPENDED, APPENDED)) == merged


def test_a_marks_time_and_probability_count_for_nothing():
    words = [(' "', 0.0, 1.0, 0.1), ("Go", 1.0, 2.0, 0.9), ("!", 2.0, 5.0, 0.2)]
    made = [Word(text=text, start=start, end=end, probability=p) for text, start, end, p in words]
    assert merge_marks(made, PREPENDED, APPENDED) == [Word(text=' "Go!', start=1.0, end=2.0, probability=0.9)]


# -- long words ------------------------------------------------------------------------------------------------------


def placed(text, times, *, start=0.0, end=30.0, spoken_until=0.0, offset=0.0):
    """The segment of ``text``, whose words (split, not merged) begin at ``times``, of which the last is the end."""
    pieces = split_words(tuple(text.encode()), decode, "en")
    assert len(pieces) + 1 == len(times), texts(pieces)
    frames = [round(time / 0.02) - LEAD for i, piece in enumerate(pieces) for time in [times[i]] * len(piece.token_ids)]
    aligned = AlignedTokens(frames=(*frames, round(times[-1] / 0.02) - LEAD), logprobs=(-0.5,) * len(text.encode()))
    tokens = WordTokens(special=(START, PLAIN), written=tuple(text.encode()), text=TEXT)
    (found,) = place_words(
        [segment(text, start, end)], tokens, aligned, rules=RULES, offset=offset, spoken_until=spoken_until
    )
    return found


def times_of(found):
    return [(word.text, word.start, word.end) for word in found.words]


def test_times_of_words_are_whole_milliseconds():
    found = placed(" a b", [1.0, 1.2, 1.4], offset=0.12345)
    assert times_of(found) == [(" a", 1.123, 1.323), (" b", 1.323, 1.523)]


@pytest.mark.parametrize(
    ("text", "times", "own", "until", "words"),
    [
        # usual words stay as they are
        (" a b c", [1.0, 1.2, 1.4, 1.6], None, 0.0, [1.0, 1.2, 1.2, 1.4, 1.4, 1.6]),
        # the pause behind a sentence is not of the next word
        (" a b. c d", [1.0, 1.2, 1.4, 1.5, 5.0, 5.2], None, 0.0, [1.0, 1.2, 1.2, 1.4, 4.6, 5.0, 5.0, 5.2]),
        # nor of its mark
        (" a b. c d", [1.0, 1.2, 1.4, 4.8, 5.0, 5.2], None, 0.0, [1.0, 1.2, 1.2, 1.4, 4.8, 5.0, 5.0, 5.2]),
        # a comma ends no sentence
        (" a b, c d", [1.0, 1.2, 1.4, 1.5, 5.0, 5.2], None, 0.0, [1.0, 1.2, 1.2, 1.4, 1.5, 5.0, 5.0, 5.2]),
        # a first word that has the pause before it begins late
        (" a b c", [0.02, 4.0, 4.2, 4.4], None, 0.0, [3.6, 4.0, 4.0, 4.2, 4.2, 4.4]),
        # and so does a second word, with the first one before it
        (" a b c d", [2.02, 2.22, 4.0, 4.2, 4.4], None, 0.0, [3.2, 3.6, 3.6, 4.0, 4.0, 4.2, 4.2, 4.4]),
        # a segment's own start counts where its first word would begin long before it
        (" a b c", [1.0, 2.0, 2.2, 2.4], (1.8, 2.4), 1.5, [1.8, 2.0, 2.0, 2.2, 2.2, 2.4]),
        # and so does its own end
        (" a b c", [1.0, 1.2, 1.4, 9.0], (1.0, 1.8), 0.0, [1.0, 1.2, 1.2, 1.4, 1.4, 1.8]),
        # but not where the word is not long
        (" a b c", [1.0, 1.2, 1.4, 1.6], (1.1, 1.3), 0.0, [1.0, 1.2, 1.2, 1.4, 1.4, 1.6]),
    ],
)
def test_long_words_are_mended(text, times, own, until, words):
    """Each row worked out by hand from the rules of openai/whisper's ``add_word_timestamps``."""
    start, end = own or (times[0], times[-1])
    found = placed(text, times, start=start, end=end, spoken_until=until)
    expected = zip(text.split(), words[::2], words[1::2], strict=True)
    assert times_of(found) == [(f" {word}", pytest.approx(a), pytest.approx(b)) for word, a, b in expected]
    assert (found.start, found.end) == (found.words[0].start, found.words[-1].end)


def test_the_first_word_may_last_where_somebody_has_just_spoken():
    found = placed(" a b c", [10.0, 12.0, 12.2, 12.4], start=10.0, end=12.4, spoken_until=12.0 - 0.7)
    assert times_of(found)[0] == (" a", 10.0, 12.0)


def test_a_slow_speakers_words_are_at_most_twice_seven_tenths_of_a_second():
    found = placed(" a. b c", [1.0, 3.0, 3.02, 6.0, 8.0], start=1.0, end=8.0, spoken_until=1.0)
    assert times_of(found)[1] == (" b", pytest.approx(4.6), 6.0)


def test_a_words_probability_is_the_mean_of_its_tokens():
    tokens = WordTokens(special=(START, PLAIN), written=tuple(b" ab"), text=TEXT)
    aligned = AlignedTokens(frames=(0, 5, 10, 15), logprobs=(0.0, -0.6931471805599453, float("-inf")))
    (found,) = place_words([segment(" ab")], tokens, aligned, rules=RULES, offset=0.0, spoken_until=0.0)
    assert found.words[0].probability == pytest.approx(0.5)


# -- the request -----------------------------------------------------------------------------------------------------

ITEM = EncoderItem(key="k", payload=None, embeddings=1, size=1)


def test_a_leading_timestamp_counts_as_what_stands_before():
    written = (stamp(0), *b" a", stamp(1))
    request = WordTokens(special=(START, LANGUAGE, TASK), written=written, text=TEXT).request("r", ITEM, frames=50)
    assert request.prompt_token_ids == (START, LANGUAGE, TASK, *written)
    assert (request.alignment.start, request.alignment.frames, request.alignment.among) == (4, 50, TEXT)
    plain = WordTokens(special=(START, PLAIN), written=tuple(b" a"), text=TEXT).request("r", ITEM, frames=0)
    assert (plain.alignment.start, plain.alignment.frames) == (2, 1)


@pytest.mark.parametrize("written", [(), (STAMPS,), (STAMPS, STAMPS + 5)])
def test_a_window_without_text_asks_for_nothing(written):
    tokens = WordTokens(special=(START,), written=written, text=TEXT)
    assert tokens.request("r", ITEM, frames=9) is None
    (found,) = place_words([segment("")], tokens, None, rules=RULES, offset=0.0, spoken_until=0.0)
    assert found == evolve(segment(""), words=())


def test_text_that_is_in_no_segment_is_passed_over():
    written = (stamp(0), *b" a", stamp(1), stamp(1), *b" a b", stamp(2), stamp(2), *b" c")
    tokens = WordTokens(special=(START,), written=written, text=TEXT)
    assert places(tokens, [segment(" a b")]) == [4, 5, 6, 7]
    assert places(tokens, [segment(" a"), segment(" c")]) == [0, 1, 10, 11]
    with pytest.raises(AssertionError, match="no text ' z'"):
        places(tokens, [segment(" z")])


def test_a_model_that_cannot_align_says_so():
    check_alignment(describe())
    with pytest.raises(
        InvalidRequest, match=r"'word', but WhisperForConditionalGeneration has no times of words: no heads\. Allowed"
    ):
        check_alignment(describe(alignment_fault="no heads"))


# -- any window ------------------------------------------------------------------------------------------------------


@st.composite
def windows(draw):
    """A window's segments with timestamps between them, its tokens and any alignment of them."""
    words = st.text(alphabet="ab .?,\"'(中", min_size=1, max_size=12).map(lambda text: " " + text)
    spoken, cuts = draw(st.lists(words, min_size=1, max_size=4)), [0]
    while len(cuts) <= len(spoken):
        cuts.append(cuts[-1] + draw(st.integers(1, 300)))
    written, segments = [], []
    offset = draw(st.sampled_from((0.0, 12.34, 3600.02)))
    for text, start, end in zip(spoken, cuts, cuts[1:], strict=False):
        written += [STAMPS + start, *text.encode(), STAMPS + end]
        segments.append(segment(text, offset + 0.02 * start, offset + 0.02 * end))
    tokens = WordTokens(special=(START,), written=tuple(written), text=TEXT)
    count = len(tokens.aligned) + 1
    frames = sorted(draw(st.lists(st.integers(0, 1499), min_size=count, max_size=count)))
    logprobs = tuple(-0.1 * (index % 7) for index in range(count - 1))
    until = draw(st.floats(0.0, offset)) if offset else 0.0
    return segments, tokens, AlignedTokens(frames=tuple(frames), logprobs=logprobs), offset, until


@settings(max_examples=150)
@given(window=windows(), language=st.sampled_from(["en", "ja"]))
def test_words_are_in_order_within_their_segment_and_are_its_text(window, language):
    segments, tokens, aligned, offset, until = window
    rules = evolve(RULES, language=language)
    found = place_words(segments, tokens, aligned, rules=rules, offset=offset, spoken_until=until)
    end = until
    for before, after in zip(segments, found, strict=True):
        assert "".join(word.text for word in after.words) == before.text, "the words are the segment's text"
        assert after.start >= end - 1e-6, "segments do not overlap"
        assert (after.start, after.end) == (after.words[0].start, after.words[-1].end), "a segment is its words"
        for word in after.words:
            assert end - 1e-6 <= word.start <= word.end, "words are in order"
            assert 0.0 <= word.probability <= 1.0, "a probability is one"
            end = word.end
    assert end <= offset + 0.02 * 1500 + 1e-6, "no word ends behind its window"
    assert found[0].start >= offset - 1e-6, "no word begins before its window"
