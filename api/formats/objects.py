"""The members of a transcript in JSON: as openai/whisper writes them, with more of our own, or as OpenAI's API returns
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from ..outputs.languages import language_name
from ..outputs.results import Segment, Transcript, Word

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
