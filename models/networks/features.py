"""Log-mel features in torch, equal to transformers' `WhisperFeatureExtractor` (Radford et al. 2022, section 2.2)."""

from __future__ import annotations

import torch
from attrs import field, mutable
from torch import Tensor

from ..checkpoints.whisper_checkpoint import FeatureSettings
from .mel import mel_filters

_FLOOR = 1e-10  # the least power before log10, so that digital silence becomes -10


@mutable(eq=False, kw_only=True)
class LogMel:
    """Turns samples into log-mel features. Holds the filters and the window, both float32 on one device."""

    settings: FeatureSettings
    _filters: Tensor = field(repr=False)  # [mels, n_fft // 2 + 1]
    _window: Tensor = field(repr=False)  # [n_fft]

    @classmethod
    def build(cls, settings: FeatureSettings, device: torch.device) -> LogMel:
        """Makes the filters and the window of ``settings``."""
        bank = mel_filters(1 + settings.n_fft // 2, settings.feature_size, settings.sampling_rate)
        filters = torch.from_numpy(bank).to(device, torch.float32)
        window = torch.hann_window(settings.n_fft, dtype=torch.float32, device=device).clone()
        return cls(settings=settings, filters=filters, window=window)

    def pad(self, payloads: list[Tensor]) -> Tensor:
        """Returns windows of different lengths as one batch [n, samples], padded with zeros. The batch ends after the
        last frame that overlaps any samples; all later frames are silence and need no transform."""
        settings = self.settings
        hops = -(-(max(len(samples) for samples in payloads) + settings.n_fft) // settings.hop_length)
        shape = len(payloads), min(hops * settings.hop_length, settings.window_samples)
        batch = torch.zeros(shape, dtype=torch.float32)
        for row, samples in zip(batch, payloads, strict=True):
            row[: len(samples)] = samples
        return batch.to(self._filters.device)

    def __call__(self, samples: Tensor, frames: int) -> Tensor:
        """Returns log-mel features of windows of ``frames`` frames.

        Args:
            samples: float32, [n, samples], at most a window long; a shorter batch must end in ``n_fft`` zeros, as the
                result of `pad` does.

        Returns:
            float32, [n, mels, frames], each item scaled by its own maximum.
        """
        settings = self.settings
        spectrum = torch.stft(
            samples, settings.n_fft, settings.hop_length, window=self._window, return_complex=True
        )  # [n, bins, frames + 1]; the last frame is dropped as in the original
        power = spectrum[..., :-1].abs().square()
        heard = (self._filters @ power[..., :frames]).clamp_(min=_FLOOR).log10_()
        log_mel = heard.new_full((len(samples), settings.feature_size, frames), -10.0)
        log_mel[..., : heard.shape[-1]] = heard
        loudest = log_mel.amax(dim=(1, 2), keepdim=True)
        return torch.maximum(log_mel, loudest - 8.0).add_(4.0).div_(4.0)

    def tensors(self) -> tuple[Tensor, ...]:
        """The filters and the window."""
        return self._filters, self._window

    def release(self) -> None:
        """Forgets the tensors."""
        self._filters = self._window = torch.empty(0)
