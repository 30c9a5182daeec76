"""Voice activity: the times at which somebody speaks. A `VoiceActivity` detects it; `silero` has the default one."""

from __future__ import annotations

from functools import partial
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field, frozen

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
