"""The audio of a live session: the chunks that may be fed, and the ear that hears them."""

from __future__ import annotations

from typing import Any

import numpy as np
import soxr
from attrs import define, field

from ...core.errors import InvalidRequest
from ..inputs.blocks import new_resampler
from ..inputs.sources import ArraySource, Samples, array_source, check_values, type_name
from ..speech.voice import Listener, Probabilities, VoiceActivity

MAX_PEAK = 2.0  # full scale is 1.0; audio that was resampled or decoded overshoots it a little
_ALLOWED = (
    "int16 samples as bytes (little endian, mono), or a 1-D int16 or float array, without a rate or with the "
    "session's: (samples, rate) or {'array': samples, 'sampling_rate': rate}"
)


def read_chunk(chunk: Any, rate: int) -> ArraySource:
    """Returns the samples of a chunk that is fed to a session of ``rate`` Hz. They may share the caller's memory.

    Raises:
        InvalidRequest: a type, dtype, shape or rate that is not allowed; bytes that end within a sample; floats that
            are NaN, infinite or beyond full scale.
    """
    if isinstance(chunk, bytes | bytearray | memoryview):
        count = memoryview(chunk).nbytes
        if count % 2:
            raise InvalidRequest(
                f"a chunk has {count} bytes; allowed: an even number, since an int16 sample has 2 bytes. Keep an odd "
                "last byte for the next chunk"
            )
        return ArraySource(np.frombuffer(chunk, "<i2"), rate)
    found = array_source(chunk, "a chunk", int16=True)
    if found is None:
        raise InvalidRequest(f"a chunk has the type {type_name(chunk)}; allowed: {_ALLOWED}")
    if found.rate not in (None, rate):
        raise InvalidRequest(
            f"a chunk has {found.rate} Hz; allowed: {rate} Hz, the rate of the session. Open the session with "
            "engine.live(rate=...), the rate of your chunks"
        )
    if found.samples.dtype.kind == "f":
        check_values(found.samples, "a chunk", InvalidRequest, most=MAX_PEAK)
    return found


@define(eq=False)
class Ear:
    """Turns chunks into samples at the model's rate, and into probabilities of speech. Its calls block, and one thread
    at a time may use it.

    Raises:
        InvalidRequest: the detector's rate is not the model's.
    """

    rate: int
    detector: VoiceActivity
    model_rate: int
    _resampler: soxr.ResampleStream | None = field(init=False)
    _listener: Listener | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.detector.sampling_rate != self.model_rate:
            raise InvalidRequest(
                f"the voice activity detector has {self.detector.sampling_rate} Hz; allowed: {self.model_rate} "
                "Hz, the rate of the model"
            )
        self._resampler = new_resampler(self.rate, self.model_rate)

    def hear(self, chunk: Samples, *, last: bool = False) -> tuple[Samples, Probabilities]:
        """Returns the next samples, and the probabilities of the frames that they complete. ``last``: no more chunks
        come, and the last frame need not be complete."""
        samples = chunk if self._resampler is None else self._resampler.resample_chunk(chunk, last=last)
        if self._listener is None:
            self._listener = self.detector.listen()
        probabilities = self._listener.hear(samples)
        return samples, np.concatenate([probabilities, self._listener.end()]) if last else probabilities
