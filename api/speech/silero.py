"""Silero: voice activity by the network of the package silero-vad, computed by numpy.

The package runs its network by torch.jit, which torch has deprecated, or by onnxruntime. Importing the package changes
torch's number of threads for the whole process. Neither is needed, since the network is small (310,000 weights): its
weights are read from the package's file, which is found without an import, and numpy does the computation. One core
needs a 300th of the audio's duration for it. No thread is started, so a device that computes with all cores at the same
time is not disturbed.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import numpy.typing as npt
from attrs import Factory, define, field, frozen
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ...core.errors import CheckpointError
from ..inputs.audio import Samples
from .voice import Probabilities

FRAME = 512  # samples of one probability: 32 ms
_CONTEXT = 64  # samples before a frame that the network sees too
_SPECTRUM, _HOP, _BINS = 256, 128, 129  # samples of a spectrum, samples from one to the next, and frequencies
_WIDTH = 128  # of the recurrent layer
_FRAMES_AT_ONCE = 128  # bounds the memory of one call to a few megabytes
_FILE = "data/silero_vad_16k.safetensors"
_HELP = "pip install 'silero-vad>=6.2,<7', or give a VoiceActivity of your own, or none"

Array = npt.NDArray[np.float32]


@define(eq=False)
class Silero:
    """The default `VoiceActivity`. The first call of `listen` reads the weights, 1.2 MB, from the installed package;
    nothing is downloaded. All listeners share the weights. `listen` may be called in any thread.

    Args:
        within: a context to enter while the network runs. The network has many small numpy operations, each of which
            releases Python's lock.

    Raises:
        CheckpointError: from `listen`: the package is not installed, or is a version that this code does not know.
    """

    within: Callable[[], AbstractContextManager[object]] = nullcontext
    sampling_rate: int = field(default=16_000, init=False)
    frame_samples: int = field(default=FRAME, init=False)
    _weights: _Weights | None = field(default=None, init=False)
    _reading: threading.Lock = field(factory=threading.Lock, init=False)

    def listen(self) -> SileroListener:
        """Returns a listener at the beginning of a stream."""
        with self._reading:
            if self._weights is None:
                self._weights = _Weights.read(_find())
            return SileroListener(self._weights, self.within)


def _find() -> Path:
    """Returns the path of the file with the weights, without importing the package."""
    found = importlib.util.find_spec("silero_vad")
    folders = found.submodule_search_locations if found is not None else None
    if not folders:
        raise CheckpointError(f"voice activity needs the package silero-vad, which is not installed: {_HELP}")
    path = Path(folders[0], _FILE)
    if not path.is_file():
        raise CheckpointError(f"the package silero-vad in {folders[0]} has no {_FILE}; allowed: versions 6.x: {_HELP}")
    return path


@frozen(eq=False)
class _Weights:
    """The network's weights, each as the right factor of a product unless a comment says otherwise."""

    cosine: Array  # [256, 129]
    sine: Array  # [256, 129]
    convolutions: tuple[tuple[Array, Array], ...]  # four: [taps * channels in, channels out], [channels out]
    input: Array  # [128, 512]
    recurrent: Array  # [512, 128], the left factor
    bias: Array  # [512]
    output: Array  # [128]
    output_bias: float

    @classmethod
    def read(cls, path: Path) -> _Weights:
        """Reads the package's file.

        Raises:
            CheckpointError: the file is damaged, or holds another network.
        """
        try:
            tensors = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}): {_HELP}") from error
        return cls.of(tensors)

    @classmethod
    def of(cls, tensors: dict[str, Array]) -> _Weights:
        """Returns the weights made from the tensors of the package's file, by the names that they have there."""
        shapes = {name: tensors[name].shape if name in tensors else None for name in _SHAPES}
        if shapes != _SHAPES:
            wrong = {name: shape for name, shape in shapes.items() if shape != _SHAPES[name]}
            raise CheckpointError(
                f"silero-vad's {_FILE} holds {wrong}; allowed: { ({name: _SHAPES[name] for name in wrong}) }: {_HELP}"
            )
        basis = tensors["stft_conv.weight"][:, 0]
        return cls(
            cosine=np.ascontiguousarray(basis[:_BINS].T),
            sine=np.ascontiguousarray(basis[_BINS:].T),
            convolutions=tuple(
                (_taps(tensors[f"{name}.weight"]), tensors[f"{name}.bias"].copy()) for name in _CONVOLUTIONS
            ),
            input=np.ascontiguousarray(tensors["lstm_cell.weight_ih"].T),
            recurrent=tensors["lstm_cell.weight_hh"].copy(),
            bias=tensors["lstm_cell.bias_ih"] + tensors["lstm_cell.bias_hh"],
            output=tensors["final_conv.weight"][0, :, 0].copy(),
            output_bias=float(tensors["final_conv.bias"][0]),
        )


def _taps(weight: Array) -> Array:
    """Reshapes a weight from [out, in, taps] to [taps * in, out]."""
    return np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, len(weight)))


_CONVOLUTIONS = tuple(f"conv{number}" for number in range(1, 5))
_SHAPES = {
    "stft_conv.weight": (2 * _BINS, 1, _SPECTRUM),
    "conv1.weight": (128, _BINS, 3),
    "conv1.bias": (128,),
    "conv2.weight": (64, 128, 3),
    "conv2.bias": (64,),
    "conv3.weight": (64, 64, 3),
    "conv3.bias": (64,),
    "conv4.weight": (128, 64, 3),
    "conv4.bias": (128,),
    "lstm_cell.weight_ih": (4 * _WIDTH, _WIDTH),
    "lstm_cell.weight_hh": (4 * _WIDTH, _WIDTH),
    "lstm_cell.bias_ih": (4 * _WIDTH,),
    "lstm_cell.bias_hh": (4 * _WIDTH,),
    "final_conv.weight": (1, _WIDTH, 1),
    "final_conv.bias": (1,),
}


def _zeros(size: int) -> Array:
    return np.zeros(size, np.float32)


@define(eq=False)
class SileroListener:
    """The state of the network in one stream: its memory between frames, and the samples of an incomplete frame. A
    listener belongs to one thread at a time.
    """

    _weights: _Weights
    _within: Callable[[], AbstractContextManager[object]]
    _rest: Array = Factory(lambda: _zeros(0))
    _context: Array = Factory(lambda: _zeros(_CONTEXT))
    _hidden: Array = Factory(lambda: _zeros(_WIDTH))
    _cell: Array = Factory(lambda: _zeros(_WIDTH))

    def hear(self, samples: Samples) -> Probabilities:
        """Adds the next samples. Returns the probabilities of the frames that they complete, float32 [frames]."""
        heard = np.concatenate([self._rest, samples]).astype(np.float32, copy=False)
        count = len(heard) // FRAME
        self._rest = heard[count * FRAME :].copy()
        frames = heard[: count * FRAME].reshape(count, FRAME)
        parts = [self._frames(frames[at : at + _FRAMES_AT_ONCE]) for at in range(0, count, _FRAMES_AT_ONCE)]
        return np.concatenate([_zeros(0), *parts])

    def end(self) -> Probabilities:
        """Ends the stream. Returns the probability of the rest, as a frame filled up with silence, or an empty array if
        nothing is left."""
        if not len(self._rest):
            return _zeros(0)
        return self.hear(_zeros(FRAME - len(self._rest)))

    def _frames(self, frames: Array) -> Array:
        with self._within():
            return self._remembered(_encoded(self._weights, self._with_context(frames)))

    def _with_context(self, frames: Array) -> Array:
        """Returns [frames, 640]: each frame, after the samples before it, and followed by its own end mirrored."""
        contexts = np.concatenate([self._context[None], frames[:-1, -_CONTEXT:]])
        self._context = frames[-1, -_CONTEXT:].copy()
        return np.concatenate([contexts, frames, frames[:, -2 : -2 - _CONTEXT : -1]], axis=1)

    def _remembered(self, features: Array) -> Array:
        """Runs the recurrent layer (LSTM) frame by frame. Returns the probability of each frame."""
        weights = self._weights
        gates = (features @ weights.input)[:, 0] + weights.bias
        hidden = np.empty((len(gates), _WIDTH), np.float32)
        for row, gate in zip(hidden, gates, strict=True):
            gate += np.einsum("ij,j->i", weights.recurrent, self._hidden)  # noqa: PLW2901  (in place)
            taken, kept, shown = _sigmoid(gate.reshape(4, _WIDTH)[[0, 1, 3]])
            self._cell = kept * self._cell + taken * np.tanh(gate[2 * _WIDTH : 3 * _WIDTH])
            row[:] = self._hidden = shown * np.tanh(self._cell)
        return _sigmoid(np.maximum(hidden, 0) @ weights.output + np.float32(weights.output_bias))


def _encoded(weights: _Weights, samples: Array) -> Array:
    """Returns the features of each frame, [frames, 1, 128], from [frames, 640].

    Every product is a stack of products of small matrices, one for each frame: numpy's BLAS starts no threads for
    these.
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, _SPECTRUM, axis=1)[:, ::_HOP]  # [frames, 4, 256]
    windows = np.ascontiguousarray(windows)
    features = np.sqrt((windows @ weights.cosine) ** 2 + (windows @ weights.sine) ** 2)
    for (weight, bias), stride in zip(weights.convolutions, (1, 2, 2, 1), strict=True):
        features = np.maximum(_neighbours(features, stride) @ weight + bias, 0)
    return features


def _neighbours(features: Array, stride: int) -> Array:
    """Reshapes [frames, steps, channels] to [frames, steps / stride, 3 * channels]. Each step gets its two neighbours
    beside it, and zeros beyond the ends.
    """
    steps = features.shape[1]
    padded = np.pad(features, ((0, 0), (1, 1), (0, 0)))
    return np.concatenate([padded[:, tap : tap + steps : stride] for tap in range(3)], axis=2)


def _sigmoid(values: Array) -> Array:
    halves: Array = np.tanh(values / np.float32(2)) / np.float32(2)
    return halves + np.float32(0.5)  # as 1 / (1 + exp(-values)), but nothing overflows
