"""Properties of the formats: what is parsed back is what was said, in order and in time."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from triolet.api.formats.settings import SubtitleSettings
from triolet.api.formats.writers import SRT, TSV, VTT, Format, WriterSettings, written
from triolet.api.outputs.results import Transcript, Word

from ..api.speech import segment

TEXTS = st.text(alphabet="ab-> <&\n\t\u3000é", min_size=1, max_size=6)
STEPS = st.integers(0, 60) | st.integers(0, 5_000)  # milliseconds
SETTINGS = st.builds(
    SubtitleSettings,
    max_line_width=st.none() | st.integers(1, 12),
    max_line_count=st.none() | st.integers(1, 3),
    max_words_per_line=st.none() | st.integers(1, 4),
    highlight_words=st.booleans(),
)


@st.composite
def transcripts(draw: st.DrawFn) -> Transcript:
    """Segments in order, with words or all without, at times of whole milliseconds."""
    at, segments = 0, []
    has_words = draw(st.booleans())
    for _ in range(draw(st.integers(0, 5))):
        words = []
        for text in draw(st.lists(TEXTS, min_size=1, max_size=5)):
            start = at + draw(STEPS)
            at = start + draw(STEPS)
            words.append(Word(text=f" {text}", start=start / 1000, end=at / 1000, probability=0.5))
        segments.append(
            segment("".join(word.text for word in words), words[0].start, words[-1].end, words if has_words else None)
        )
    return Transcript(
        text="".join(one.text for one in segments).strip(),
        language="en",
        language_probability=0.5,
        duration=at / 1000,
        segments=tuple(segments),
    )


def said(texts: Sequence[str]) -> str:
    """What was said, without blanks, which move to the ends of lines, and with arrows as they are written."""
    return re.sub(r"-{2,}>", "->", re.sub(r"\s", "", "".join(texts)))


def parsed(text: str) -> list[tuple[float, float, list[str]]]:
    """Cues of SRT or WebVTT: start, end, lines."""
    cues = []
    for block in text.removeprefix("WEBVTT\n\n").split("\n\n")[:-1]:
        lines = block.split("\n")
        while " --> " not in lines[0]:
            lines.pop(0)
        start, end = (seconds(time) for time in lines[0].split(" --> "))
        cues.append((start, end, lines[1:]))
    return cues


def seconds(time: str) -> float:
    *hours, minutes, rest = time.replace(",", ".").split(":")
    return float(rest) + 60 * int(minutes) + 3600 * int(hours[0] if hours else 0)


def plain(lines: Sequence[str], format_: Format) -> str:
    text = "".join(lines).replace("<u>", "").replace("</u>", "")
    return text.replace("&lt;", "<").replace("&amp;", "&") if format_ is VTT else text


@given(transcripts(), SETTINGS, st.sampled_from([SRT, VTT]))
def test_subtitles_lose_no_text_and_go_on_in_time(
    found: Transcript, settings: SubtitleSettings, format_: Format
) -> None:
    """Times never go back, each cue lasts, no line is empty or holds an arrow, and without their line ends the texts
    are what was said. Where words are highlighted every cue repeats the text, so that only its times are looked at."""
    if found.segments and found.segments[0].words is None:
        settings = SubtitleSettings()
    cues = parsed(written(found, format_, WriterSettings(subtitles=settings)))
    times = [time for start, end, _ in cues for time in (start, end)]
    assert times == sorted(times)
    assert all(round(end - start, 3) >= 0.04 for start, end, _ in cues), "WebVTT forbids cues without duration"
    assert not cues or times[-1] <= found.duration + 0.04 * len(cues), "they wait for short ones alone"
    assert all(line.strip() and "-->" not in line for _, _, lines in cues for line in lines)
    if not settings.highlight_words:
        texts = [segment.text for segment in found.segments]
        got = said([plain(lines, format_) for _, _, lines in cues])
        assert re.sub(r"-+>", "->", got) == re.sub(r"-+>", "->", said(texts))


@given(transcripts(), st.integers(1, 12), st.integers(1, 3))
def test_lines_keep_their_width_and_subtitles_their_count(found: Transcript, width: int, count: int) -> None:
    """But for a word that is longer than a line."""
    if found.segments and found.segments[0].words is None:
        return
    settings = WriterSettings(subtitles=SubtitleSettings(max_line_width=width, max_line_count=count))
    for _, _, lines in parsed(written(found, SRT, settings)):
        assert len(lines) <= count
        assert all(len(line) <= width or len(line) <= 7 for line in lines)


@given(transcripts())
def test_tsv_is_parsed_back(found: Transcript) -> None:
    head, *rows = written(found, TSV).split("\n")[:-1]
    assert head == "start\tend\ttext"
    spoken = [one for one in found.segments if one.text.strip()]
    for row, one in zip(rows, spoken, strict=True):
        start, end, text = row.split("\t")
        assert (int(start) / 1000, int(end) / 1000) == (one.start, one.end)
        assert said([text]) == said([one.text])
