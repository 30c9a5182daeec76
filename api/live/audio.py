"""The audio of a live session: what may be fed, the samples that wait, and who hears them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import soxr
from attrs import define, field

from ...core.errors import InvalidRequest
from ..inputs.sources import Samples, full_scale, type_name
from ..speech.voice import Listener, Probabilities, VoiceActivity

Chunk: TypeAlias = npt.NDArray[Any]  # int16 or float32, of shape (n,)

MAX_PEAK = 2.0  # full scale is 1.0; audio that was resampled or decoded overshoots it a little
_ALLOWED = (
    "int16 samples as bytes (little endian, mono), or a 1-D int16 or float32 array, alone or with the session's rate: "
    "(samples, rate) or {'array': samples, 'sampling_rate': rate}"
)


def read_chunk(chunk: Any, rate: int) -> Chunk:
    """The samples of what is fed to a session of ``rate`` Hz; they may share the caller's memory.

    Raises:
        InvalidRequest: another type, dtype, shape or rate; bytes that are no whole samples; floats that are NaN,
            infinite or beyond full scale.
    """
    if isinstance(chunk, bytes | bytearray | memoryview):
        return _int16(chunk)
    samples = _array(_at_rate(chunk, rate))
    if samples.dtype.kind == "f":
        _check_floats(samples)
    return samples


def _int16(data: bytes | bytearray | memoryview) -> npt.NDArray[np.int16]:
    count = memoryview(data).nbytes
    if count % 2:
        raise InvalidRequest(
            f"a chunk of {count} bytes; allowed: an even number, int16 samples of 2 bytes each. Keep an odd last byte "
            "for the next chunk"
        )
    return np.frombuffer(data, "<i2").astype(np.int16, copy=False)


def _at_rate(chunk: Any, rate: int) -> Any:
    """The array of a chunk that carries its rate, which must be the session's."""
    found: Any
    if isinstance(chunk, Mapping):
        if missing := [key for key in ("array", "sampling_rate") if key not in chunk]:
            raise InvalidRequest(
                f"a chunk as a mapping without {' and '.join(map(repr, missing))}; allowed: {_ALLOWED}"
            )
        array, found = chunk["array"], chunk["sampling_rate"]
    elif isinstance(chunk, tuple) and len(chunk) == 2:
        array, found = chunk
    else:
        return chunk
    if isinstance(found, bool) or not isinstance(found, int | np.integer) or found != rate:
        raise InvalidRequest(
            f"a chunk at {found!r} Hz; allowed: {rate} Hz, the session's. Open the session with engine.live(rate=...) "
            "of your chunks, which it resamples"
        )
    return array


def _array(chunk: Any) -> Chunk:
    if not hasattr(chunk, "__array__"):
        raise InvalidRequest(f"a chunk given as {type_name(chunk)}; allowed: {_ALLOWED}")
    try:
        array = np.asarray(chunk)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"{type_name(chunk)} cannot be read as an array ({error}); allowed: {_ALLOWED}") from error
    if array.ndim != 1:
        raise InvalidRequest(
            f"a chunk of shape {array.shape}; allowed: one dimension, mono. Mix channels down first: "
            "samples.mean(axis=...) over the axis of the channels"
        )
    if array.dtype not in (np.int16, np.float32):
        raise InvalidRequest(
            f"a chunk of {array.dtype}; allowed: int16, or float32 with full scale at 1.0. "
            "Convert: samples.astype(np.float32)"
        )
    return array


def _check_floats(samples: Chunk) -> None:
    peak = float(np.abs(samples).max(initial=0.0))
    if not np.isfinite(peak):
        at = int(np.flatnonzero(~np.isfinite(samples))[0])
        raise InvalidRequest(f"a chunk whose sample {at} is NaN or infinite; allowed: finite samples")
    if peak > MAX_PEAK:
        raise InvalidRequest(
            f"a chunk with a peak of {peak:g}; allowed: full scale at 1.0 (up to {MAX_PEAK:g}). Samples that were "
            "integers are divided by their full scale: 16-bit ones by 32768"
        )


def pieces(samples: Chunk, most: int) -> Iterator[Chunk]:
    """Copies of up to ``most`` samples each."""
    for start in range(0, len(samples), most):
        yield samples[start : start + most].copy()


@define(eq=False)
class HeldSamples:
    """The samples of a session that may still be read, float32 at the model's rate, counted from its beginning."""

    start: int = field(default=0, init=False)
    stop: int = field(default=0, init=False)
    _parts: deque[Samples] = field(factory=deque, init=False)

    def append(self, samples: Samples) -> None:
        """Takes the next samples."""
        if len(samples):
            self._parts.append(samples)
            self.stop += len(samples)

    def forget(self, until: int) -> None:
        """Drops the samples before ``until``."""
        until = min(until, self.stop)
        while self.start < until:
            part = self._parts.popleft()
            dropped = min(len(part), until - self.start)
            if dropped < len(part):
                self._parts.appendleft(part[dropped:].copy())  # a view would keep all of it
            self.start += dropped

    def read(self, start: int, stop: int) -> Samples:
        """A copy of samples ``start`` to ``stop``, which must be held."""
        assert self.start <= start <= stop <= self.stop, f"{start} to {stop} of {self.start} to {self.stop}"
        found, at = [], self.start
        for part in self._parts:
            found.append(part[max(start - at, 0) : max(stop - at, 0)])
            at += len(part)
        return np.concatenate([np.zeros(0, np.float32), *found])


@define(eq=False)
class Ear:
    """Turns chunks into samples at the model's rate and probabilities of speech. It blocks, and one thread at a time
    may use it.

    Raises:
        InvalidRequest: the detector hears another rate than the model.
    """

    rate: int
    detector: VoiceActivity
    model_rate: int
    _resampler: soxr.ResampleStream | None = field(init=False)
    _listener: Listener | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.detector.sampling_rate != self.model_rate:
            raise InvalidRequest(
                f"voice activity at {self.detector.sampling_rate} Hz; allowed: {self.model_rate} Hz, the model's"
            )
        same = self.rate == self.model_rate
        self._resampler = (
            None if same else soxr.ResampleStream(self.rate, self.model_rate, 1, dtype="float32", quality="HQ")
        )

    def hear(self, chunk: Chunk) -> tuple[Samples, Probabilities]:
        """The next samples, and the probabilities of the frames that are whole now."""
        scale = np.float32(1 if chunk.dtype == np.float32 else 1 / full_scale(chunk.dtype))
        return self._heard(chunk.astype(np.float32) * scale, last=False)

    def end(self) -> tuple[Samples, Probabilities]:
        """No more chunks come: what is left."""
        samples, probabilities = self._heard(np.zeros(0, np.float32), last=True)
        return samples, np.concatenate([probabilities, self._listening().end()])

    def _heard(self, samples: Samples, *, last: bool) -> tuple[Samples, Probabilities]:
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=last)
        return samples, self._listening().hear(samples)

    def _listening(self) -> Listener:
        if self._listener is None:
            self._listener = self.detector.listen()
        return self._listener
