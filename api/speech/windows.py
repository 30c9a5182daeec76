"""Reads one window's tokens: its spans of text, where the next window starts, how good the text is."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from attrs import frozen

from ...core.plan import AlignedTokens
from ...core.request import FinishReason
from ...core.timings import Timings
from .options import TranscribeOptions


@frozen(kw_only=True)
class Generated:
    """The output of one request. ``token_ids`` has no end-of-text token; ``logprobs`` has a value for each of these
    tokens, and perhaps one for the end-of-text token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    probe: tuple[float, ...] | None = None  # log-probabilities, as `Request.probe` asked
    aligned: AlignedTokens | None = None  # as `Request.alignment` asked
    timings: Timings | None = None


@frozen
class Span:
    """Text tokens between two timestamps, in timestamp steps from the window's start; ``end`` is ``None`` where the
    text goes on to the end of the window."""

    start: int
    end: int | None
    token_ids: tuple[int, ...]


@frozen
class WindowCut:
    """One window's spans, and where the next window starts, in timestamp steps from this window's start; ``None``: at
    this window's end."""

    spans: tuple[Span, ...]
    next_start: int | None


def cut_window(token_ids: Sequence[int], begin_id: int, *, finished: bool, least: int) -> WindowCut:
    """Reads the timestamps (ids from ``begin_id`` on) in a window's tokens, whatever they are.

    A timestamp after text ends a span. The window is used up where its last text has an end timestamp and no token
    follows. Where a new span was opened, or the text was cut off (``finished`` is false, or no end timestamp), the next
    window starts at the end of the last complete span. Without a complete span, or where the next window would move on
    by less than ``least`` steps, the window is used up too, and the text that was cut off is its last span.
    """
    spans: list[Span] = []
    opened: int | None = None
    text: list[int] = []
    for token in token_ids:
        if token < begin_id:
            text.append(token)
        elif text:
            spans.append(Span(opened or 0, token - begin_id, tuple(text)))
            opened, text = None, []
        else:
            opened = token - begin_id
    reached = spans[-1].end or 0 if spans else 0
    cut_off = not finished or bool(text) or opened is not None
    if cut_off and reached >= least:
        return WindowCut(tuple(spans), reached)
    if text:
        spans.append(Span(reached if opened is None else opened, None, tuple(text)))
    return WindowCut(tuple(spans), None)


def compression_ratio(text: str) -> float:
    """UTF-8 bytes over zlib-compressed bytes: repetitions make it large."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@frozen(kw_only=True)
class Assessment:
    """One window's text at one temperature, and how good it is."""

    text: str
    avg_logprob: float
    no_speech_prob: float
    compression_ratio: float
    temperature: float

    @classmethod
    def of(cls, generated: Generated, text: str, temperature: float) -> Assessment:
        """Rates ``generated``. The average counts the end-of-text token, as Radford et al.'s code does."""
        return cls(
            text=text,
            avg_logprob=sum(generated.logprobs) / (len(generated.token_ids) + 1),
            no_speech_prob=math.exp(generated.probe[0]) if generated.probe else 0.0,
            compression_ratio=compression_ratio(text),
            temperature=temperature,
        )

    def is_improbable(self, options: TranscribeOptions) -> bool:
        """True if the tokens were improbable."""
        limit = options.logprob_threshold
        return limit is not None and not self.avg_logprob >= limit

    def is_silent(self, options: TranscribeOptions) -> bool:
        """True if nobody speaks in the window: the model says so, and its text is not convincing."""
        limit = options.no_speech_threshold
        if limit is None or self.no_speech_prob <= limit:
            return False
        return options.logprob_threshold is None or self.is_improbable(options) or not self.text.strip()

    def is_good(self, options: TranscribeOptions) -> bool:
        """True if no other temperature is needed."""
        limit = options.compression_ratio_threshold
        repeats = limit is not None and self.compression_ratio > limit
        return self.is_silent(options) or not (repeats or self.is_improbable(options))
