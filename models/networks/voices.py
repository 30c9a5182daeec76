"""`VoiceEncoder`: turns speech into vectors that are near each other if the same voice speaks (Wan et al. 2018,
"Generalized end-to-end loss for speaker verification").

The weights are those of Resemblyzer, which are a part of the package: `models/weights/README.md` has their origin and
licence.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import normalize

from ..machine.defaults import OwnDefaults
from .mel import mel_filters

SAMPLING_RATE = 16_000
WINDOW = 25_600  # samples of the speech that one vector describes: 1.6 s, the length of the network's training
WIDTH = 256  # of a vector
WEIGHTS = Path(__file__).parents[1] / "weights" / "resemblyzer.safetensors"
_MELS, _N_FFT, _HOP = 40, 400, 160
_LEVEL = 10 ** (-30 / 20)  # the root mean square to which each window is amplified: the level of the training


class VoiceEncoder(nn.Module):
    """Three recurrent layers (LSTM) over a mel spectrum. A linear layer turns the last state into the vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(_MELS, WIDTH, 3, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.filters = torch.from_numpy(mel_filters(1 + _N_FFT // 2, _MELS, SAMPLING_RATE)).float()  # [mels, bins]
        self.hann = torch.hann_window(_N_FFT, dtype=torch.float32)

    @classmethod
    def load(cls) -> VoiceEncoder:
        """Returns the encoder with the weights of the package, in float32 on the CPU."""
        with OwnDefaults():  # the first weights are drawn at random
            made = cls()
        made.load_state_dict({name: weight.float() for name, weight in load_file(WEIGHTS).items()})
        return made.eval()

    @torch.inference_mode()
    def embed(self, windows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Returns one vector of length 1 for each window, shape (n, `WIDTH`).

        Args:
            windows: samples at `SAMPLING_RATE`, each of shape (1 to `WINDOW`,). Shorter ones are repeated.
        """
        features = torch.stack([self.features(torch.from_numpy(samples)) for samples in windows])
        _, (hidden, _) = self.lstm(features)
        found: NDArray[np.float32] = normalize(self.linear(hidden[-1]).relu(), dim=1).numpy()
        return found

    def features(self, samples: Tensor) -> Tensor:
        """Returns the mel spectrum of a window, [160, 40], not as logarithms."""
        amplified = samples * (_LEVEL / (samples.square().mean().sqrt() + 1e-9))
        bins = torch.stft(amplified, _N_FFT, _HOP, window=self.hann, pad_mode="constant", return_complex=True)
        mel, frames = (self.filters @ bins.abs().square()).T, WINDOW // _HOP
        return mel.repeat(-(-frames // len(mel)), 1)[:frames]
