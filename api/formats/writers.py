"""Writers, one for each format, fed with segments as they become final.

A whole output joins ``writer.begin()``, ``writer.add(segment)`` for each segment in order, and
``writer.end(transcript)``; `written` does all of this at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
from attrs import define, field, frozen

from ...core.errors import InvalidRequest
from ..outputs.languages import language_name
from ..outputs.results import Segment, Transcript, Word
from .cues import Cue, CueMaker, milliseconds, one_line
from .settings import SubtitleSettings

_SEEK_STEPS = 100  # a second: Whisper counts frames of 10 ms
_WHERE_THERE_ARE_SOME = ("coverage", "warnings", "language_probabilities", "turns", "word_times")


def as_object(transcript: Transcript) -> dict[str, Any]:
    """Returns the members that openai/whisper's JSON has (``text``, ``segments``, ``language``), and after them those
    that only a `Transcript` has, without its timings. Empty ``coverage``, ``warnings``, ``language_probabilities``,
    ``speakers``, ``turns`` and ``word_times`` are left out, and so are the ``words`` of a segment that has none.
    """
    segments = [_whisper_segment(segment) | _language(segment, str) for segment in transcript.segments]
    speakers = {"speakers": transcript.speakers} if transcript.speakers else {}
    return {"text": transcript.text, "segments": segments, **speakers, **attrs.asdict(transcript, filter=_is_shown)}


def _is_shown(attribute: attrs.Attribute[Any], value: Any) -> bool:
    if attribute.name in _WHERE_THERE_ARE_SOME:
        return bool(value)
    return attribute.name not in ("segments", "timings")


def as_verbose_object(transcript: Transcript) -> dict[str, Any]:
    """Returns the members of ``verbose_json`` in OpenAI's API (Audio, create transcription). The language is its
    English name. ``words`` has the words without the blanks around them, and is left out if the transcript has no
    words."""
    members = {
        "task": transcript.task,
        "language": None if transcript.language is None else language_name(transcript.language),
        "duration": transcript.duration,
        "text": transcript.text,
        "segments": [_segment(segment) | _language(segment, language_name) for segment in transcript.segments],
    }
    if any(segment.words is not None for segment in transcript.segments):
        members["words"] = [
            {"word": word.text.strip(), "start": word.start, "end": word.end} | _speaker(word)
            for segment in transcript.segments
            for word in segment.words or ()
        ]
    return members


def _whisper_segment(segment: Segment) -> dict[str, Any]:
    words = [
        {"word": word.text, "start": word.start, "end": word.end, "probability": word.probability} | _speaker(word)
        for word in segment.words or ()
    ]
    return _segment(segment) | ({"words": words} if words else {})


def _language(segment: Segment, named: Callable[[str], str]) -> dict[str, Any]:
    return {} if segment.language is None else {"language": named(segment.language)}


def _speaker(spoken: Segment | Word) -> dict[str, Any]:
    return {} if spoken.speaker is None else {"speaker": spoken.speaker}


def _segment(segment: Segment) -> dict[str, Any]:
    """Returns the members of a segment, which have the same names in openai/whisper and in OpenAI's API. ``seek`` is
    the start of the segment in frames of 10 ms, since a transcript does not have the starts of windows. ``speaker`` is
    left out if nobody asked for it.
    """
    return {
        "id": segment.id,
        "seek": round(segment.start * _SEEK_STEPS),
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": list(segment.token_ids),
        "temperature": segment.temperature,
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
        **_speaker(segment),
    }


def as_line(members: Mapping[str, Any], *, ascii_only: bool = False) -> str:
    """Returns ``members`` as one line of JSON. JSON has no infinity and no NaN; they become null."""
    return json.dumps(_finite(members), ensure_ascii=ascii_only, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# ---- writers ---------------------------------------------------------------------------------------------------------


class Writer:
    """Writes one transcript in pieces of text. A piece is empty unless a subclass says otherwise."""

    def begin(self) -> str:
        """Returns the text before the first segment."""
        return ""

    def add(self, segment: Segment) -> str:  # noqa: ARG002
        """Returns the text that can be written now that ``segment`` is final."""
        return ""

    def end(self, transcript: Transcript) -> str:  # noqa: ARG002
        """Returns the rest of the text, after all segments of ``transcript`` were added."""
        return ""


# ---- lines -----------------------------------------------------------------------------------------------------------


def timestamp(milliseconds: int, *, hours: bool, mark: str = ".") -> str:
    """Returns a time as ``01:02:03.004``. Without ``hours`` the hours are left out if they are 0. ``mark`` comes before
    the milliseconds."""
    seconds, rest = divmod(milliseconds, 1000)
    minutes, seconds = divmod(seconds, 60)
    whole, minutes = divmod(minutes, 60)
    head = f"{whole:02d}:" if hours or whole else ""
    return f"{head}{minutes:02d}:{seconds:02d}{mark}{rest:03d}"


def timed_line(segment: Segment) -> str:
    """Returns ``[00:00.000 --> 00:05.000] text`` for a segment, for people who watch; ``A: text`` if its speaker is
    known."""
    start, end = (timestamp(milliseconds(time), hours=False) for time in (segment.start, segment.end))
    return f"[{start} --> {end}] {said_by(segment.speaker)}{one_line(segment.text).strip()}"


def said_by(speaker: str | None) -> str:
    """Returns ``A: ``, which comes before the text of speaker A, or "" if the speaker is not known."""
    return "" if speaker is None else f"{one_line(speaker)}: "


@frozen
class TextWriter(Writer):
    """Writes a line for each segment."""

    def add(self, segment: Segment) -> str:
        text = one_line(segment.text).strip()
        return f"{said_by(segment.speaker)}{text}\n" if text else ""


@frozen
class TsvWriter(Writer):
    """Writes a header, then a line for each segment: start and end in whole milliseconds and the text, separated by
    tabs."""

    def begin(self) -> str:
        return "start\tend\ttext\n"

    def add(self, segment: Segment) -> str:
        text = one_line(segment.text).strip().replace("\t", " ")
        return f"{milliseconds(segment.start)}\t{milliseconds(segment.end)}\t{text}\n" if text else ""


# ---- subtitles -------------------------------------------------------------------------------------------------------


@define
class SrtWriter(Writer):
    """SubRip: numbered cues."""

    settings: SubtitleSettings = field(factory=SubtitleSettings)
    _maker: CueMaker = field(init=False)
    _number: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._maker = CueMaker(self.settings, self.escaped)

    def add(self, segment: Segment) -> str:
        return "".join(map(self._text, self._maker.add(segment)))

    def end(self, transcript: Transcript) -> str:  # noqa: ARG002
        return "".join(map(self._text, self._maker.end()))

    def escaped(self, text: str) -> str:
        """Returns the text of a word or segment, escaped for the format."""
        return text

    def _text(self, cue: Cue) -> str:
        self._number += 1
        start, end = (timestamp(time, hours=True, mark=",") for time in (cue.start, cue.end))
        return f"{self._number}\n{start} --> {end}\n{said_by(cue.speaker)}{cue.text}\n\n"


class VttWriter(SrtWriter):
    """WebVTT. ``&`` and ``<`` in the text are escaped, as the standard requires (WebVTT, section 4.2.2)."""

    def begin(self) -> str:
        return "WEBVTT\n\n"

    def escaped(self, text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;")

    def _text(self, cue: Cue) -> str:
        start, end = (timestamp(time, hours=False) for time in (cue.start, cue.end))
        name = self.escaped(one_line(cue.speaker or "")).replace(">", "&gt;")
        voice = f"<v {name}>" if name else ""  # section 4.2.2
        return f"{start} --> {end}\n{voice}{cue.text}\n\n"


# ---- objects ---------------------------------------------------------------------------------------------------------


@frozen
class ObjectWriter(Writer):
    """Writes one JSON object in one line, at the end."""

    describe: Callable[[Transcript], Mapping[str, Any]]
    ascii_only: bool
    file: str | None = None  # a member that comes first

    def end(self, transcript: Transcript) -> str:
        first = {} if self.file is None else {"file": self.file}
        return as_line({**first, **self.describe(transcript)}, ascii_only=self.ascii_only) + "\n"


# ---- the formats -----------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class WriterSettings:
    """The settings by which a transcript is written.

    Args:
        subtitles: how subtitles are broken into lines.
        file: the name of the audio's file, a member of ``json``.
        ascii_only: escape all characters that are not ASCII in JSON, for an output that is not UTF-8.
    """

    subtitles: SubtitleSettings = field(factory=SubtitleSettings)
    file: str | None = None
    ascii_only: bool = False


@frozen(kw_only=True)
class Format:
    """A format: its name, the extension of its files, and the function that makes its writers. ``is_line``: the output
    is one line, so that outputs of several files can follow each other."""

    name: str
    extension: str
    make: Callable[[WriterSettings], Writer]
    is_line: bool = False
    is_subtitles: bool = False


TEXT = Format(name="text", extension="txt", make=lambda _: TextWriter())
JSON = Format(
    name="json", extension="json", make=lambda one: ObjectWriter(as_object, one.ascii_only, one.file), is_line=True
)
VERBOSE_JSON = Format(
    name="verbose_json",
    extension="json",
    make=lambda one: ObjectWriter(as_verbose_object, one.ascii_only),
    is_line=True,
)
SRT = Format(name="srt", extension="srt", make=lambda settings: SrtWriter(settings.subtitles), is_subtitles=True)
VTT = Format(name="vtt", extension="vtt", make=lambda settings: VttWriter(settings.subtitles), is_subtitles=True)
TSV = Format(name="tsv", extension="tsv", make=lambda _: TsvWriter())

FORMATS: Mapping[str, Format] = {each.name: each for each in (TEXT, JSON, VERBOSE_JSON, SRT, VTT, TSV)}
ALL = "all"
OF_ALL = (TEXT, JSON, SRT, VTT, TSV)  # not verbose_json: its file would have the same name as the file of json


def formats_of(name: str) -> tuple[Format, ...]:
    """Returns the format that is called ``name``, or several formats for ``"all"``.

    Raises:
        InvalidRequest: no format has this name.
    """
    if name == ALL:
        return OF_ALL
    if name not in FORMATS:
        raise InvalidRequest(f"format={name!r}; allowed: {', '.join(map(repr, (*FORMATS, ALL)))}")
    return (FORMATS[name],)


def written(transcript: Transcript, format_: Format, settings: WriterSettings | None = None) -> str:
    """Returns the whole output of ``transcript`` in ``format_``.

    Raises:
        InvalidRequest: the settings of subtitles need words, and the transcript has none.
    """
    writer = format_.make(settings or WriterSettings())
    parts = [writer.begin(), *map(writer.add, transcript.segments), writer.end(transcript)]
    return "".join(parts)
