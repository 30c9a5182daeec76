"""Formats of transcripts, against outputs written by hand from their definitions: openai/whisper's writers, WebVTT,
SRT, and the shape of verbose_json in OpenAI's API."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from attrs import evolve

from triolet.api.formats.settings import SubtitleSettings
from triolet.api.formats.writers import (
    FORMATS,
    JSON,
    SRT,
    TEXT,
    TSV,
    VERBOSE_JSON,
    VTT,
    Format,
    WriterSettings,
    formats_of,
    timed_line,
    timestamp,
    written,
)
from triolet.api.outputs.results import Segment, Stretch, Transcript, Turn, Word
from triolet.core.errors import InvalidRequest

from .speech import segment


def transcript(*segments: Segment) -> Transcript:
    return Transcript(
        text="".join(one.text for one in segments).strip(),
        language="en",
        language_probability=0.5,
        duration=3723.5,
        segments=tuple(segments),
    )


def spoken(texts: str, *, start: float = 0.0, seconds: float = 0.5) -> Segment:
    """A segment whose words are those of ``texts``, each ``seconds`` long."""
    words = [
        Word(text=f" {text}", start=start + at * seconds, end=start + (at + 1) * seconds, probability=0.5)
        for at, text in enumerate(texts.split())
    ]
    return segment(f" {texts}", words[0].start, words[-1].end, words)


TWO = transcript(segment(" Hello\tthere,", 0.0, 2.5), segment(" R&B --> <b>\nyou. ", 3661.0015, 3723.4996))


def subtitles(format_: Format, found: Transcript, **settings: int | bool) -> str:
    return written(found, format_, WriterSettings(subtitles=SubtitleSettings(**settings)))


# -- without words ---------------------------------------------------------------------------------------------------


def test_text_has_a_line_for_each_segment() -> None:
    assert written(TWO, TEXT) == "Hello\tthere,\nR&B --> <b> you.\n"


def test_tsv_has_whole_milliseconds_and_no_tab_in_the_text() -> None:
    assert written(TWO, TSV) == ("start\tend\ttext\n0\t2500\tHello there,\n3661002\t3723500\tR&B --> <b> you.\n")


def test_srt_is_numbered_has_commas_and_no_arrow_in_the_text() -> None:
    assert written(TWO, SRT) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello\tthere,\n\n2\n01:01:01,002 --> 01:02:03,500\nR&B -> <b> you.\n\n"
    )


def test_vtt_has_hours_where_there_are_some_and_escapes_what_would_be_a_tag() -> None:
    assert written(TWO, VTT) == (
        "WEBVTT\n\n00:00.000 --> 00:02.500\nHello\tthere,\n\n01:01:01.002 --> 01:02:03.500\nR&amp;B -> &lt;b> you.\n\n"
    )


@pytest.mark.parametrize("format_", [TEXT, TSV, SRT, VTT])
def test_a_segment_without_text_leaves_no_trace(format_: Format) -> None:
    silent = transcript(segment(" \n ", 0.0, 1.0))
    assert written(silent, format_) == written(transcript(), format_)


@pytest.mark.parametrize(
    ("milliseconds", "told"),
    [(0, "00:00.000"), (59_999, "00:59.999"), (3_600_000, "01:00:00.000"), (360_000_001, "100:00:00.001")],
)
def test_timestamps(milliseconds: int, told: str) -> None:
    assert timestamp(milliseconds, hours=False) == told


def test_a_segment_as_people_watch_it() -> None:
    assert timed_line(segment(" so\nit goes. ", 61.5, 62.25)) == "[01:01.500 --> 01:02.250] so it goes."


# -- with words ------------------------------------------------------------------------------------------------------


def test_words_give_a_subtitle_its_times() -> None:
    """Not the segment, which may begin in the silence before."""
    found = evolve(spoken("one two", start=1.0), start=0.0, end=9.0)
    assert subtitles(SRT, transcript(found)) == "1\n00:00:01,000 --> 00:00:02,000\none two\n\n"


def test_lines_are_broken_where_the_next_word_does_not_fit() -> None:
    """A word counts with the blank before it; one that is longer than a line has a line of its own."""
    found = transcript(spoken("aa bb cc dddddddddd e"))
    assert subtitles(VTT, found, max_line_width=5) == (
        "WEBVTT\n\n00:00.000 --> 00:02.500\naa bb\ncc\ndddddddddd\ne\n\n"
    )


def test_a_subtitle_ends_after_so_many_lines_and_runs_on_over_segments() -> None:
    """The third segment begins more than 3 s after the second's last word did, and so has a subtitle of its own."""
    found = transcript(spoken("aa bb cc dd"), spoken("ee", start=2.0), spoken("ff gg", start=5.5))
    assert subtitles(SRT, found, max_line_width=5, max_line_count=2) == (
        "1\n00:00:00,000 --> 00:00:02,000\naa bb\ncc dd\n\n"
        "2\n00:00:02,000 --> 00:00:02,500\nee\n\n"
        "3\n00:00:05,500 --> 00:00:06,500\nff gg\n\n"
    )


def test_without_a_line_count_a_segment_ends_its_subtitle() -> None:
    found = transcript(spoken("aa bb"), spoken("cc", start=1.0))
    assert subtitles(SRT, found, max_line_width=50).count(" --> ") == 2
    assert subtitles(SRT, found, max_line_width=50, max_line_count=2).count(" --> ") == 1


def test_so_many_words_are_a_subtitle() -> None:
    found = transcript(spoken("a b c d e"), spoken("f", start=2.5))
    assert subtitles(SRT, found, max_words_per_line=2).split("\n\n") == [
        "1\n00:00:00,000 --> 00:00:01,000\na b",
        "2\n00:00:01,000 --> 00:00:02,000\nc d",
        "3\n00:00:02,000 --> 00:00:02,500\ne",
        "4\n00:00:02,500 --> 00:00:03,000\nf",
        "",
    ]


def test_each_word_is_underlined_as_it_is_said_and_none_in_between() -> None:
    words = (
        Word(text=" R&B", start=0.0, end=0.5, probability=1.0),
        Word(text=" it", start=1.0, end=1.25, probability=1.0),
        Word(text=" is.", start=1.25, end=2.0, probability=1.0),
    )
    found = transcript(segment(" R&B it is.", 0.0, 2.0, words))
    assert subtitles(VTT, found, highlight_words=True, max_line_width=6).split("\n\n")[1:] == [
        "00:00.000 --> 00:00.500\n<u>R&amp;B</u> it\nis.",
        "00:00.500 --> 00:01.000\nR&amp;B it\nis.",
        "00:01.000 --> 00:01.250\nR&amp;B<u> it</u>\nis.".replace("<u> it</u>", " <u>it</u>"),
        "00:01.250 --> 00:02.000\nR&amp;B it\n<u>is.</u>",
        "",
    ]


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({"max_words_per_line": 1}, [(0, 500), (520, 560), (560, 600), (600, 1000)]),
        ({"highlight_words": True}, [(0, 500), (500, 540), (540, 580), (580, 1000)]),  # no gap of 20 ms is shown
        ({}, [(0, 1000)]),
    ],
)
def test_a_word_without_duration_is_shown_for_an_image_of_a_film(settings: dict[str, Any], times: Any) -> None:
    spans = ((0.0, 0.5), (0.52, 0.52), (0.52, 0.52), (0.52, 1.0))
    words = [Word(text=" no", start=start, end=end, probability=1.0) for start, end in spans]
    found = subtitles(VTT, transcript(segment(" no no no no", 0.0, 1.0, words)), **settings)
    told = re.findall(r"00:0(\d)\.(\d+) --> 00:0(\d)\.(\d+)", found)
    assert [(int(a + b), int(c + d)) for a, b, c, d in told] == times


@pytest.mark.parametrize("name", ["max_line_width", "max_line_count", "max_words_per_line", "highlight_words"])
def test_settings_that_need_words_say_so(name: str) -> None:
    value = True if name == "highlight_words" else 2
    with pytest.raises(InvalidRequest, match=f"{name} needs a transcript with the times of words.*timestamps='word'"):
        subtitles(SRT, TWO, **{name: value})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_line_width": 0}, "max_line_width=0; allowed: an integer, 1 to 100000; None: as long"),
        ({"max_line_count": 1.5}, "max_line_count=1.5; allowed"),
        ({"max_words_per_line": True}, "max_words_per_line=True; allowed"),
        ({"highlight_words": 1}, "highlight_words=1; allowed: True or False"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        SubtitleSettings(**settings)  # type: ignore[arg-type]


def test_settings_without_effect_are_known() -> None:
    assert list(SubtitleSettings(max_line_count=2).without_effect()) == [
        "max_line_count has no effect without max_line_width"
    ]
    assert list(SubtitleSettings(max_line_width=9, max_line_count=2, max_words_per_line=3).without_effect()) == [
        "max_words_per_line has no effect with max_line_width and max_line_count"
    ]
    assert not list(SubtitleSettings(max_line_width=9, max_words_per_line=3).without_effect())


# -- JSON ------------------------------------------------------------------------------------------------------------


def test_json_has_what_there_is_and_nothing_empty() -> None:
    bare = json.loads(written(transcript(segment(" a", 0, 1)), JSON, WriterSettings(file="x.wav")))
    assert list(bare) == ["file", "text", "segments", "language", "language_probability", "duration", "task"]
    assert "words" not in bare["segments"][0]
    full = evolve(
        transcript(spoken("a")),
        coverage=(Stretch(start=0.0, end=1.0, kind="speech"),),
        warnings=("cut",),
        language_probabilities={"en": 0.5, "de": 0.5},
    )
    told = json.loads(written(full, JSON))
    assert told["coverage"] == [{"start": 0.0, "end": 1.0, "kind": "speech"}]
    assert (told["warnings"], told["language_probabilities"]) == (["cut"], {"en": 0.5, "de": 0.5})


def test_json_has_the_names_of_whisper() -> None:
    """Those of openai/whisper's ``WriteJSON``, which writes what ``transcribe`` returns: ``new_segment`` in its
    transcribe.py makes the segments, ``add_word_timestamps`` in its timing.py the words. So scripts for it go on."""
    told = json.loads(written(transcript(spoken("a", start=1.25)), JSON))
    assert list(told)[:3] == ["text", "segments", "language"]
    (found,) = told["segments"]
    names = "id seek start end text tokens temperature avg_logprob compression_ratio no_speech_prob words"
    assert list(found) == names.split()
    assert (found["seek"], found["tokens"]) == (125, list(b" a"))
    assert found["words"] == [{"word": " a", "start": 1.25, "end": 1.75, "probability": 0.5}]


def test_json_is_one_line_and_has_no_infinity() -> None:
    """JSON knows none; Python's own would write a word that no other program reads."""
    odd = evolve(segment(" a\nü", 0, 1), avg_logprob=-math.inf, compression_ratio=math.nan)
    text = written(transcript(odd), JSON, WriterSettings(ascii_only=True))
    assert text.count("\n") == 1
    assert text.isascii()
    assert json.loads(text)["segments"][0]["avg_logprob"] is None


def test_verbose_json_has_the_shape_of_the_api_of_openai() -> None:
    found = evolve(transcript(spoken("Hello there.", start=31.2)), task="translate")
    assert json.loads(written(found, VERBOSE_JSON)) == {
        "task": "translate",
        "language": "english",
        "duration": 3723.5,
        "text": "Hello there.",
        "segments": [
            {
                "id": 0,
                "seek": 3120,
                "start": 31.2,
                "end": 32.2,
                "text": " Hello there.",
                "tokens": list(b" Hello there."),
                "temperature": 0.0,
                "avg_logprob": -0.25,
                "compression_ratio": 1.5,
                "no_speech_prob": 0.125,
            }
        ],
        "words": [
            {"word": "Hello", "start": 31.2, "end": 31.7},
            {"word": "there.", "start": 31.7, "end": 32.2},
        ],
    }
    assert "words" not in json.loads(written(TWO, VERBOSE_JSON))


def test_every_format_has_a_name_and_all_are_different_files() -> None:
    assert [each.name for each in formats_of("all")] == ["text", "json", "srt", "vtt", "tsv"]
    assert len({each.extension for each in formats_of("all")}) == 5
    assert all(formats_of(name) == (format_,) for name, format_ in FORMATS.items())
    with pytest.raises(InvalidRequest, match="format='docx'; allowed: 'text', 'json', "):
        formats_of("docx")


# -- speakers ----------------------------------------------------------------------------------------------------------


def said(speaker: str | None, texts: str, start: float) -> Segment:
    one = spoken(texts, start=start)
    return evolve(one, speaker=speaker, words=[evolve(word, speaker=speaker) for word in one.words or ()])


DIALOGUE = transcript(said("A", "Who is there?", 0.0), said("Ada & <b>", "I am.", 2.0), said("Ada & <b>", "Good.", 3.0))


@pytest.mark.parametrize(
    ("format_", "expected"),
    [
        (TEXT, "A: Who is there?|Ada & <b>: I am.|Ada & <b>: Good.|"),
        (
            SRT,
            "1|00:00:00,000 --> 00:00:01,500|A: Who is there?||2|00:00:02,000 --> 00:00:03,000|Ada & <b>: I am.||"
            "3|00:00:03,000 --> 00:00:03,500|Ada & <b>: Good.||",
        ),
        (
            VTT,
            "WEBVTT||00:00.000 --> 00:01.500|<v A>Who is there?||00:02.000 --> 00:03.000|<v Ada &amp; &lt;b&gt;>I am.||"
            "00:03.000 --> 00:03.500|<v Ada &amp; &lt;b&gt;>Good.||",
        ),
    ],
)
def test_lines_and_subtitles_name_the_speaker(format_: Format, expected: str) -> None:
    assert written(DIALOGUE, format_) == expected.replace("|", "\n")
    without_words = evolve(DIALOGUE, segments=tuple(evolve(one, words=None) for one in DIALOGUE.segments))
    assert written(without_words, format_) == expected.replace("|", "\n")
    assert timed_line(DIALOGUE.segments[0]) == "[00:00.000 --> 00:01.500] A: Who is there?"


def test_no_subtitle_has_two_speakers_though_it_runs_on() -> None:
    found = subtitles(SRT, DIALOGUE, max_line_width=60, max_line_count=2)
    assert [line for line in found.splitlines() if ": " in line] == ["A: Who is there?", "Ada & <b>: I am. Good."]
    assert "A: Who <u>is</u> there?" in subtitles(SRT, DIALOGUE, highlight_words=True)


def test_json_has_speakers_only_where_there_are_some() -> None:
    found = evolve(DIALOGUE, turns=(Turn(start=0.0, end=1.5, speaker="A"),))
    told = json.loads(written(found, JSON))
    assert (told["speakers"], told["turns"]) == (["A", "Ada & <b>"], [{"start": 0.0, "end": 1.5, "speaker": "A"}])
    assert {one["speaker"] for one in (told["segments"][0], *told["segments"][0]["words"])} == {"A"}
    assert "speaker" not in written(TWO, JSON) + written(TWO, VERBOSE_JSON)
    assert json.loads(written(found, VERBOSE_JSON))["words"][-1]["speaker"] == "Ada & <b>"
