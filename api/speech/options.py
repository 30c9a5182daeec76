"""The options of a transcription, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import field, fields_dict, frozen

from ...core.checks import (
    Check,
    Refused,
    as_integer,
    as_number,
    flag,
    instance,
    integer,
    number,
    one_of,
    settle,
    several,
    shown,
    unknown_name,
)
from ...core.errors import InvalidRequest
from .voice import VoiceActivity

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("segment", "word", "none")
VOICE_ACTIVITY = ("skip", "off")
ENCODER_CONTEXTS = ("full", "trimmed")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
_MOST_TOKENS = 1_000_000
_MOST_CLIPS = 100_000

_ELSEWHERE = {
    "audio_ctx": "encoder_context",
    "beams": "beam_size",
    "clips": "clip_timestamps",
    "detect_language": "language=None",
    "fp16": "EngineConfig(dtype='float16')",
    "lang": "language",
    "num_beams": "beam_size",
    "prompt": "initial_prompt",
    "return_timestamps": "timestamps",
    "sample_rate": "sampling_rate",
    "vad": "voice_activity",
    "vad_filter": "voice_activity='skip'",
    "verbose": "stream_transcription(...), which gives segments as they come",
    "without_timestamps": "timestamps='none'",
    "word_timestamps": "timestamps='word'",
}
"""Names that other programs have for what an option does here."""


def _read_temperatures(value: Any) -> tuple[float, ...]:
    values = value.tolist() if isinstance(value, np.ndarray) else value
    found = tuple(map(as_number, values if isinstance(values, list | tuple) else [values]))
    if not found or not all(0.0 <= one < math.inf for one in found):
        raise Refused
    return found


def _read_clips(value: Any) -> tuple[tuple[float, float], ...]:
    """Pairs of (start, end), from pairs, from one list of starts and ends in turn, or from a text of these."""
    values = value.split(",") if isinstance(value, str) else list(value)
    if all(isinstance(one, list | tuple) for one in values):
        flat = [as_number(time) for pair in values for time in _two(pair)]
    else:
        flat = [float(one) if isinstance(value, str) else as_number(one) for one in values if one != ""]
    if len(flat) > 2 * _MOST_CLIPS:
        raise Refused
    if len(flat) % 2:
        flat.append(math.inf)
    rising = all(a < b for a, b in zip(flat[::2], flat[1::2], strict=True)) and flat == sorted(flat)
    if not rising or any(time < 0.0 or math.isnan(time) for time in flat):
        raise Refused
    return tuple(zip(flat[::2], flat[1::2], strict=True))


def _two(pair: Any) -> tuple[Any, Any]:
    first, second = pair
    return first, second


def _clips(value: Any) -> tuple[tuple[float, float], ...]:
    allowed = "seconds, rising: pairs of (start, end), or starts and ends in turn, the last end left out or not"
    try:
        return tuple(_read_clips(value))
    except (Refused, TypeError, ValueError):
        raise InvalidRequest(f"clip_timestamps={shown(value)}; allowed: {allowed}") from None


def _temperatures(value: Any) -> tuple[float, ...]:
    check = Check(_read_temperatures, "one or more numbers, 0 (greedy) or positive")
    return tuple(check.of("temperature", value))


def _token(value: Any) -> int:
    found = as_integer(value)
    if found < 0:
        raise Refused
    return found


def _voice_activity(value: Any) -> Any:
    if value not in VOICE_ACTIVITY and not (callable(getattr(value, "listen", None)) and not isinstance(value, type)):
        raise Refused
    return value


_TEXT = instance(str, "a text")
_THRESHOLD = number(-math.inf, math.inf).or_none("off")

_CHECKS = {
    "language": _TEXT.or_none("the model detects it"),
    "task": one_of(*TASKS),
    "initial_prompt": _TEXT.or_none("nothing comes before"),
    "prefix": _TEXT.or_none("the model begins the text"),
    "condition_on_previous_text": flag(),
    "prompt_reset_temperature": number(0, math.inf),
    "timestamps": one_of(*TIMESTAMPS),
    "beam_size": integer(1, 64, "; 1 is greedy"),
    "patience": number(0, 100, above=True).or_none("until no better text can come"),
    "length_penalty": number(-10, 10),
    "best_of": integer(1, 64),
    "compression_ratio_threshold": _THRESHOLD,
    "logprob_threshold": _THRESHOLD,
    "no_speech_threshold": _THRESHOLD,
    "hallucination_silence_threshold": number(0, math.inf).or_none("off"),
    "max_initial_timestamp": number(0, math.inf).or_none("as the checkpoint says"),
    "suppress_tokens": several(_token, _MOST_TOKENS, "a list of token ids (integers, 0 or more)").or_none(
        "as the checkpoint says"
    ),
    "prepend_punctuations": _TEXT,
    "append_punctuations": _TEXT,
    "voice_activity": Check(_voice_activity, "'skip', 'off', or an object that is a VoiceActivity"),
    "encoder_context": one_of(*ENCODER_CONTEXTS),
    "parallel": flag(),
    "language_detection_segments": integer(1, 1_000),
    "language_detection_threshold": number(0, 1),
    "multilingual": flag(),
    "strict": flag(),
    "seed": integer(-(2**63), 2**63 - 1).or_none("a fresh one for each transcription"),
}


@frozen(kw_only=True)
class TranscribeOptions:
    """How an audio is transcribed. docs/speech.md explains the options with examples and figures.

    A window is up to 30 s of audio, which the model reads at once. Where a window's text is not good enough by the
    thresholds, it is read again at the next temperature. Where no temperature gives good text, the best of all is
    taken: one that does not repeat itself before one that does, then the likeliest.

    Args:
        language: the spoken language: a code ("en"), an English name ("english") or a token ("<|en|>"); ``None``: the
            model detects it, see ``language_detection_segments``.
        task: ``"transcribe"``, or ``"translate"`` into English.
        initial_prompt: text that comes before the first window (with ``parallel`` before every piece), for names and
            spelling. Of a prompt longer than half of the model's positions the last tokens are kept, and
            `Transcript.warnings` says so.
        prefix: text with which the first window's text begins. The model goes on behind it; it is no part of the
            transcript.
        condition_on_previous_text: give the text of the windows before to the model. So its spelling and style stay
            the same, and a repetition may go on.
        prompt_reset_temperature: text sampled at a higher temperature is not given on, nor is text that was good at no
            temperature.
        timestamps: ``"segment"``: the model cuts segments and tells their times; ``"word"``: each segment has its words
            with their times too; ``"none"``: one segment per window.
        temperature: one or several (a list, a tuple, an array), tried in order; 0 is beam search, or greedy with
            ``beam_size=1``.
        beam_size: hypotheses that beam search follows at temperature 0.
        patience: beam search ends when ``beam_size`` times so many hypotheses are finished (Kasai et al. 2022);
            ``None``: when no running one can become better.
        length_penalty: the power of its length by which a hypothesis' log-probability is divided.
        best_of: texts that are sampled together at each temperature above 0; the likeliest is taken.
        compression_ratio_threshold: text that compresses better repeats itself: next temperature. ``None``: off.
        logprob_threshold: text with a lower average log-probability is improbable: next temperature. ``None``: off.
        no_speech_threshold: a window whose probability of no speech is higher, and whose text is improbable or empty,
            is silent. ``None``: off.
        hallucination_silence_threshold: seconds. Words that do not sound like words, with so much silence around them,
            are left out, and the silence is skipped. Needs ``timestamps="word"``.
        clip_timestamps: read only these parts: pairs of (start, end) in seconds, or starts and ends in turn; a last
            start without end reaches to the end of the audio.
        max_initial_timestamp: seconds; the first timestamp of a window is not later.
        suppress_tokens: tokens that are never sampled, instead of the checkpoint's. Special tokens that no text has are
            never sampled anyway.
        prepend_punctuations: marks that are part of the word behind them.
        append_punctuations: marks that are part of the word before them.
        voice_activity: ``"skip"``: stretches without voice are not read; ``"off"``: everything is. A `VoiceActivity` of
            the caller's: as ``"skip"``, by what it hears instead of Silero.
        encoder_context: ``"full"``: silence is put behind a window that is shorter than the model's, 30 s, as it was
            trained; ``"trimmed"``: two seconds of it, which takes as much less time. Text that is not good is read
            again with all of it.
        parallel: cut the audio where nobody speaks and read the pieces at the same time, none with the text before it.
        language_detection_segments: the language is detected in up to so many windows, until it is certain.
        language_detection_threshold: a language with this probability is certain.
        multilingual: detect the language of every window anew.
        strict: refuse audio that breaks off; by default it is transcribed up to there, and `Transcript.warnings` says
            so.
        seed: of the sampling at temperatures above 0; each further temperature takes the next seed. ``None``: a fresh
            seed.

    Raises:
        InvalidRequest: a value that no model allows. `Recipe` refuses values that its model does not allow.
    """

    language: str | None = None
    task: str = "transcribe"
    initial_prompt: str | None = None
    prefix: str | None = None
    condition_on_previous_text: bool = True
    prompt_reset_temperature: float = 0.5
    timestamps: str = "segment"
    temperature: tuple[float, ...] = field(default=TEMPERATURES, converter=_temperatures)
    beam_size: int = 5
    patience: float | None = 1.0
    length_penalty: float = 1.0
    best_of: int = 5
    compression_ratio_threshold: float | None = 2.4
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    hallucination_silence_threshold: float | None = None
    clip_timestamps: tuple[tuple[float, float], ...] = field(default=(), converter=_clips)
    max_initial_timestamp: float | None = None
    suppress_tokens: tuple[int, ...] | None = None
    prepend_punctuations: str = PREPENDED
    append_punctuations: str = APPENDED
    voice_activity: str | VoiceActivity = "skip"
    encoder_context: str = "full"
    parallel: bool = False
    language_detection_segments: int = 1
    language_detection_threshold: float = 0.5
    multilingual: bool = False
    strict: bool = False
    seed: int | None = 0

    def __attrs_post_init__(self) -> None:
        settle(self, _CHECKS)
        if self.hallucination_silence_threshold is not None and self.timestamps != "word":
            raise InvalidRequest(
                f"hallucination_silence_threshold={self.hallucination_silence_threshold:g} with "
                f"timestamps={self.timestamps!r}; allowed: timestamps='word', whose times it needs"
            )
        if self.parallel and self.voice_activity == "off":
            raise InvalidRequest("voice_activity='off' with parallel=True; allowed: 'skip', which finds where to cut")
        if self.prefix is not None and self.parallel:
            raise InvalidRequest("prefix with parallel=True; allowed: without it, which has no first window to begin")


def read_options(given: Mapping[str, Any]) -> TranscribeOptions:
    """The options that a caller gave by name.

    Raises:
        InvalidRequest: an unknown name, with the name that is near; a value that is not allowed.
    """
    known = fields_dict(TranscribeOptions)
    unknown = [name for name in given if name not in known]
    if unknown:
        names = (*known, "priority", "request_id", "sampling_rate", "wait")
        raise unknown_name(unknown[0], names, _ELSEWHERE, owner="a transcription")
    return TranscribeOptions(**given)
