"""The options of a transcription, their checks, and the callers' objects among them, which the engine's loop calls."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from attrs import evolve, field, fields, frozen

from ...core.checks import (
    Check,
    Refused,
    as_integer,
    as_number,
    by,
    demand,
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
from ...core.model import ModelDescription
from ...core.speech import SAMPLING
from ..inputs.audio import AudioSource
from ..inputs.sources import TRACKS, read_track
from ..outputs.results import Turn
from .speakers import TURNS, AudioDiarizer, are_turns
from .voice import VoiceActivity
from .word_aligner import WordAligner, check_aligns

TASKS = ("transcribe", "translate")
TIMESTAMPS = ("segment", "word", "none")
VOICE_ACTIVITY = ("skip", "off")
ENCODER_CONTEXTS = ("full", "trimmed")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
PREPENDED = "\"'“¿([{-"
APPENDED = "\"'.。,，!！?？:：”)]}、"
_MOST_TOKENS = 1_000_000
_MOST_CLIPS = 100_000
_MOST_SPEAKERS, ANY_SPEAKERS = 50, (1, 10)
_COUNT = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)  # of speakers, as a text
_LONGEST_NAME = 64  # characters
_NAME = f"a text of up to {_LONGEST_NAME} characters, without line ends"

_ELSEWHERE = {
    "audio_ctx": "encoder_context",
    "beams": "beam_size",
    "clips": "clip_timestamps",
    "detect_language": "language=None",
    "fp16": "EngineConfig(dtype='float16')",
    "keywords": "hotwords",
    "lang": "language",
    "max_speakers": "speakers=(least, most)",
    "max_tokens": "max_new_tokens",
    "min_speakers": "speakers=(least, most)",
    "num_beams": "beam_size",
    "num_speakers": "speakers",
    "prompt": "initial_prompt",
    "return_timestamps": "timestamps",
    "sample_len": "max_new_tokens",
    "sample_rate": "sampling_rate",
    "vad": "voice_activity",
    "vad_filter": "voice_activity='skip'",
    "vad_parameters": "vad_threshold=..., vad_speech_pad_ms=..., one option for each member",
    "verbose": "stream_transcription(...), which gives segments as they come",
    "without_timestamps": "timestamps='none'",
    "word_timestamps": "timestamps='word'",
}
"""Names of options in other programs, each with the option that does the same here."""


def _read_temperatures(value: Any) -> tuple[float, ...]:
    values = value.tolist() if isinstance(value, np.ndarray) else value
    found = tuple(map(as_number, values if isinstance(values, list | tuple) else [values]))
    if not found or not all(0.0 <= one < math.inf for one in found):
        raise Refused
    return found


def _read_clips(value: Any) -> tuple[tuple[float, float], ...]:
    try:
        flat = _times(value)
    except (TypeError, ValueError):
        raise Refused from None
    if len(flat) > 2 * _MOST_CLIPS:
        raise Refused
    if len(flat) % 2:
        flat.append(math.inf)
    clips = tuple(zip(flat[::2], flat[1::2], strict=True))
    rising = all(start < end for start, end in clips) and flat == sorted(flat)
    if not rising or any(time < 0.0 or math.isnan(time) for time in flat):
        raise Refused
    return clips


def _times(value: Any) -> list[float]:
    """Returns starts and ends in turn. ``value`` has pairs of (start, end), or starts and ends in turn as a list or as
    a text with commas."""
    if isinstance(value, str):
        return [float(one) for one in value.split(",") if one]
    values = list(value)
    if all(isinstance(one, list | tuple) for one in values):
        return [as_number(time) for start, end in values for time in (start, end)]
    return list(map(as_number, values))


def _hotwords(value: Any) -> str:
    texts = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise Refused
    return ", ".join(texts)


def _speakers(value: Any) -> tuple[int, int] | None:
    if isinstance(value, str) and (found := _COUNT.fullmatch(value)) is not None:
        value = (int(found[1]), int(found[2])) if found[2] else int(found[1])
    if value is None or isinstance(value, bool) or value == "any":
        return ANY_SPEAKERS if value else None
    least, most = map(as_integer, value if isinstance(value, list | tuple) and len(value) == 2 else (value, value))
    if not 1 <= least <= most <= _MOST_SPEAKERS:
        raise Refused
    return least, most


def _known_speakers(value: Any) -> Mapping[str, AudioSource]:
    if not isinstance(value, Mapping):
        raise Refused
    for name in value:
        is_text = isinstance(name, str) and 0 < len(name.strip()) <= len(name) <= _LONGEST_NAME
        if not is_text or not name.isprintable():  # the audio is not shown
            raise InvalidRequest(f"known_speakers has the name {shown(name)}; allowed: {_NAME}")
    return dict(value)


def _has(value: Any, method: str) -> bool:
    """True if ``value`` is an object, and no class, with this method."""
    return callable(getattr(value, method, None)) and not isinstance(value, type)


def _diarizer(value: Any) -> Any:
    if _has(value, "diarize"):
        return value
    if not are_turns(value):
        raise Refused
    return tuple(value)


def _token(value: Any) -> int:
    found = as_integer(value)
    if found < -1:
        raise Refused
    return found


def _voice_activity(value: Any) -> Any:
    if value not in VOICE_ACTIVITY and not _has(value, "listen"):
        raise Refused
    return value


def _aligner(value: Any) -> Any:
    if not _has(value, "align"):
        raise Refused
    return value


@frozen
class Option:
    """The declaration of an option, kept in the metadata of its field. The docstring of `TranscribeOptions` explains
    the option.

    Args:
        marks: some of `LIVE` and `DECODING`.
        choices: the texts among which the option chooses.
        form: the member of the server's form that sets the option; ``None``: no member does.
    """

    marks: frozenset[str]
    choices: tuple[str, ...] = ()
    form: str | None = None


LIVE = "live"
"""Live sessions have the option too."""
DECODING = "decoding"
"""The command's help lists the option under "Decoding"."""


def _option(default: Any, check: Check, *marks: str, choices: tuple[str, ...] = (), form: str | None = None) -> Any:
    return field(default=default, metadata=by(check) | {"option": Option(frozenset(marks), choices, form)})


def _chosen(default: str, choices: tuple[str, ...], *marks: str) -> Any:
    return _option(default, one_of(*choices), *marks, choices=choices)


_TEXT = instance(str, "a text")
_HOTWORDS = Check(_hotwords, "a text, or a list of texts").or_none("none")
_CHECKPOINT = "as the checkpoint says"
_THRESHOLD = number(-math.inf, math.inf).or_none("off")
_TOKENS = several(_token, _MOST_TOKENS, "a list of token ids (integers, 0 or more; -1: the checkpoint's)").or_none(
    _CHECKPOINT
)
_VOICE = Check(_voice_activity, "'skip', 'off', or an object that is a VoiceActivity")
_ALIGNER = Check(_aligner, "an engine whose model aligns texts, or an object that is a WordAligner").or_none(
    "the model finds the times of words itself"
)
_CLIPS = Check(
    _read_clips,
    "rising times in seconds: pairs of (start, end), or starts and ends in turn; the last end may be left out",
)
_TEMPERATURE = Check(_read_temperatures, "one or more numbers, 0 (greedy) or positive").or_none("those of the model")
_BEAMS = integer(1, 64, "; 1 is greedy").or_none("that of the model")
_SPEAKERS = Check(
    _speakers, f"'any', a number of speakers (1 to {_MOST_SPEAKERS}), or the least and the most of them, such as '2-5'"
)
_KNOWN_SPEAKERS = Check(_known_speakers, f"audio by the name of its speaker ({_NAME})")
_DIARIZER = Check(_diarizer, f"an engine whose model finds speakers, or {TURNS}").or_none("the embedded one")
_TRACK = Check(read_track, TRACKS).or_none("the default track")
_SEED = integer(-(2**63), 2**63 - 1).or_none("a fresh seed for each transcription")
_PATIENCE = number(0, 100, above=True).or_none("search until no better text can come")


@frozen(kw_only=True)
class TranscribeOptions:
    """The options of a transcription. docs/speech.md explains them with examples and figures.

    A window is up to 30 s of audio, which the model reads at once. If a window's text is not good enough by the
    thresholds, the window is read again at the next temperature. If no temperature gives good text, the best text is
    taken: one that does not repeat itself before one that does, then the likeliest.

    Args:
        language: the spoken language: a code ("en"), perhaps with a region ("en-US"), an English name ("english") or a
            token ("<|en|>"). ``None``: the model detects it; ``language_detection_segments`` says in how many windows.
        task: ``"transcribe"``, or ``"translate"`` into English.
        initial_prompt: text that the model reads before the first window, to learn names and spelling. With
            ``parallel`` it comes before every piece. If a prompt is longer than half of the model's positions, only
            its last tokens are used, and `Transcript.warnings` says so.
        carry_initial_prompt: give the model ``initial_prompt`` before every window. The text of the earlier windows
            gets the positions that it leaves free.
        hotwords: names and words that the model reads before every window, to spell them alike. A text, or a list of
            texts, which commas join. They come before ``initial_prompt`` and the text of the earlier windows, which get
            the positions that they leave free. If they are longer than half of the model's positions, only their first
            tokens are used, and `Transcript.warnings` says so; a live session refuses them.
        prefix: the beginning of the first window's text. The model continues it; it is not part of the transcript.
        condition_on_previous_text: give the model the text of the earlier windows. This keeps spelling and style
            the same, but a repetition may go on.
        prompt_reset_temperature: text that was sampled at a higher temperature than this is not given to later windows.
            Text that was good at no temperature is not given to them either.
        timestamps: ``"segment"``: segments with their times; ``"word"``: their words with times, too; ``"none"``: one
            segment per window.
        aligner: a model that finds the times of words, in place of the model that transcribes. It is an `Engine`, or a
            `WordAligner` of the caller, and needs ``timestamps="word"``.
        temperature: one or several temperatures, tried in order until a text is good; 0 is beam search, or greedy
            decoding with ``beam_size=1``. Several are a list, a tuple or an array. ``None``: 0, 0.2, 0.4, 0.6, 0.8 and
            1; 0 alone for models whose tokens are not sampled.
        beam_size: the number of hypotheses that beam search follows at temperature 0; 1 is greedy decoding. ``None``: 5
            for Whisper, 1 for other models.
        patience: beam search ends when so many hypotheses are finished: this number times ``beam_size`` (Kasai et al.
            2022); ``None``: when no running hypothesis can become better.
        length_penalty: the log-probability of a hypothesis is divided by its length to this power.
        repetition_penalty: above 1, tokens that the window's text already has become less likely. Logits that are
            positive are divided by it, others are multiplied. 1: off.
        no_repeat_ngram_size: no sequence of this many tokens occurs twice in a window's text, timestamps included. 0:
            off.
        max_new_tokens: the most tokens of a window's text, timestamps included. ``None``: half of the model's
            positions, which are the most in any case.
        best_of: the number of texts that are sampled together at each temperature above 0; the likeliest is taken.
        compression_ratio_threshold: a text with a higher compression ratio than this repeats itself, so the next
            temperature is tried. ``None``: off.
        logprob_threshold: a text with a lower average log-probability than this is improbable, so the next temperature
            is tried. ``None``: off.
        no_speech_threshold: a window is silent if its probability of no speech is higher than this and its text is
            improbable or empty. ``None``: off.
        hallucination_silence_threshold: leave out words that probably nobody spoke, if the silence around them is
            longer than this, in seconds. The silence is skipped. The option needs ``timestamps="word"``.
        clip_timestamps: read only these parts of the audio, given as start, end, start, end in seconds; without
            the last end, the last part reaches to the end of the audio. Pairs of (start, end) are allowed, too.
        max_initial_timestamp: the latest time at which a window's first segment may begin, in seconds. ``None``: as the
            checkpoint says.
        suppress_tokens: the ids of the tokens that are never sampled, in place of the checkpoint's list; -1 stands for
            that list. Special tokens that no text has are never sampled in any case.
        prepend_punctuations: the punctuation marks that belong to the word after them.
        append_punctuations: the punctuation marks that belong to the word before them.
        voice_activity: ``"skip"``: stretches without voice are not read; ``"off"``: everything is read. A
            `VoiceActivity` of the caller: as ``"skip"``, with this detector in place of Silero.
        vad_threshold: a frame of 32 ms begins speech if its probability of speech is this or higher.
        vad_neg_threshold: speech may end at a frame with a lower probability than this. ``None``: ``vad_threshold``
            less 0.15, but at least 0.01.
        vad_min_speech_duration_ms: speech between two pauses of 0.3 s that is shorter than this counts as noise.
        vad_max_speech_duration_s: the longest window, in seconds; no more than the model's own. ``None``: the model's.
        vad_min_silence_duration_ms: silence of this length or longer ends a window, and is not read.
        vad_speech_pad_ms: the silence that is read before and after speech, at most half of a pause.
        encoder_context: ``"full"``: silence fills a short window up to the model's 30 s; ``"trimmed"``: only two
            seconds of silence are added, which takes less time. If the text is not good, the window is read again in
            full.
        parallel: cut the audio where nobody speaks and read the pieces at the same time. No piece gets the text
            before it.
        language_detection_segments: the language is detected in up to this many windows, until it is certain.
        language_detection_threshold: a language with this probability or more is certain.
        multilingual: detect the language of each window.
        punctuation: write punctuation and capital letters. ``False``: the model writes neither.
        speakers: find out who speaks, and name the speakers A, B and so on. ``True`` (``"any"``): up to 10 speakers; or
            their number, or the least and the most of them as ``(2, 5)`` or ``"2-5"``. The transcript has the speakers
            of segments and words, and its ``turns``. Streamed segments have none, since voices are told apart only when
            all are heard.
        known_speakers: audio in which a speaker speaks alone, by the name of the speaker, which then replaces A or B.
            Each audio has 1.6 s of speech or more (4 s are safer), and is up to 60 s long.
        diarizer: a model that finds out who speaks, in place of the one that is part of Triolet. An engine with such a
            model (see `Engine.diarize`), an object of your own with that method, or the turns that
            it has found. It counts the speakers itself, and hears the audio first.
        audio_track: the audio track that is read, by its number, from 1 on, or by its language. ``None``: the one that
            the file marks as its default, or else the first.
        max_audio_seconds: refuse audio that is longer than this, as soon as that is known. ``None``: no bound.
        strict: refuse audio that is damaged or cut short, or whose times leave out a part. By default what is lost
            counts as silence, and `Transcript.warnings` says so.
        seed: the seed of sampling above temperature 0; each further temperature takes the next seed. ``None``: a fresh
            seed.

    Raises:
        InvalidRequest: a value that no model allows. `Recipe` refuses values that its model does not allow.
    """

    language: str | None = _option(None, _TEXT.or_none("the model detects it"), LIVE, form="language")
    task: str = _chosen("transcribe", TASKS, LIVE)
    initial_prompt: str | None = _option(None, _TEXT.or_none("nothing comes before"), LIVE, form="prompt")
    carry_initial_prompt: bool = _option(False, flag(), LIVE)
    hotwords: str | None = _option(None, _HOTWORDS, LIVE, form="hotwords")
    prefix: str | None = _option(None, _TEXT.or_none("the model begins the text"))
    condition_on_previous_text: bool = _option(True, flag(), LIVE, form="condition_on_previous_text")
    prompt_reset_temperature: float = _option(0.5, number(0, math.inf), LIVE)
    timestamps: str = _chosen("segment", TIMESTAMPS)
    aligner: WordAligner | None = _option(None, _ALIGNER)  # noqa: RUF009  (a field)
    temperature: tuple[float, ...] | None = _option(None, _TEMPERATURE, LIVE, DECODING, form="temperature")
    beam_size: int | None = _option(None, _BEAMS, LIVE, DECODING, form="beam_size")
    patience: float | None = _option(1.0, _PATIENCE, LIVE, DECODING)
    length_penalty: float = _option(1.0, number(-10, 10), LIVE, DECODING)
    repetition_penalty: float = _option(1.0, number(0.001, 1000, "; 1 is off"), LIVE, DECODING)
    no_repeat_ngram_size: int = _option(0, integer(0, _MOST_TOKENS, "; 0 is off"), LIVE, DECODING)
    max_new_tokens: int | None = _option(
        None, integer(1, _MOST_TOKENS).or_none("half of the model's positions"), LIVE, DECODING
    )
    best_of: int = _option(5, integer(1, 64), LIVE, DECODING, form="best_of")
    compression_ratio_threshold: float | None = _option(2.4, _THRESHOLD, LIVE, DECODING)
    logprob_threshold: float | None = _option(-1.0, _THRESHOLD, LIVE, DECODING)
    no_speech_threshold: float | None = _option(0.6, _THRESHOLD, LIVE, DECODING)
    hallucination_silence_threshold: float | None = _option(None, number(0, math.inf).or_none("off"))
    clip_timestamps: tuple[tuple[float, float], ...] = _option((), _CLIPS)
    max_initial_timestamp: float | None = _option(None, number(0, math.inf).or_none(_CHECKPOINT), DECODING)
    suppress_tokens: tuple[int, ...] | None = _option(None, _TOKENS, LIVE, DECODING)
    prepend_punctuations: str = _option(PREPENDED, _TEXT, LIVE)
    append_punctuations: str = _option(APPENDED, _TEXT, LIVE)
    voice_activity: str | VoiceActivity = _option("skip", _VOICE, choices=VOICE_ACTIVITY)  # noqa: RUF009  (a field)
    vad_threshold: float = _option(0.5, number(0, 1))
    vad_neg_threshold: float | None = _option(None, number(0, 1).or_none("vad_threshold less 0.15"))
    vad_min_speech_duration_ms: float = _option(100.0, number(0, 60_000))
    vad_max_speech_duration_s: float | None = _option(None, number(1, math.inf).or_none("the model's window"))
    vad_min_silence_duration_ms: float = _option(3_000.0, number(0, 3_600_000))
    vad_speech_pad_ms: float = _option(400.0, number(0, 60_000))
    encoder_context: str = _chosen("full", ENCODER_CONTEXTS, LIVE)
    parallel: bool = _option(False, flag())
    language_detection_segments: int = _option(1, integer(1, 1_000))
    language_detection_threshold: float = _option(0.5, number(0, 1), LIVE)
    multilingual: bool = _option(False, flag(), LIVE, form="multilingual")
    punctuation: bool = _option(True, flag(), LIVE)
    speakers: tuple[int, int] | None = _option(None, _SPEAKERS, form="speakers")
    known_speakers: Mapping[str, AudioSource] = field(
        factory=dict, eq=False, metadata=by(_KNOWN_SPEAKERS) | {"option": Option(frozenset())}
    )
    diarizer: AudioDiarizer | Sequence[Turn] | None = _option(None, _DIARIZER)  # noqa: RUF009  (a field)
    audio_track: int | str | None = _option(None, _TRACK, form="audio_track")
    max_audio_seconds: float | None = _option(None, number(0, math.inf, above=True).or_none("no bound"))
    strict: bool = _option(False, flag())
    seed: int | None = _option(0, _SEED, LIVE, DECODING, form="seed")

    def __attrs_post_init__(self) -> None:
        settle(self)
        if self.hallucination_silence_threshold is not None and self.timestamps != "word":
            raise InvalidRequest(
                f"hallucination_silence_threshold={self.hallucination_silence_threshold:g} with "
                f"timestamps={self.timestamps!r}; allowed: timestamps='word', since it needs the times of words"
            )
        if self.aligner is not None:
            demand(self.timestamps == "word", f"aligner with timestamps={self.timestamps!r}", "timestamps='word'")
            demand(self.task == "transcribe", f"aligner with task={self.task!r}", "task='transcribe'")
        if self.voice_activity == "off":
            reads, skip = "voice_activity='off' with", "voice_activity='skip', which finds"
            demand(not self.parallel, f"{reads} parallel=True", f"{skip} the places to cut")
            demand(
                self.speakers is None or self.diarizer is not None, f"{reads} speakers", f"{skip} where somebody speaks"
            )
            for one in fields(type(self)):
                used = not one.name.startswith("vad_") or getattr(self, one.name) == one.default
                demand(used, f"{one.name} is given with voice_activity='off', which reads everything", "one of the two")
        counts = self.diarizer is not None and (self.known_speakers or self.speakers not in (None, ANY_SPEAKERS))
        named = "known_speakers" if self.known_speakers else "a number of speakers"
        demand(not counts, f"{named} is given with diarizer, which counts speakers itself", "speakers='any'")
        told = "no speakers" if self.speakers is None else f"speakers up to {self.speakers[1]}"
        demand(
            len(self.known_speakers) <= (self.speakers or (0, 0))[1],
            f"known_speakers has {len(self.known_speakers)} names, with {told}",
            "speakers='any', or as many speakers as names, or more",
        )
        no_first = "prefix is given with parallel=True, which has no first window"
        demand(self.prefix is None or not self.parallel, no_first, "one of the two")


OF_MODELS = SAMPLING | {
    "carry_initial_prompt",
    "encoder_context",
    "hotwords",
    "initial_prompt",
    "language_detection_segments",
    "language_detection_threshold",
    "max_initial_timestamp",
    "no_speech_threshold",
    "punctuation",
}
"""The options that not all models have; `SpeechFacts.options` names those of a model."""
OPTIONS: Mapping[str, Option] = {one.name: one.metadata["option"] for one in fields(TranscribeOptions)}


def read_options(given: Mapping[str, Any]) -> TranscribeOptions:
    """Returns the options that a caller gave by name.

    Raises:
        InvalidRequest: an unknown name (the message names a similar one), a value that is not allowed, or an aligner
            that is an engine of another kind of model.
    """
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        names = (*OPTIONS, "priority", "request_id", "sampling_rate", "wait")
        raise unknown_name(unknown[0], names, _ELSEWHERE, owner="a transcription")
    options = TranscribeOptions(**given)
    model = getattr(options.aligner, "model", None)
    if isinstance(model, ModelDescription):
        check_aligns(model)
    return options


# ---- callers' objects ------------------------------------------------------------------------------------------------


_METHODS = {"aligner": "align", "diarizer": "diarize"}


async def _ask(ask: Callable[..., Awaitable[Any]], function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return await ask(partial(function, *given, **named))


def reachable(
    options: TranscribeOptions, *, awaits: bool, ask: Callable[..., Awaitable[Any]] | None = None
) -> TranscribeOptions:
    """Returns ``options`` with an aligner and a diarizer that the engine's loop can call. ``ask`` calls a function on
    the callers' side; ``None``: the engine's loop is the callers'.

    Raises:
        InvalidRequest: a method is async and should be plain, or the other way round, as ``awaits`` says.
    """
    for name, method in _METHODS.items():
        given = getattr(options, name)
        function = getattr(given, method, None)  # None: there is no such object, or it is a list of turns
        if function is None:
            continue
        if inspect.iscoroutinefunction(function) is not awaits:
            kind = "an Engine, or an object with an async" if awaits else "a SyncEngine, or an object with a plain"
            raise InvalidRequest(f"{name}={given!r:.200}; allowed here: {kind} method {method}")
        if ask is not None:
            changes: dict[str, Any] = {name: SimpleNamespace(**{method: partial(_ask, ask, function)})}
            options = evolve(options, **changes)
    return options
