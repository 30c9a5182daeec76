"""Reads the tokens of one window: its spans of text, the start of the next window, and the quality of the text.

The decisions are those of openai/whisper's ``transcribe.py`` (Radford et al. 2022, section 4.5).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import field, frozen

from ...core.plan import AlignedTokens
from ...core.request import EncoderItem, FinishReason
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
    aligned: AlignedTokens | None = None  # the answer to `Request.alignment`
    timings: Timings | None = None

    @property
    def total_logprob(self) -> float:
        """The log-probability of the whole output."""
        return sum(self.logprobs)


@frozen
class Span:
    """Text between two timestamps. Its times count timestamp steps from the window's start. ``end`` is ``None`` if the
    text goes on to the end of the window. ``token_ids`` includes the timestamps. ``first`` is the index of the span's
    first token among the window's tokens.
    """

    start: int
    end: int | None
    token_ids: tuple[int, ...]
    first: int = field(default=0, eq=False)


@frozen
class WindowCut:
    """The spans of one window, and the start of the next window in timestamp steps from this window's start.
    ``next_start`` is ``None`` if the next window starts at this window's end. ``closed`` is true if a lone timestamp
    ends the window, which means that nobody speaks after it.
    """

    spans: tuple[Span, ...]
    next_start: int | None
    closed: bool = False


def cut_window(token_ids: Sequence[int], begin_id: int) -> WindowCut:
    """Cuts a window's tokens at their timestamps (ids from ``begin_id`` on). Any sequence of tokens is allowed.

    Two timestamps in a row separate two spans. If the window has such a pair, the tokens after the last pair are an
    unfinished span: they are dropped, and the next window starts at the first timestamp of that pair. However, if a
    lone timestamp ends the window, those tokens are its last span, and the next window starts at this window's end.
    Without a pair the whole window is one span. It ends at its last timestamp, or at the window's end if that timestamp
    is 0 or missing.
    """
    is_time = [token >= begin_id for token in token_ids]
    closed = is_time[-2:] == [False, True]
    cuts = [index + 1 for index, pair in enumerate(pairwise(is_time)) if all(pair)]
    if not cuts:
        times = [token - begin_id for token in token_ids if token >= begin_id]
        end = times[-1] if times and times[-1] != 0 else None
        text = any(not time for time in is_time)
        return WindowCut((Span(0, end, tuple(token_ids)),) if text else (), None, closed)
    ends = [*cuts, len(token_ids)] if closed else cuts
    parts = [tuple(token_ids[start:end]) for start, end in pairwise([0, *ends])]
    spans, reached = [], 0
    for part, first in zip(parts, [0, *cuts], strict=False):
        start = part[0] - begin_id if part[0] >= begin_id else reached
        reached = part[-1] - begin_id
        spans.append(Span(start, reached, part, first))
    return WindowCut(tuple(spans), None if closed else reached, closed)


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
    """A window's text at one temperature, and the encoder item that it was read from."""

    generated: Generated
    assessment: Assessment
    item: EncoderItem


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
