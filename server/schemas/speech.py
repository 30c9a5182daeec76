"""Speech: ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import Field, model_validator

from .base import AnswerBody, Body, Ignored, Language, Name, Share, Short, Text, up_to

Words = Text | Annotated[list[Text], up_to(128)]
Least = Annotated[int | None, Field(ge=1, le=100_000)]


class ServerVad(Body):
    """Cut the audio where nobody speaks. Its figures are the server's own."""

    type: Literal["server_vad"]


class SpeechForm(Ignored):
    """The members that both forms have, beside the ``file``."""

    model: Name
    language: Language = Field(
        default=None,
        description="The spoken language, as a code or an English name. Default, and auto: the model detects it.",
    )
    prompt: Text | None = Field(
        default=None, description="Text that the model reads before the audio, to learn names and spelling."
    )
    hotwords: Words | None = Field(
        default=None, description="Names and words that the model reads before every window, as a text or a list."
    )
    vad_filter: bool | None = Field(
        default=None, description="Skip stretches without voice, which is the default; false: read everything."
    )
    speakers: Short | None = Field(
        default=None,
        description="Find out who speaks: any, a number of speakers, or the least and the most, such as 2-5.",
    )
    audio_track: Short | None = Field(
        default=None, description="The audio track that is read: its number, from 1 on, or its language."
    )
    response_format: str = "json"
    max_line_width: Least = Field(default=None, description="The most characters of a line in subtitles.")
    max_line_count: Least = Field(default=None, description="The most lines of a subtitle, beside max_line_width.")
    max_words_per_line: Least = Field(default=None, description="The most words of a subtitle.")
    temperature: Share = Field(
        default=0.0, description="0: beam search, and higher temperatures where the text is not good."
    )
    beam_size: int | None = Field(default=None, ge=1, le=64)
    best_of: int | None = Field(default=None, ge=1, le=64)
    condition_on_previous_text: bool | None = None
    multilingual: bool | None = Field(
        default=None, description="Detect the language of each window, for speech that changes its language."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    priority: int = Field(default=0, ge=-100, le=100, description="Smaller numbers run first.")

    @property
    def subtitles(self) -> dict[str, Any]:
        """The rules of subtitles that are given, by name."""
        given = {name: getattr(self, name) for name in ("max_line_width", "max_line_count", "max_words_per_line")}
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="before")
    @classmethod
    def _as_clients_send_it(cls, members: dict[str, Any]) -> dict[str, Any]:
        """Leaves out members without a text, and makes a list of a single item whose name has no brackets."""
        known = cls.model_fields
        lists = [name for name, one in known.items() if get_origin(one.annotation) is list]
        given = {name: value for name, value in members.items() if value not in ("", [""]) or name not in known}
        return {name: [one] if name in lists and isinstance(one, str) else one for name, one in given.items()}

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.vad_filter is False and (self.speakers is not None or self.response_format == "diarized_json"):
            raise ValueError("vad_filter=false is given, but speakers need voice activity; leave one of the two out")
        for name in self.subtitles:
            if self.response_format not in ("srt", "vtt"):
                raise ValueError(f"{name} is given with response_format {self.response_format}; allowed: srt and vtt")
        return self


class TranscriptionForm(SpeechForm):
    """The members of a form that asks for a transcription, beside the ``file``."""

    response_format: Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"] = "json"
    known_speaker_names: Annotated[list[Short], up_to(10)] = Field(
        default_factory=list, description="The names of speakers that have a reference."
    )
    known_speaker_references: Annotated[list[Text], up_to(10)] = Field(
        default_factory=list, description="Audio in which the speaker of each name speaks alone, as data: URLs."
    )
    keywords: Words | None = Field(default=None, description="The same as hotwords, which OpenAI calls keywords.")
    timestamp_granularities: Annotated[list[Literal["word", "segment"]], up_to(8)] = Field(
        default_factory=list, description="The times in verbose_json, and in the events of a stream in json."
    )
    stream: bool = False
    chunking_strategy: Literal["auto"] | ServerVad | None = Field(
        default=None, description="Cut the audio at pauses, and read the parts at the same time."
    )
    include: Annotated[list[Literal["logprobs"]], up_to(8)] = Field(
        default_factory=list, description="The log-probabilities of tokens, in the format json."
    )

    @model_validator(mode="after")
    def _fits_together(self) -> TranscriptionForm:
        if self.stream and self.response_format not in ("json", "text", "diarized_json"):
            raise ValueError(
                f"stream is given with response_format {self.response_format}; allowed: json, text and diarized_json"
            )
        names, references = self.known_speaker_names, self.known_speaker_references
        if len({*names}) != len(references) or len(names) != len(references):
            raise ValueError(
                f"known_speaker_names has {len({*names})} different names, known_speaker_references {len(references)} "
                "items; allowed: a reference for each name"
            )
        if names and self.response_format != "diarized_json" and self.speakers is None:
            raise ValueError("known_speaker_names needs response_format=diarized_json, or speakers")
        streams_json = self.stream and self.response_format == "json"
        if self.timestamp_granularities and self.response_format != "verbose_json" and not streams_json:
            raise ValueError(
                "timestamp_granularities needs response_format=verbose_json, or stream with response_format=json"
            )
        if self.hotwords is not None and self.keywords is not None:
            raise ValueError("hotwords is given with keywords, which mean the same; give one of the two")
        if self.vad_filter is False and self.chunking_strategy is not None:
            raise ValueError("vad_filter=false is given, but chunking_strategy needs voice activity; leave one out")
        if self.include and self.response_format != "json":
            raise ValueError("include[]=logprobs needs response_format=json")
        return self


class TranslationForm(SpeechForm):
    """The members of a form that asks for a translation into English, beside the ``file``."""

    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"


class DurationUsage(AnswerBody):
    """The seconds of audio that were read."""

    type: Literal["duration"]
    seconds: float


class SpeechLogprob(AnswerBody):
    """A token of the text with its natural log-probability. ``bytes`` are left out where the token is a part of a
    character."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class SpokenLanguage(AnswerBody):
    """A language by its code."""

    code: str


class TranscriptionAnswer(AnswerBody):
    """The format json. ``languages`` has the languages that are spoken, or none where nobody speaks; translations have
    no such member. ``warnings`` is left out where there are none."""

    text: str
    languages: list[SpokenLanguage] | None = None
    logprobs: list[SpeechLogprob] | None = None
    usage: DurationUsage | None = None
    warnings: list[str] | None = None


class VerboseSegment(AnswerBody):
    """A segment in verbose_json. Times in seconds."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    no_speech_prob: float
    speaker: str | None = None
    language: str | None = None


class VerboseWord(AnswerBody):
    """A word in verbose_json. Times in seconds."""

    word: str
    start: float
    end: float
    speaker: str | None = None


class VerboseAnswer(AnswerBody):
    """The format verbose_json. ``language`` is the English name of the text's language: in a transcription that of the
    speech, empty if it is not known; in a translation english.
    """

    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[VerboseSegment] | None = None
    words: list[VerboseWord] | None = None
    usage: DurationUsage
    warnings: list[str] | None = None


class DiarizedSegment(AnswerBody):
    """A segment in diarized_json, and an event of its stream. Times in seconds."""

    type: Literal["transcript.text.segment"]
    id: str
    start: float
    end: float
    text: str
    speaker: str
    language: str | None = None


class DiarizedAnswer(AnswerBody):
    """The format diarized_json: who says what."""

    task: Literal["transcribe"]
    duration: float
    text: str
    segments: list[DiarizedSegment]
    usage: DurationUsage
    warnings: list[str] | None = None


class TextDelta(AnswerBody):
    """An event of a stream: more text. With ``timestamp_granularities`` it has its times in seconds, with
    ``multilingual`` the code of its language."""

    type: Literal["transcript.text.delta"]
    delta: str
    language: str | None = None
    start: float | None = None
    end: float | None = None
    words: list[VerboseWord] | None = None
    logprobs: list[SpeechLogprob] | None = None


class TextDone(AnswerBody):
    """The last event of a stream: the whole text. It has no usage, since OpenAI's counts tokens of audio, and there are
    none here.
    """

    type: Literal["transcript.text.done"]
    text: str
    languages: list[SpokenLanguage]
    logprobs: list[SpeechLogprob] | None = None
    warnings: list[str] | None = None
