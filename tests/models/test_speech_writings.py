"""What speech models write: every text is read, none of it is lost, and times rise."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.models.speech.writings import WrittenTurn, bracketed, joined, json_turns, placed, plain, unquoted

READERS = {"plain": plain, "unquoted": unquoted, "bracketed": bracketed, "json": json_turns}
MARKS = ("[", "]", "[0.00]", "[1:02.50]", "[S01]", "[S2]", "[{", "{", "}", '"Start":', '"End":', '"Content":"', '"')
NUMBERS = ("1.5", "-1", ",", "NaN", "1e400", "9" * 400, "\\ud800", "\\")
PIECES = [*MARKS, *NUMBERS, " ", "a", "Ä", "字", "assistant\n", "null", "\n", "."]
NOISE = st.lists(st.sampled_from(PIECES) | st.characters(codec="utf-8"), max_size=30).map("".join)
WORDS = st.text("abcä字 ,!?'", min_size=1, max_size=12).map(str.strip).filter(bool)
SPOKEN = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 500), st.integers(0, 99), WORDS), min_size=1, max_size=8
)


def turns_of(spoken):
    """Turns that follow each other, as (start, end, speaker, text), with times in hundredths."""
    at = 0
    for pause, length, speaker, text in spoken:
        yield (at + pause) / 100, (at + pause + length) / 100, speaker, text
        at += pause + length


def brackets(spoken):
    return "".join(f"[{start:.2f}][S{who:02}]{text}[{end:.2f}]" for start, end, who, text in turns_of(spoken))


def objects(spoken):
    return json.dumps(
        [{"Start": start, "End": end, "Speaker": who, "Content": text} for start, end, who, text in turns_of(spoken)],
        ensure_ascii=False,
    )


WRITERS = {"bracketed": (brackets, "S{:02}"), "json": (objects, "{}")}


@pytest.mark.parametrize("name", WRITERS)
@given(spoken=SPOKEN)
def test_what_its_writer_writes_a_reader_reads_back(name, spoken):
    write, label = WRITERS[name]
    found = placed(READERS[name](write(spoken)))
    assert [(turn.start, turn.end, turn.speaker, turn.text) for turn in found] == [
        (start, end, label.format(who), text) for start, end, who, text in turns_of(spoken)
    ]


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=settings().max_examples // 4)
@given(written=NOISE)
def test_every_text_is_read_and_times_rise(name, written):
    turns = READERS[name](written)
    found = placed(turns)
    assert bool(found) == any(turn.text for turn in turns)
    assert "".join(joined([turn.text for turn in turns if turn.text]).split()) == "".join(
        joined([turn.text for turn in found]).split()
    )
    assert all(0 <= turn.first <= turn.stop <= len(written) for turn in found)
    assert all(turn.start is not None for turn in found[1:])
    assert all(turn.end is None or turn.end > (turn.start or 0.0) >= 0.0 for turn in found)
    for before, after in pairwise(found):
        assert before.end is not None
        assert before.end <= after.start
    text = joined([turn.text for turn in found])
    text.encode()
    assert name == "json" or text.count("Ä") == written.count("Ä")


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=settings().max_examples // 4)
@given(spoken=SPOKEN, data=st.data())
def test_a_text_that_breaks_off_has_all_turns_before(name, spoken, data):
    written = WRITERS[name][0](spoken)
    cut = written[: data.draw(st.integers(0, len(written)))]
    found = placed(READERS[name](cut))
    whole = placed(READERS[name](written))
    closed = [turn for turn in found if turn.end is not None]
    assert [turn.text for turn in closed] == [turn.text for turn in whole[: len(closed)]]
    assert len(found) <= len(closed) + 1


@pytest.mark.parametrize("name", ["plain", "bracketed", "json"])
@given(text=st.text("abcä字 ,!?", max_size=30))
def test_text_without_marks_is_one_turn(name, text):
    assert [turn.text for turn in READERS[name](text)] == ([text.strip()] if text.strip() else [])


@pytest.mark.parametrize(
    "frame", ["{}", "The spoken content of the audio is {}.", "The transcription of the audio is {}"]
)
@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_the_sentence_and_quotes_around_a_text_are_left_out(frame, quote):
    (turn,) = unquoted(frame.format(f"{quote}it's here{quote}"))
    assert turn.text.removesuffix(".") == "it's here"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ([("a", 0.0, 2.0), ("b", 1.0, 3.0)], [("a", 0.0, 1.0), ("b", 1.0, 3.0)]),  # two at once
        ([("a", 1.0, 2.0), ("b", 0.5, 0.7)], [("a b", 1.0, 2.0)]),  # backwards
        ([("a", 1.0, 2.0), ("b", 3.0, 3.0), ("c", 4.0, None)], [("a b", 1.0, 2.0), ("c", 4.0, None)]),
        ([("a", None, None), ("b", 1.0, 2.0)], [("a b", 1.0, 2.0)]),
        ([("你", 1.0, 2.0), ("好", None, None)], [("你好", 1.0, 2.0)]),
        ([("a", 1.0, float("inf")), ("b", float("nan"), 9.0)], [("a b", 1.0, None)]),
    ],
)
def test_turns_without_a_place_of_their_own_are_joined_to_others(given, texts):
    turns = [WrittenTurn(text=text, first=0, stop=1, start=start, end=end) for text, start, end in given]
    assert [(turn.text, turn.start, turn.end) for turn in placed(turns)] == texts
