"""Voice activity: the times at which somebody speaks. A `VoiceActivity` detects it; `silero` has the default one."""

from __future__ import annotations

from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

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
