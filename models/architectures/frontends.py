"""Features of audio in torch, for speech models whose feature extractors in transformers need torchaudio. Settings have
the names and defaults that they have there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from attrs import fields, frozen
from torch import Tensor

from ...core.errors import CheckpointError, UnsupportedModel
from ..checkpoints.settings import FileSettings

_Features = TypeVar("_Features", bound="TorchFeatures")


@frozen(kw_only=True)
class TorchFeatures:
    """A kind of features. It has `least`, the fewest samples that have features, and returns the features
    [rows, values], float32, of samples [n], float32."""

    sampling_rate: int = 16_000  # Hz
    longest: int | None = None  # the most samples that the encoder reads; ``None``: any number

    @classmethod
    def read(cls: type[_Features], folder: Path) -> _Features:
        """Reads the settings of the checkpoint in ``folder``.

        Raises:
            CheckpointError: they are missing or wrong.
            UnsupportedModel: they ask for another window function.
        """
        settings = audio_settings(folder)
        if settings.get("window") not in (None, "hamming"):
            raise UnsupportedModel(f"{settings.path} has window={settings.get('window')!r}; allowed: 'hamming'")
        return cls(**{one.name: settings.whole(one.name) for one in fields(cls) if one.name in settings})

    def to_json_string(self) -> str:
        """All that the features depend on, as text."""
        return repr(self)


@frozen(kw_only=True)
class PairedMel(TorchFeatures):
    """The features of Granite Speech (Saon et al. 2025): logarithmic mel spectra, two in each row."""

    n_fft: int = 512
    win_length: int = 400
    hop_length: int = 160
    n_mels: int = 80

    @property
    def least(self) -> int:
        return max(self.hop_length, self.n_fft // 2 + 1)

    def __call__(self, samples: np.ndarray[Any, Any]) -> Tensor:
        mel = _scaled(self._log_mel(samples, self.n_mels), 8.0)
        return mel[: len(mel) // 2 * 2].reshape(-1, 2 * self.n_mels)

    def _log_mel(self, samples: np.ndarray[Any, Any], mels: int) -> Tensor:
        """Returns logarithmic mel spectra [hops + 1, mels]."""
        wave, window = torch.tensor(samples), torch.hann_window(self.win_length, dtype=torch.float32)
        spectrum = torch.stft(wave, self.n_fft, self.hop_length, self.win_length, window, return_complex=True)
        mel = spectrum.abs().square().T @ _bank(self.n_fft, mels, self.sampling_rate, mel_scale="htk")
        return mel.clamp_(min=1e-10).log10_()


@frozen(kw_only=True)
class PairedDeltaMel(PairedMel):
    """The features of Granite Speech 5: as those of Granite Speech, each spectrum with its change. Audio of an odd
    number of hops is filled with silence."""

    num_mel_bins: int = 80
    delta_win_length: int = 3
    logmel_floor_db: int = 8

    @classmethod
    def read(cls, folder: Path) -> PairedDeltaMel:
        made = super().read(folder)
        if made.delta_win_length != 3:
            raise UnsupportedModel(f"{folder} has delta_win_length={made.delta_win_length}; allowed: 3")
        return made

    def __call__(self, samples: np.ndarray[Any, Any]) -> Tensor:
        count = -(-(len(samples) // self.hop_length) // 2) * 2
        padded = np.pad(samples, (0, max((count - 1) * self.hop_length + 1 - len(samples), 0)))
        mel = _scaled(self._log_mel(padded, self.num_mel_bins)[:count], float(self.logmel_floor_db))
        around = torch.cat([mel[:1], mel, mel[-1:]])
        return torch.cat([mel, (around[2:] - around[:-2]) / 2], 1).reshape(-1, 4 * self.num_mel_bins)


@frozen(kw_only=True)
class StackedFbank(TorchFeatures):
    """The features of Fun-ASR (An et al. 2025): Kaldi's filter banks at a low frame rate. A row is every
    ``stride_lfr``-th spectrum with its neighbours, ``num_frames_lfr`` in all."""

    feature_size: int = 80
    frame_length: int = 25  # ms
    frame_shift: int = 10  # ms
    num_frames_lfr: int = 7
    stride_lfr: int = 6

    @property
    def least(self) -> int:
        return self.sampling_rate * self.frame_length // 1000

    @property
    def _shift(self) -> int:
        return self.sampling_rate * self.frame_shift // 1000

    def most_samples(self, rows: int) -> int:
        """The most samples that have ``rows`` rows of features."""
        return self.least + self._shift * self.stride_lfr * rows - 1

    def __call__(self, samples: np.ndarray[Any, Any]) -> Tensor:
        frames = torch.tensor(samples).unfold(0, self.least, self._shift)
        frames = frames - frames.mean(1, keepdim=True)
        frames = frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], 1)  # emphasizes high frequencies
        frames = frames * torch.hamming_window(self.least, periodic=False, dtype=torch.float32)
        n_fft = 1 << (self.least - 1).bit_length()
        kaldi: dict[str, Any] = {"min_frequency": 20.0, "mel_scale": "kaldi", "triangularize_in_mel_space": True}
        bank = _bank(n_fft, self.feature_size, self.sampling_rate, **kaldi)
        power = torch.fft.rfft(frames, n_fft).abs().square()
        mel: Tensor = (power @ bank).clamp_(min=torch.finfo(torch.float32).eps).log_()
        neighbours = torch.arange(self.num_frames_lfr) - (self.num_frames_lfr - 1) // 2
        rows = torch.arange(0, len(mel), self.stride_lfr)[:, None] + neighbours
        return mel[rows.clamp(0, len(mel) - 1)].flatten(1)  # the first and the last spectrum are repeated


def _scaled(mel: Tensor, floor: float) -> Tensor:
    """Returns ``mel`` without what lies more than ``floor`` below its maximum, scaled to about 1."""
    return torch.maximum(mel, mel.max() - floor).div_(4.0).add_(1.0)


def audio_settings(folder: Path) -> FileSettings:
    """Returns the settings of the feature extractor in ``folder``: those within processor_config.json, or else those of
    preprocessor_config.json. Raises `CheckpointError` if there are none."""
    path = folder / "processor_config.json"
    whole = FileSettings.read_if_there(path)
    for name in ("feature_extractor", "audio_processor"):
        if whole is not None and name in whole:
            return FileSettings(path, whole.table(name))
    plain = FileSettings.read_if_there(folder / "preprocessor_config.json")
    if plain is None:
        raise CheckpointError(f"{folder} has no preprocessor_config.json; download or save the checkpoint again")
    return plain


def _bank(n_fft: int, mels: int, rate: int, *, min_frequency: float = 0.0, **scale: Any) -> Tensor:
    """Returns the weights [bins, mels] of triangular filters up to half of ``rate``."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(n_fft // 2 + 1, mels, min_frequency, rate / 2, rate, **scale)
    return torch.from_numpy(bank).float()
