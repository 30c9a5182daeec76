"""The mel filters of Whisper's features: triangles on Slaney's scale (Slaney 1998, "Auditory Toolbox", `mfcc`), which
is linear up to 1 kHz and logarithmic above. Each triangle has the area 1."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_HERTZ = 200.0 / 3.0  # Hz for each mel, below the break
_BREAK = 1_000.0  # Hz
_STEP = np.log(6.4) / 27.0  # increase of log(Hz) for each mel, above the break
_HIGHEST = 8_000.0  # Hz


def mel_filters(bins: int, mels: int, sampling_rate: int) -> NDArray[np.float64]:
    """Returns weights [mels, bins] for ``bins`` frequencies from 0 to half of ``sampling_rate`` (Hz), equal to the
    weights in transformers' `WhisperFeatureExtractor`."""
    frequencies = np.linspace(0, sampling_rate // 2, bins)
    at_break = _BREAK / _HERTZ  # mels
    highest = at_break + np.log(_HIGHEST / _BREAK) / _STEP
    mel = np.linspace(0.0, highest, mels + 2)[:, None]
    corners = np.where(mel < at_break, mel * _HERTZ, _BREAK * np.exp(_STEP * (mel - at_break)))
    lower, center, upper = corners[:-2], corners[1:-1], corners[2:]
    rising = (frequencies - lower) / (center - lower)
    falling = (upper - frequencies) / (upper - center)
    filters: NDArray[np.float64] = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (upper - lower))
    return filters
