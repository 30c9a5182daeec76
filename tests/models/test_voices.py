"""The network that describes voices, against torch's own modules with the weights that Resemblyzer published."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from safetensors.torch import load_file
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

from triolet.models.networks.voices import WEIGHTS, WIDTH, WINDOW, VoiceEncoder


def test_the_weights_that_ship_are_those_that_were_compared_with_resemblyzers() -> None:
    """`.ci/weights.py` said so of the file that the README beside the weights names, which 17 MB are too long for
    tests. The reference below reads the same file as the encoder, so it says nothing about the weights."""
    found = hashlib.sha256(WEIGHTS.read_bytes()).hexdigest()
    assert f"(SHA-256 `{found}`)" in (WEIGHTS.parent / "README.md").read_text()


def reference(samples: np.ndarray) -> torch.Tensor:
    """Resemblyzer's steps, one window at a time: its level, librosa's mel power spectrum, the network."""
    amplified = samples * 10 ** (-30 / 20) / np.sqrt((samples.astype(np.float64) ** 2).mean())
    filters = mel_filter_bank(201, 40, 0.0, 8_000.0, 16_000, norm="slaney", mel_scale="slaney")
    hann = window_function(400, "hann")
    mel = spectrogram(amplified, hann, 400, 160, power=2.0, pad_mode="constant", mel_filters=filters, mel_floor=0.0).T
    mel = np.tile(mel, (-(-160 // len(mel)), 1))[:160]
    weights = {name: weight.float() for name, weight in load_file(WEIGHTS).items()}
    lstm = torch.nn.LSTM(40, 256, 3, batch_first=True)
    lstm.load_state_dict({name[5:]: weight for name, weight in weights.items() if name.startswith("lstm.")})
    with torch.no_grad():
        hidden = lstm(torch.from_numpy(mel.astype(np.float32))[None])[1][0][-1, 0]
        found = (weights["linear.weight"] @ hidden + weights["linear.bias"]).relu()
    return found / found.norm()


def test_vectors_are_those_of_the_reference_alone_and_in_a_batch() -> None:
    rng = np.random.default_rng(0)
    windows = [
        rng.normal(0, level, size).astype(np.float32) for level, size in ((0.3, WINDOW), (0.01, 9_000), (1e-3, 400))
    ]
    encoder = VoiceEncoder.load()
    found = encoder.embed(windows)
    assert found.shape == (3, WIDTH)
    for row, window in zip(found, windows, strict=True):
        np.testing.assert_allclose(row, reference(window), atol=2e-5)
        np.testing.assert_allclose(row, encoder.embed([window])[0], atol=2e-5)
        np.testing.assert_allclose(row, encoder.embed([window * np.float32(0.5)])[0], atol=2e-4)  # at any level
    assert np.isfinite(encoder.embed([np.zeros(400, np.float32)])).all()
