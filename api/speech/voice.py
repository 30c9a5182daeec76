"""Voice activity: the times at which somebody speaks. A `VoiceActivity` detects it; `silero` has the default one.

`SpeechSpans` makes spans of speech of its probabilities, each as soon as it is final, in four steps::

    1 voiced    frames at `threshold` or above, and the frames directly after them at `end_threshold` or above
    2 runs      voiced frames side by side, joined over gaps shorter than `min_silence`
    3 dropped   runs shorter than `min_speech`
    4 padded    by `padding` at both ends, within the recording
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

from ...core.errors import InvalidRequest
from ..inputs.audio import Samples

Probabilities: TypeAlias = npt.NDArray[np.float32]


class Listener(Protocol):
    """Computes the probabilities of speech in one stream of samples, from its beginning to its end. One thread at a
    time calls it, but not always the same thread."""

    def hear(self, samples: Samples) -> Probabilities:
        """Adds the next samples: float32 of shape (n,) for any n, with full scale at 1.0.

        Returns the probability of speech, 0 to 1, of each frame that these samples complete: shape (frames,). The
        probabilities do not depend on how the stream is divided among the calls.
        """
        ...

    def end(self) -> Probabilities:
        """Ends the stream. Returns the probability of the last frame if it is incomplete, else an empty array."""
        ...


class VoiceActivity(Protocol):
    """Detects speech, frame by frame. It may be slow: it is called in worker threads.

    Attributes:
        sampling_rate: the rate of the samples that listeners hear, in Hz; it must be the speech model's, 16,000 for
            Whisper.
        frame_samples: the number of samples in one frame. Frames follow each other without a gap.
    """

    @property
    def sampling_rate(self) -> int: ...

    @property
    def frame_samples(self) -> int: ...

    def listen(self) -> Listener:
        """Returns a new listener. The first call may load data that all listeners share."""
        ...


@define(eq=False)
class CheckedListener:
    """Asks ``detector`` for the probabilities of one stream at ``rate`` Hz, and checks its answers. Its calls block.

    Attributes:
        frames: the number of probabilities so far.

    Raises:
        InvalidRequest: the detector has another rate, or answers with something other than probabilities.
    """

    detector: VoiceActivity
    rate: int
    frames: int = field(default=0, init=False)
    _heard: int = field(default=0, init=False)
    _listener: Listener | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.detector.sampling_rate != self.rate:
            raise InvalidRequest(
                f"the voice activity detector has {self.detector.sampling_rate} Hz; allowed: {self.rate} Hz, the rate "
                "of the model"
            )

    def hear(self, samples: Samples, *, last: bool = False) -> Probabilities:
        """Adds the next samples. Returns the probabilities of the frames that they complete; with ``last`` also that of
        an incomplete frame."""
        if self._listener is None:
            self._listener = self.detector.listen()
        parts = [np.asarray(self._listener.hear(samples)) if len(samples) else np.zeros(0, np.float32)]
        if last:
            parts.append(np.asarray(self._listener.end()))
        answer = next((part for part in parts if part.ndim != 1), np.concatenate([part.ravel() for part in parts]))
        self._heard += len(samples)
        frame = self.detector.frame_samples
        due = (-(-self._heard // frame) if last else self._heard // frame) - self.frames
        if answer.shape != (due,) or answer.dtype.kind != "f" or not ((answer >= 0) & (answer <= 1)).all():
            raise InvalidRequest(
                f"the voice activity detector returned {answer.dtype} of shape {answer.shape}; allowed: {due} "
                f"probabilities (floats from 0 to 1), one for each frame of {frame} samples"
            )
        self.frames += due
        return answer


def at_rate(detector: VoiceActivity, rate: int) -> VoiceActivity:
    """Returns ``detector`` for samples at ``rate`` Hz; unchanged if its frames are not whole samples there."""
    is_whole = detector.frame_samples * rate % detector.sampling_rate == 0
    return AtRate(detector, rate) if rate != detector.sampling_rate and is_whole else detector


@frozen(eq=False)
class AtRate:
    """A `VoiceActivity` that hears samples at another rate than its ``detector``, in frames of the same duration."""

    detector: VoiceActivity
    sampling_rate: int

    @property
    def frame_samples(self) -> int:
        return self.detector.frame_samples * self.sampling_rate // self.detector.sampling_rate

    def listen(self) -> Listener:
        return _Resampling(self.detector.listen(), self.frame_samples, self.sampling_rate / self.detector.sampling_rate)


@define(eq=False)
class _Resampling:
    """A listener at another rate. Means of three samples and straight lines between them are enough for a detector, and
    need no sample of the next frame."""

    listener: Listener
    frame: int
    ratio: float
    _rest: Samples = field(factory=partial(np.zeros, 0, np.float32), init=False)
    _before: Samples = field(factory=partial(np.zeros, 2, np.float32), init=False)  # the samples before the rest

    def hear(self, samples: Samples) -> Probabilities:
        known = np.concatenate([self._rest, samples])
        whole = len(known) // self.frame * self.frame
        self._rest = known[whole:]
        return self.listener.hear(self._resampled(known[:whole], round(whole / self.ratio)))

    def end(self) -> Probabilities:
        left = len(self._rest)
        heard = self.listener.hear(self._resampled(self._rest, max(int(left / self.ratio), min(left, 1))))
        return np.concatenate([heard, self.listener.end()])

    def _resampled(self, samples: Samples, count: int) -> Samples:
        known = np.concatenate([self._before, samples])
        self._before = known[-2:]
        means = (known[:-2] + 2 * known[1:-1] + known[2:]) / 4
        at = np.arange(count) * self.ratio
        return np.interp(at, np.arange(len(means)), means).astype(np.float32) if count else samples


# ---- spans of speech -------------------------------------------------------------------------------------------------


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
