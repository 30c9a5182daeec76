"""Voice activity: where somebody speaks. What hears it is a `VoiceActivity`; `silero` is the default one."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..inputs.audio import Samples

Probabilities: TypeAlias = npt.NDArray[np.float32]


class Listener(Protocol):
    """Hears one stream of samples from its beginning to its end. One thread at a time calls it, not always the same."""

    def hear(self, samples: Samples) -> Probabilities:
        """Takes the next samples, float32 of shape (n,) with full scale at 1.0, n any number.

        Returns the probability of speech, 0 to 1, of each frame that is whole now and was not before: shape (frames,).
        How the stream is divided among the calls changes no probability.
        """
        ...

    def end(self) -> Probabilities:
        """The stream has ended: the probability of the last frame where it is not whole, else none."""
        ...


class VoiceActivity(Protocol):
    """Tells speech from everything else, frame by frame. It may be slow: it is called in worker threads.

    Attributes:
        sampling_rate: of the samples that listeners hear, in Hz; it must be the speech model's, 16,000 for Whisper.
        frame_samples: samples of one frame. Frames follow each other without a gap.
    """

    @property
    def sampling_rate(self) -> int: ...

    @property
    def frame_samples(self) -> int: ...

    def listen(self) -> Listener:
        """A new listener. The first call may load what all listeners share."""
        ...
