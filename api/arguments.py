"""The keyword arguments of `Engine`'s methods, for type checkers, and for `help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import Parameter, isfunction, signature
from typing import Any, TypedDict, TypeVar

from attrs import AttrsInstance, fields

from ..core.request import SamplingParams, Structure
from .inputs.audio import AudioSource
from .inputs.images import ImageSource
from .inputs.messages import Message
from .inputs.prompts import Query
from .live.options import LiveOptions
from .outputs.results import Turn
from .speech.options import TranscribeOptions
from .speech.speakers import AudioDiarizer
from .speech.voice import VoiceActivity
from .speech.word_aligner import WordAligner


class SamplingArguments(TypedDict, total=False):
    """The fields of `SamplingParams`, which explains them."""

    max_tokens: int | None
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    seed: int | None
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    structure: Structure | None
    beam_size: int
    length_penalty: float
    patience: float | None
    skip_special_tokens: bool | None
    max_reasoning_tokens: int | None
    reasoning_effort: str | None


class GenerateArguments(SamplingArguments, total=False):
    """The keywords of `Engine.generate` and `Engine.stream`. `Engine.generate` explains them."""

    prompt_token_ids: Sequence[int] | None
    messages: Sequence[Message] | None
    tools: Sequence[Mapping[str, Any]]
    template_options: Mapping[str, Any] | None
    images: Sequence[ImageSource]
    audio: AudioSource | Sequence[AudioSource] | None
    sampling: SamplingParams | None
    priority: int
    request_id: str | None
    wait: bool
    adapter: str | None


class _SpeechArguments(TypedDict, total=False):
    """The keywords that transcriptions and live sessions share."""

    language: str | None
    task: str
    initial_prompt: str | None
    carry_initial_prompt: bool
    hotwords: str | Sequence[str] | None
    condition_on_previous_text: bool
    prompt_reset_temperature: float
    temperature: float | Sequence[float]
    beam_size: int
    patience: float | None
    length_penalty: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    max_new_tokens: int | None
    best_of: int
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    suppress_tokens: Sequence[int] | None
    prepend_punctuations: str
    append_punctuations: str
    encoder_context: str
    language_detection_threshold: float
    multilingual: bool
    punctuation: bool
    seed: int | None


class TranscribeArguments(_SpeechArguments, total=False):
    """The keywords of `Engine.transcribe`: the fields of `TranscribeOptions`, which explains them."""

    prefix: str | None
    timestamps: str
    aligner: WordAligner | None
    hallucination_silence_threshold: float | None
    clip_timestamps: str | Sequence[float] | Sequence[tuple[float, float]]
    max_initial_timestamp: float | None
    voice_activity: str | VoiceActivity
    vad_threshold: float
    vad_neg_threshold: float | None
    vad_min_speech_duration_ms: float
    vad_max_speech_duration_s: float | None
    vad_min_silence_duration_ms: float
    vad_speech_pad_ms: float
    parallel: bool
    language_detection_segments: int
    speakers: bool | int | tuple[int, int] | str | None
    known_speakers: Mapping[str, AudioSource]
    diarizer: AudioDiarizer | Sequence[Turn] | None
    audio_track: int | str | None
    max_audio_seconds: float | None
    strict: bool


class LiveArguments(_SpeechArguments, total=False):
    """The keywords of `Engine.live`: the fields of `LiveOptions`, and some fields of `TranscribeOptions`."""

    step: float
    endpoint_silence: float
    max_backlog: float


_Class = TypeVar("_Class")
_KEYWORDS: dict[str, tuple[Any, tuple[type[AttrsInstance], ...], dict[str, Any]]] = {
    # by the annotation of `**options`: the types, the classes that have their defaults, and other defaults
    "Unpack[GenerateArguments]": (GenerateArguments, (SamplingParams, Query), {"sampling": None}),
    "Unpack[TranscribeArguments]": (TranscribeArguments, (TranscribeOptions,), {"known_speakers": {}}),
    "Unpack[LiveArguments]": (LiveArguments, (TranscribeOptions, LiveOptions), {"beam_size": 1}),
}


def spelled_out(made: type[_Class]) -> type[_Class]:
    """Decorates a class: in the place of ``**options`` of its methods, `help` shows each keyword and its default."""
    for method in filter(isfunction, vars(made).values()):
        before = signature(method)
        *given, last = before.parameters.values()
        if last.annotation not in _KEYWORDS:
            continue
        typed, explained, others = _KEYWORDS[last.annotation]
        defaults = {one.name: one.default for each in explained for one in fields(each)} | others
        for name, kind in typed.__annotations__.items():
            if name not in before.parameters:
                text = kind.__forward_arg__
                given.append(Parameter(name, Parameter.KEYWORD_ONLY, default=defaults[name], annotation=text))
        setattr(method, "__signature__", before.replace(parameters=given))  # noqa: B010  (mypy knows no such member)
    return made
