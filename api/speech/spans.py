"""`SpeechSpans`: spans of speech, computed from probabilities. Each span is returned as soon as it is final.

The spans of a recording follow from its probabilities in four steps::

    1 voiced    frames at `threshold` or above, and the frames directly after them at `end_threshold` or above
    2 runs      voiced frames side by side, joined over gaps shorter than `min_silence`
    3 dropped   runs shorter than `min_speech`
    4 padded    by `padding` at both ends, within the recording
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from attrs import define, frozen


class SpeechSpan(NamedTuple):
    """Samples ``start`` to ``stop`` of a recording, in which somebody speaks."""

    start: int
    stop: int


@frozen(kw_only=True)
class SpanRules:
    """The rules that decide what counts as speech. All but the thresholds are in seconds.

    Args:
        threshold: speech begins at this probability or above.
        end_threshold: speech may have ended below this probability.
        min_speech: shorter speech counts as noise.
        min_silence: shorter silence counts as a pause within speech.
        padding: added before and after speech, since its first and last sounds may be too quiet to be found. It is at
            most half of ``min_silence``, so that spans never overlap.
    """

    threshold: float = 0.5
    end_threshold: float = 0.35
    min_speech: float = 0.1
    min_silence: float = 1.0
    padding: float = 0.3


@define
class SpeechSpans:
    """The speech spans of one recording, computed from the probabilities of its frames in order. A span that was
    returned never changes.

    Attributes:
        frames: the number of frames that were heard.
    """

    rules: SpanRules
    sampling_rate: int
    frame_samples: int
    frames: int = 0
    _voiced: bool = False  # the last frame is
    _start: int | None = None  # the first frame of the current run; None: no run
    _stop: int = 0  # the frame after the run's last voiced one

    @property
    def settled(self) -> int:
        """The sample before which the spans are final: all spans that begin before it have been returned."""
        if self._start is not None:
            return self._begin(self._start)
        return max(self.frames * self.frame_samples - self._padding, 0)

    @property
    def open(self) -> SpeechSpan | None:
        """The certain part of the current span; more frames can only make it longer. ``None``: no span is open, or it
        may be too short.
        """
        if self._start is None or self._stop - self._start < self._least_frames:
            return None
        return SpeechSpan(self._begin(self._start), self._stop * self.frame_samples + self._padding)

    def hear(self, probabilities: Iterable[float]) -> list[SpeechSpan]:
        """Adds the probabilities of the next frames. Returns the spans that are final now, in order."""
        found: list[SpeechSpan] = []
        for probability in probabilities:
            found += self._hear(float(probability))
        return found

    # -- one frame -----------------------------------------------------------------------------------------------------

    def _hear(self, probability: float) -> list[SpeechSpan]:
        limit = self.rules.end_threshold if self._voiced else self.rules.threshold
        self._voiced = probability >= limit
        if self._voiced and self._start is None:
            self._start = self.frames
        self.frames += 1
        if self._start is None:
            return []
        if self._voiced:
            self._stop = self.frames
            return []
        return self.end(None) if self.frames - self._stop >= self._silent_frames else []

    def end(self, length: int | None) -> list[SpeechSpan]:
        """Ends the current run, either at the recording's end after ``length`` samples or in silence (``None``).
        Returns its span, if a run is open and not too short."""
        start, self._start = self._start, None
        if start is None or self._stop - start < self._least_frames:
            return []
        stop = self._stop * self.frame_samples + self._padding
        return [SpeechSpan(self._begin(start), stop if length is None else min(stop, length))]

    def _begin(self, start: int) -> int:
        return max(start * self.frame_samples - self._padding, 0)

    # -- the rules in frames -------------------------------------------------------------------------------------------

    @property
    def _padding(self) -> int:
        return round(self.rules.padding * self.sampling_rate)

    @property
    def _least_frames(self) -> int:
        return math.ceil(self.rules.min_speech * self.sampling_rate / self.frame_samples)

    @property
    def _silent_frames(self) -> int:
        return math.ceil(self.rules.min_silence * self.sampling_rate / self.frame_samples)
