"""Log-mel features are those of transformers' `WhisperFeatureExtractor`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from triolet.models.checkpoints.whisper_checkpoint import FeatureSettings
from triolet.models.networks.features import LogMel

CPU = torch.device("cpu")


def sweep(seconds: float) -> np.ndarray:
    """Voiced and pausing like speech: harmonics of a gliding pitch under a 3 Hz envelope."""
    time = np.arange(int(seconds * 16_000)) / 16_000
    pitch = 2 * np.pi * (120 + 20 * np.sin(time)) * time
    voice = sum(np.sin(harmonic * pitch) / harmonic for harmonic in range(1, 12))
    return (0.2 * voice * np.maximum(0, np.sin(2 * np.pi * 3 * time))).astype(np.float32)


CLIPS = {
    "noise": np.random.default_rng(0).standard_normal(50_000).astype(np.float32),
    "sweep": sweep(2.9),
    "full": sweep(3.0),
    "almost full": sweep(3.0)[:-150],
    "short": sweep(0.03),
    "one sample": np.ones(1, dtype=np.float32),
    "silence": np.zeros(16_000, dtype=np.float32),
    "faint": 1e-4 * sweep(1.0),
    "click at the end": np.concatenate([np.zeros(20_001), np.ones(1)]).astype(np.float32),
}


def expected(clip: np.ndarray, settings: FeatureSettings) -> torch.Tensor:
    names = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
    extractor = WhisperFeatureExtractor(**{name: getattr(settings, name) for name in names})
    return extractor(clip, sampling_rate=settings.sampling_rate, return_tensors="pt").input_features[0]


@pytest.mark.parametrize(
    "settings",
    [
        FeatureSettings(chunk_length=4),
        FeatureSettings(chunk_length=3),  # a whole window, to its last sample
        FeatureSettings(chunk_length=4, feature_size=128),
        FeatureSettings(chunk_length=4, n_fft=512, hop_length=256, feature_size=40),
    ],
    ids=str,
)
def test_features_equal_transformers(settings):
    """Every kind of clip, alone and in one batch of different lengths, within 1e-4."""
    log_mel = LogMel.build(settings, CPU)
    clips = [torch.from_numpy(clip[: settings.window_samples]) for clip in CLIPS.values()]
    batch = log_mel(log_mel.pad(clips), settings.frames)
    assert batch.shape == (len(clips), settings.feature_size, settings.frames)
    for name, clip, together in zip(CLIPS, clips, batch, strict=True):
        alone = log_mel(log_mel.pad([clip]), settings.frames)[0]
        torch.testing.assert_close(alone, expected(clip.numpy(), settings), atol=1e-4, rtol=0, msg=name)
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=0, msg=name)
