"""Silero: voice activity by the network that the package silero-vad runs by default, computed by numpy.

The package runs its network by torch.jit, which torch has deprecated, or by onnxruntime. Importing the package changes
torch's number of threads for the whole process. None of these is needed, since the network is small (310,000 weights):
its weights are a part of this package (`models/weights/README.md` has their origin and licence), and numpy does the
computation. One core needs a 300th of the audio's duration for it. No thread is started, so a device that computes with
all cores at the same time is not disturbed.

The network misses speech beside a loud hum, and speech that is hardly louder than the steps of 16 bits. So a sound
below `_LOW_HZ` is taken away where it stays louder than any speech has there, and a stream that is quiet and may be
speech is amplified. All other streams reach the network as they are, and its probabilities are the package's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, evolve, field, frozen
from safetensors.numpy import load_file

from ..inputs.audio import Samples
from .voice import Probabilities

FRAME = 512  # samples of one probability: 32 ms
WEIGHTS = Path(__file__).parents[2] / "models" / "weights" / "silero.safetensors"
_RATE = 16_000
_CONTEXT = 64  # samples before a frame that the network sees too
_SPECTRUM, _HOP, _BINS = 256, 128, 129  # samples of a spectrum, samples from one to the next, and frequencies
_WIDTH = 128  # of the recurrent layer
_ROWS = 64  # of a matrix so small that numpy's BLAS starts no threads for its product with a vector
_FRAMES_AT_ONCE = 128  # bounds the memory of one call to a few megabytes
_FRAMES_IN_DOUBT = 8  # or as many as were heard: those of a quiet stream may have to be heard twice
_LOW_HZ, _LOW_RANK = 80, 8  # 36 ms below this frequency are, but for a 500th of their energy, a sum of so many shapes
_HUM, _SUSTAINED = 0.05, 8  # the level of a sound that is no speech if so many frames have it, below `_LOW_HZ`
_QUIET, _DOUBT = 0.005, 0.1  # the level of a quiet stream, and the probability from which it may be speech
_LEAST = 1e-4  # the level that is amplified most

Array = npt.NDArray[np.float32]


@define(eq=False)
class Silero:
    """The default `VoiceActivity`. The first call of `listen` reads the weights, 1.2 MB. All listeners share them.
    `listen` may be called in any thread.

    Args:
        within: a context to enter while the network runs. The network has many small numpy operations, each of which
            releases Python's lock.
    """

    within: Callable[[], AbstractContextManager[object]] = nullcontext
    sampling_rate: int = field(default=_RATE, init=False)
    frame_samples: int = field(default=FRAME, init=False)
    _weights: _Weights | None = field(default=None, init=False)
    _reading: threading.Lock = field(factory=threading.Lock, init=False)

    def listen(self) -> SileroListener:
        """Returns a listener at the beginning of a stream."""
        with self._reading:
            if self._weights is None:
                self._weights = _Weights.read()
            return SileroListener(self._weights, self.within)


@frozen(eq=False)
class _Weights:
    """The network's weights, each as the right factor of a product unless a comment says otherwise."""

    low: Array  # [576, _LOW_RANK]: orthonormal shapes of sound below `_LOW_HZ`
    spectrum: Array  # [256, 2 * 129]: cosines, sines
    convolutions: tuple[tuple[Array, Array], ...]  # four: [taps * channels in, channels out], [channels out]
    input: Array  # [128, 512]
    recurrent: Array  # [8, 64, 128], the left factors of its eight parts
    bias: Array  # [512]
    output: Array  # [128]
    output_bias: np.float32

    @classmethod
    def read(cls) -> _Weights:
        """Reads the file of this package, whose tensors have the names of silero-vad's."""
        tensors = load_file(WEIGHTS)
        names = [f"encoder.{number}.reparam_conv" for number in range(4)]
        halves = np.repeat(np.array([0.5, 0.5, 1, 0.5], np.float32), _WIDTH)  # for `_remembered`
        return cls(
            low=_low(),
            spectrum=np.ascontiguousarray(tensors["stft.forward_basis_buffer"][:, 0].T),
            convolutions=tuple((_taps(tensors[f"{name}.weight"]), tensors[f"{name}.bias"]) for name in names),
            input=np.ascontiguousarray(tensors["decoder.rnn.weight_ih"].T) * halves,
            recurrent=(tensors["decoder.rnn.weight_hh"] * halves[:, None]).reshape(-1, _ROWS, _WIDTH),
            bias=(tensors["decoder.rnn.bias_ih"] + tensors["decoder.rnn.bias_hh"]) * halves,
            output=tensors["decoder.decoder.2.weight"][0, :, 0],
            output_bias=tensors["decoder.decoder.2.bias"][0],
        )


def _low() -> Array:
    """Returns the shapes of which all short sounds below `_LOW_HZ` are made, but for what is left of them."""
    waves = np.arange(_CONTEXT + FRAME)[:, None] * np.linspace(0, 2 * np.pi * _LOW_HZ / _RATE, 17)
    shapes, _, _ = np.linalg.svd(np.concatenate([np.cos(waves), np.sin(waves)], axis=1), full_matrices=False)
    return np.ascontiguousarray(shapes[:, :_LOW_RANK], np.float32)


def _taps(weight: Array) -> Array:
    """Reshapes a weight from [out, in, taps] to [taps * in, out]."""
    return np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, len(weight)))


def _zeros(size: int) -> Array:
    return np.zeros(size, np.float32)


@frozen(eq=False)
class _Memory:
    """The state of a stream between two frames."""

    context: Array = Factory(lambda: _zeros(_CONTEXT))
    hidden: Array = Factory(lambda: _zeros(_WIDTH))
    cell: Array = Factory(lambda: _zeros(_WIDTH))
    lows: Array = Factory(lambda: np.full(_SUSTAINED - 1, np.inf, np.float32))  # levels below `_LOW_HZ`
    loudest: float = _LEAST  # the highest level so far, of what is not below `_LOW_HZ`
    amplified: bool = False  # the stream may be speech, so that it is amplified while it is quiet


@define(eq=False)
class SileroListener:
    """The state of the network in one stream: its memory between frames, and the samples of an incomplete frame. A
    listener belongs to one thread at a time.
    """

    _weights: _Weights
    _within: Callable[[], AbstractContextManager[object]]
    _rest: Array = Factory(lambda: _zeros(0))
    _memory: _Memory = Factory(_Memory)
    _count: int = 0  # of the frames so far

    def hear(self, samples: Samples) -> Probabilities:
        """Adds the next samples. Returns the probabilities of the frames that they complete, float32 [frames]."""
        heard = np.concatenate([self._rest, samples]).astype(np.float32, copy=False)
        count = len(heard) // FRAME
        self._rest = heard[count * FRAME :].copy()
        frames = heard[: count * FRAME].reshape(count, FRAME)
        parts = [_zeros(0)]
        while len(frames):
            in_doubt = self._memory.loudest < _QUIET and not self._memory.amplified
            most = max(self._count, _FRAMES_IN_DOUBT) if in_doubt else _FRAMES_AT_ONCE
            now, frames = np.split(frames, [min(most, _FRAMES_AT_ONCE)])
            parts.append(self._frames(now))
            self._count += len(now)
        return np.concatenate(parts)

    def end(self) -> Probabilities:
        """Ends the stream. Returns the probability of the rest, as a frame filled up with silence, or an empty array if
        nothing is left."""
        if not len(self._rest):
            return _zeros(0)
        return self.hear(_zeros(FRAME - len(self._rest)))

    def _frames(self, frames: Array) -> Array:
        with self._within():
            before = self._memory
            found, self._memory, loudest = _heard(self._weights, before, frames)
            doubtful = np.flatnonzero((found >= _DOUBT) & (loudest < _QUIET))
            if before.amplified or not len(doubtful):
                return found
            frames, rest = np.split(frames, [doubtful[0] + 1])  # what follows is heard anew
            found, memory, _ = _heard(self._weights, before, frames)
            self._memory = evolve(memory, amplified=True)
        return np.concatenate([found, self._frames(rest)]) if len(rest) else found


def _heard(weights: _Weights, memory: _Memory, frames: Array) -> tuple[Array, _Memory, Array]:
    """Returns the probability of each frame, the memory after them, and the highest level up to each frame."""
    contexts = np.concatenate([memory.context[None], frames[:-1, -_CONTEXT:]])
    heard = np.concatenate([contexts, frames], axis=1)
    shares = heard[:, None] @ weights.low  # the low sound is a sum of so much of each shape
    energy = np.einsum("ijk,ijk->i", shares, shares)  # of the low sound, since the shapes are orthonormal
    lows = np.append(memory.lows, _level(energy))
    others = np.maximum(np.einsum("ij,ij->i", heard, heard) - energy, 0)
    loudest = np.maximum.accumulate(np.append(np.float32(memory.loudest), _level(others)))[1:]
    gain = np.maximum(_QUIET / loudest if memory.amplified else np.ones_like(loudest), 1)
    sustained = np.lib.stride_tricks.sliding_window_view(lows, _SUSTAINED).min(axis=1)
    hum = np.clip(4 * (sustained * gain / _HUM - 1), 0, 1)  # the part of the low sound that is taken away
    clear = heard - hum[:, None] * (shares @ weights.low.T)[:, 0] if hum.any() else heard
    clear = clear * gain[:, None] if memory.amplified else clear
    mirrored = np.concatenate([clear, clear[:, -2 : -2 - _CONTEXT : -1]], axis=1)
    found, hidden, cell = _remembered(weights, _encoded(weights, mirrored), memory)
    after = _Memory(frames[-1, -_CONTEXT:].copy(), hidden, cell, lows[1 - _SUSTAINED :], loudest[-1], memory.amplified)
    return found, after, loudest


def _level(energy: Array) -> Array:
    """Returns the root mean square of frames with so much energy."""
    level: Array = np.sqrt(energy / np.float32(_CONTEXT + FRAME))
    return level


def _remembered(weights: _Weights, features: Array, memory: _Memory) -> tuple[Array, Array, Array]:
    """Runs the recurrent layer (LSTM) frame by frame. Returns the probability of each frame, and the layer's state.

    The sigmoid of x is (1 + tanh(x / 2)) / 2. The weights of the three gates that are sigmoids are halved when they are
    read, which loses no bit, so that one tanh computes all four gates of a frame.
    """
    gates = (features @ weights.input)[:, 0] + weights.bias
    states, hidden, cell = np.empty((len(gates), _WIDTH), np.float32), memory.hidden, memory.cell
    half = np.float32(0.5)
    for row, gate in zip(states, gates, strict=True):
        gate += (weights.recurrent @ hidden).ravel()  # noqa: PLW2901  (in place)
        waves = np.tanh(gate).reshape(4, _WIDTH)
        taken, kept, _, shown = waves * half + half
        cell = kept * cell + taken * waves[2]
        hidden = np.multiply(shown, np.tanh(cell), out=row)
    return _sigmoid(np.maximum(states, 0) @ weights.output + weights.output_bias), hidden.copy(), cell


def _encoded(weights: _Weights, samples: Array) -> Array:
    """Returns the features of each frame, [frames, 1, 128], from [frames, 640].

    Every product is a stack of products of small matrices, one for each frame: numpy's BLAS starts no threads for
    these.
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, _SPECTRUM, axis=1)[:, ::_HOP]  # [frames, 4, 256]
    waves = np.ascontiguousarray(windows) @ weights.spectrum
    features = np.sqrt(waves[..., :_BINS] ** 2 + waves[..., _BINS:] ** 2)
    for (weight, bias), stride in zip(weights.convolutions, (1, 2, 2, 1), strict=True):
        features = np.maximum(_neighbours(features, stride) @ weight + bias, 0)
    return features


def _neighbours(features: Array, stride: int) -> Array:
    """Reshapes [frames, steps, channels] to [frames, steps / stride, 3 * channels]. Each step gets its two neighbours
    beside it, and zeros beyond the ends.
    """
    frames, steps, channels = features.shape
    padded = np.zeros((frames, steps + 2, channels), np.float32)
    padded[:, 1:-1] = features
    return np.concatenate([padded[:, tap : tap + steps : stride] for tap in range(3)], axis=2)


def _sigmoid(values: Array) -> Array:
    halves: Array = np.tanh(values / np.float32(2)) / np.float32(2)
    return halves + np.float32(0.5)  # as 1 / (1 + exp(-values)), but nothing overflows
