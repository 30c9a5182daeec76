"""The answers about one window, and the quality of their texts.

The decisions are those of openai/whisper's ``transcribe.py`` (Radford et al. 2022, section 4.5).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

from attrs import frozen

from ...core.plan import AlignedTokens
from ...core.request import FinishReason
from ...core.speech import Ask, Sound
from ...core.timings import Timings
from .options import TranscribeOptions


@frozen(kw_only=True)
class Generated:
    """The output of one request. ``token_ids`` excludes the end-of-text token. ``logprobs`` has one value for each
    token, and may have one more for the end-of-text token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    probe: tuple[float, ...] | None = None  # the log-probabilities that `Request.probe` asked for
    frames: tuple[tuple[int, int], ...] = ()  # of the tokens, if the model reads frames, as `SampledToken.frames`
    aligned: AlignedTokens | None = None  # the answer to `Request.alignment`
    timings: Timings | None = None

    @property
    def total_logprob(self) -> float:
        """The log-probability of the whole output."""
        return sum(self.logprobs)


def compression_ratio(text: str) -> float:
    """Returns the UTF-8 bytes of ``text`` over its zlib-compressed bytes. Repetitions make the ratio large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@frozen(kw_only=True)
class Assessment:
    """One window's text at one temperature, with the measures of its quality."""

    text: str
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float

    @classmethod
    def of(cls, generated: Generated, text: str, temperature: float) -> Assessment:
        """Returns the assessment of ``generated``. The average log-probability counts the end-of-text token, as the
        code of Radford et al. does."""
        return cls(
            text=text,
            avg_logprob=generated.total_logprob / (len(generated.token_ids) + 1),
            no_speech_prob=math.exp(generated.probe[0]) if generated.probe else 0.0,
            compression_ratio=compression_ratio(text.strip()),
            temperature=temperature,
        )

    def is_improbable(self, options: TranscribeOptions) -> bool:
        """True if the average log-probability of the tokens is below the threshold."""
        limit = options.logprob_threshold
        return limit is not None and not self.avg_logprob >= limit

    def is_silent(self, options: TranscribeOptions) -> bool:
        """True if nobody speaks in the window: the model says that nobody speaks, and the text is empty or too
        improbable to contradict."""
        limit = options.logprob_threshold
        return self._hears_nobody(options) and (limit is None or not self.avg_logprob > limit or not self.text.strip())

    def repeats(self, options: TranscribeOptions) -> bool:
        """True if the text repeats itself."""
        limit = options.compression_ratio_threshold
        return limit is not None and self.compression_ratio > limit

    def is_good(self, options: TranscribeOptions) -> bool:
        """True if no other temperature is needed: the text is good, or nobody speaks."""
        if not (self.repeats(options) or self.is_improbable(options)):
            return True
        return self._hears_nobody(options) and (options.logprob_threshold is None or self.is_improbable(options))

    def _hears_nobody(self, options: TranscribeOptions) -> bool:
        """True if the model says that nobody speaks, whatever the text is."""
        limit = options.no_speech_threshold
        return limit is not None and self.no_speech_prob > limit


@frozen
class Attempt:
    """A window's text at one temperature, and what it was read from."""

    generated: Generated
    assessment: Assessment
    sound: Sound
    ask: Ask


def likeliest(sampled: Iterable[Generated], length_penalty: float = 1.0) -> Generated:
    """Returns the best of several texts that were sampled at one temperature. The score of a text is its
    log-probability divided by its length to the power of ``length_penalty``. The length excludes the end-of-text token.
    The first of equal texts is taken."""
    return max(sampled, key=lambda one: one.total_logprob / max(len(one.token_ids), 1) ** length_penalty)


def best_attempt(attempts: Sequence[Attempt], options: TranscribeOptions) -> Attempt:
    """Returns the best of several attempts if none is good. Attempts that do not repeat themselves come first, and the
    likeliest of them is the best. If all repeat themselves, the one that repeats least is the best."""
    calm = [one for one in attempts if not one.assessment.repeats(options)]
    if calm:
        return max(calm, key=lambda one: one.assessment.avg_logprob)
    return min(attempts, key=lambda one: one.assessment.compression_ratio)
