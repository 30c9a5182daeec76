"""The seam between transcriptions and models of speech: `SpeechModel`, and the values that cross it.

A transcription finds speech, cuts windows, keeps the text before a window, judges texts and makes segments, and knows
no model. A `SpeechModel` turns one window into the prompt of a request, and the tokens of its answer into spans. It
decides nothing about windows and sampling.
"""

from __future__ import annotations

import enum
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from .request import Alignment, EncoderItem, LogitRules, Probe, Request

SAMPLING = frozenset(
    {"beam_size", "best_of", "length_penalty", "no_repeat_ngram_size", "patience", "prefix", "repetition_penalty"}
    | {"suppress_tokens", "temperature"}
)
"""The options of models whose tokens are sampled, for `SpeechFacts.options`."""

_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "MYANMAR", "KHMER", "TIBETAN", "FULLWIDTH", "IDEOGRAPHIC")


def is_unspaced(character: str) -> bool:
    """True if ``character`` belongs to a script that has no blanks between words."""
    return unicodedata.name(character, "").startswith(_UNSPACED)


def continuing(text: str) -> str:
    """Returns ``text`` without outer blanks, as it continues other text: after a blank, unless it is empty or its
    script has no blanks."""
    bare = text.strip()
    return bare if not bare or is_unspaced(bare[0]) else f" {bare}"


class Detection(enum.Enum):
    """The way in which a model finds the spoken language if the caller names none."""

    PROBED = "probed"  # a request of its own gives the probability of each language
    WRITTEN = "written"  # the model writes the language beside the text
    SILENT = "silent"  # the model writes the text in the right language, and does not say which
    NAMED = "named"  # it does not: the caller must name one of several languages


@frozen(kw_only=True)
class SpeechFacts:
    """The abilities and limits of a speech model.

    Args:
        window_samples: the most samples of one window.
        step_samples: the number of samples in one step. Times in `Span` and in the answer to an alignment count steps.
        most_tokens: the most tokens of a window's text, prefix included.
        history_tokens: the most tokens of text before a window; 0: the model reads no such text.
        languages: the codes of the languages that a caller may name; empty: none.
        detection: the way in which the language is found.
        tasks: ``"transcribe"``, or ``"translate"`` too.
        begins: the model continues the tokens that it is given as the beginning of a text.
        names_speakers: the model writes who speaks. A name belongs to one window, so windows are as long as can be.
        word_times: the way in which the model itself finds the times of words, as in `Transcript.word_times`; ``None``:
            it cannot.
        word_fault: the reason why it cannot.
        lead_steps: the steps by which the times of an alignment are ahead of the sound.
        first_step: the step of the first token of a text that has a token for each step; ``None``: it has not.
        reuses: of an audio that goes on, the encoder computes only what is new (`EncoderItem.follows`).
        stream_samples: the most samples of an utterance that a live session feeds piece by piece, since the model hears
            on where it was; 0: it hears whole windows.
        options: the names of the options that not all models have, and that this model has.
        defaults: the values of options whose default is the model's.
    """

    window_samples: int
    step_samples: int
    most_tokens: int
    history_tokens: int = 0
    languages: tuple[str, ...] = ()
    detection: Detection = Detection.SILENT
    tasks: tuple[str, ...] = ("transcribe",)
    begins: bool = False
    names_speakers: bool = False
    word_times: str | None = None
    word_fault: str = "it knows no times"
    lead_steps: int = 0
    first_step: int | None = None
    reuses: bool = False
    stream_samples: int = 0
    options: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(factory=dict)


@frozen(kw_only=True, eq=False)
class Sound:
    """One window as the model reads it.

    Args:
        samples: the samples of the window, float32, shape (n,).
        item: the encoder item. All requests of the window share it, and so its encoding.
        whole: ``False``: silence was left out, and the window may be read again in full.
        heard: what `SpeechModel.draft` needs besides.
    """

    samples: Any
    item: EncoderItem
    whole: bool = True
    heard: Any = None


@frozen(kw_only=True)
class Ask:
    """The question about one window.

    Args:
        language: the code of the language; ``None``: the model finds it.
        task: one of `SpeechFacts.tasks`.
        timestamps: the text shall have times, if the model writes them.
        before: the tokens of the text before the window.
        begun: the known first tokens of the text, which the answer continues (`SpeechFacts.begins` only).
        hotwords: names and words as text, for models that read them so.
        prompt: a description of the audio as text, for models that read it so.
        suppress: the tokens that the caller forbids in place of the checkpoint's; ``None``: the checkpoint's.
        latest: the latest time, in seconds, at which the first span may begin; ``None``: the checkpoint's.
        punctuation: the text shall have punctuation and capital letters.
    """

    language: str | None
    task: str = "transcribe"
    timestamps: bool = True
    before: tuple[int, ...] = ()
    begun: tuple[int, ...] = ()
    hotwords: str = ""
    prompt: str = ""
    suppress: tuple[int, ...] | None = None
    latest: float | None = None
    punctuation: bool = True


@frozen(kw_only=True)
class Draft:
    """The part of a request that the model decides."""

    token_ids: tuple[int, ...]
    items: tuple[EncoderItem, ...]
    rules: LogitRules
    max_tokens: int
    probe: Probe | None = None  # for the probability that nobody speaks, or for those of the languages


@frozen
class Span:
    """A stretch of a window's text. Its times count steps from the window's start. ``end`` is ``None`` if the text goes
    on to the end of the window. ``token_ids`` includes the tokens of times. ``first`` is the index of the span's first
    token among the window's tokens. ``text`` continues that of earlier spans, see `continuing`; ``None``: the text of
    the tokens does so. ``speaker`` is the name that the model gives to who speaks; ``None``: it gives none.
    """

    start: int
    end: int | None
    token_ids: tuple[int, ...]
    first: int = field(default=0, eq=False)
    text: str | None = None
    speaker: str | None = None


@frozen
class WindowCut:
    """The spans of one window, and the start of the next window in steps from this window's start. ``next_start`` is
    ``None`` if the next window starts at this window's end. ``closed`` is true if the model says that nobody speaks
    after the last span. ``language`` is the code of the language that the model wrote.
    """

    spans: tuple[Span, ...]
    next_start: int | None = None
    closed: bool = False
    language: str | None = None


@frozen(kw_only=True)
class WordTokens:
    """The tokens of a window for which times are requested.

    Args:
        special: the tokens before the window's text, such as <|startoftranscript|> and the language.
        written: all tokens that the model wrote in the window, including timestamps but not the end-of-text token.
        text: the number of text tokens in the vocabulary; special tokens and timestamps come after them.
    """

    special: tuple[int, ...]
    written: tuple[int, ...]
    text: int

    @property
    def start(self) -> int:
        """The position of the first token that is aligned. As in transformers, a timestamp at the beginning is not
        aligned, but counts as a token before the first word.
        """
        return len(self.special) + (self.written[0] >= self.text)

    @property
    def aligned(self) -> tuple[int, ...]:
        """The tokens that are aligned."""
        return self.written[self.start - len(self.special) :]

    def request(self, request_id: str, item: EncoderItem, *, frames: int) -> Request | None:
        """Returns a request for the times of the tokens, or ``None`` if none of them is text.

        Args:
            item: the item of the window itself, so that its encoding and its cross-attention slot are shared.
            frames: the number of steps that contain audio.
        """
        if not any(token < self.text for token in self.written):
            return None
        return Request(
            id=request_id,
            prompt_token_ids=(*self.special, *self.written),
            items=(item,),
            alignment=Alignment(start=self.start, frames=max(1, frames), among=self.text),
        )


class SpeechModel(Protocol):
    """Reads windows of audio by requests to its engine. Methods may be called in several threads, so a speech model
    never changes. It can be pickled."""

    @property
    def facts(self) -> SpeechFacts:
        """The abilities and limits."""

    def hear(self, samples: Any, *, trimmed: bool = False) -> Sound:
        """Returns a window as the model reads it. The call may take milliseconds.

        Args:
            samples: float32, shape (n,), 1 to `SpeechFacts.window_samples`; they are kept.
            trimmed: leave out most of the silence with which the model fills a shorter window.
        """

    def detection(self, sound: Sound) -> Draft:
        """Returns the draft of the request that detects the language (`Detection.PROBED` only). Its probe begins with
        the languages, in the order of `SpeechFacts.languages`."""

    def draft(self, sound: Sound, ask: Ask) -> Draft:
        """Returns the draft of the request for a window's text."""

    def cut(self, token_ids: Sequence[int], ask: Ask) -> WindowCut:
        """Returns the spans of a window's text. Any tokens are allowed."""

    def word_tokens(self, written: tuple[int, ...], ask: Ask) -> WordTokens:
        """Returns the tokens of a window in the form in which the times of its words are requested
        (`SpeechFacts.word_times` only)."""

    def is_text(self, token: int) -> bool:
        """True if ``token`` is text, and neither special nor a time."""

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of ``text`` as a continuation of other text.

        Raises:
            InvalidRequest: the text has a special token.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids``, which are those of a window or a part of them."""


class StreamingModel(SpeechModel, Protocol):
    """A speech model that hears on where it was (`SpeechFacts.stream_samples`). Its frames do not change with what is
    heard later."""

    def hear_on(self, samples: Any, before: Sound | None, language: str | None, *, last: bool) -> Sound | None:
        """Returns the next piece of an audio, or ``None`` if too little is new.

        Args:
            samples: the audio so far, float32, shape (n,). It may have more than the next piece.
            before: the piece before; ``None``: this is the first one.
            last: the audio ends, so that the piece has all of its rest, up to the most that one item may have.
        """

    def draft_on(self, sound: Sound, written: tuple[int, ...]) -> Draft:
        """Returns the draft of the request for the text of a piece. ``written`` are the tokens of the pieces before."""
