"""From any audio source to blocks: mono samples, float32, at one rate, about a second at a time. soxr resamples."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from typing import Self

import numpy as np
import soxr

from ...core.errors import InvalidRequest, UnsupportedAudio
from .decoding import Part, open_decoder
from .sources import ArraySource, AudioSource, Samples, array_source, check_all, check_rate, check_values, opened


class Blocks:
    """An iterator over one source's blocks, float32 of shape (n,), n at least 1. `close` ends it and closes its file.

    Where the source breaks, the blocks before come first, and then the error. It blocks, and one thread at a time may
    use it.

    Attributes:
        name: of the source, for messages.
        seconds: what the source promises to last, see `Decoding.seconds`.
    """

    def __init__(self, blocks: Iterator[Samples], stack: ExitStack, name: str, seconds: float | None) -> None:
        self._blocks = blocks
        self._stack = stack
        self.name = name
        self.seconds = seconds

    def __iter__(self) -> Iterator[Samples]:
        return self

    def __next__(self) -> Samples:
        try:
            return next(self._blocks)
        except OSError as error:
            raise unreadable(self.name, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what was opened; no more blocks come. A second call does nothing."""
        self._stack.close()


def open_blocks(source: AudioSource, sampling_rate: int) -> Blocks:
    """Opens ``source`` and returns its `Blocks` at ``sampling_rate`` Hz. See `load_audio` for what a source may be.

    Raises:
        InvalidRequest: the source can never work, or cannot be read.
        UnsupportedAudio: not audio, without an audio stream, empty.
    """
    check_rate(sampling_rate, "sampling_rate", InvalidRequest)
    array = array_source(source)
    if array is not None:
        check_all(array.samples, "the array")
        rate = array.rate or sampling_rate
        parts = _array_parts(array, rate)
        return Blocks(_mono(parts, "the array", sampling_rate), ExitStack(), "the array", len(array.samples) / rate)
    with ExitStack() as stack:
        file, name = stack.enter_context(opened(source))
        try:
            decoding = open_decoder(file, name, stack)
        except OSError as error:
            raise unreadable(name, error) from error
        blocks = stack.enter_context(closing(_mono(decoding.parts, name, sampling_rate)))
        return Blocks(blocks, stack.pop_all(), name, decoding.seconds)


def unreadable(name: str, error: OSError) -> InvalidRequest:
    """The error of a file whose device fails."""
    return InvalidRequest(f"{name} cannot be read ({error}); allowed: a readable audio file")


def _array_parts(array: ArraySource, rate: int) -> Iterator[Part]:
    for start in range(0, len(array.samples), rate):
        yield rate, array.part(start, start + rate)[:, None]


def _mono(parts: Iterator[Part], name: str, sampling_rate: int) -> Generator[Samples, None, None]:
    """Blocks of the parts. What comes before an error, and what is still in the resampler, is given before it."""
    converter: _Converter | None = None
    try:
        for rate, frames in parts:
            if converter is None or converter.rate != rate:
                if converter is not None:
                    yield from converter.finish()
                converter = _Converter(name, rate, sampling_rate)
            yield from converter.convert(frames)
    except (UnsupportedAudio, OSError):
        if converter is not None:
            yield from converter.finish()
        raise
    if converter is not None:
        yield from converter.finish()


class _Converter:
    """Turns frames of one rate into mono samples of another."""

    def __init__(self, name: str, rate: int, sampling_rate: int) -> None:
        check_rate(rate, f"the sampling rate of {name}", UnsupportedAudio)
        self._name = name
        self.rate = rate
        self._resampler = None
        if rate != sampling_rate:
            self._resampler = soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")
        self._frames = 0

    def convert(self, frames: Samples) -> Iterator[Samples]:
        """Takes frames of shape (frames, channels). Those before one that is no number are given before the error."""
        channels = frames.shape[1]
        mono = frames[:, 0] if channels == 1 else frames @ np.full(channels, 1 / channels, np.float32)
        sound = np.isfinite(mono)
        good = len(mono) if sound.all() else int(sound.argmin())
        check_values(mono[:good], self._name, UnsupportedAudio, self._frames)
        yield from self._resampled(mono[:good])
        check_values(mono, self._name, UnsupportedAudio, self._frames)
        self._frames += len(mono)

    def finish(self) -> Iterator[Samples]:
        """What is still in the resampler."""
        if self._resampler is not None:
            yield from self._some(self._resampler.resample_chunk(np.zeros(0, np.float32), last=True))
            self._resampler = None

    def _resampled(self, mono: Samples) -> Iterator[Samples]:
        ready = mono if self._resampler is None else self._resampler.resample_chunk(np.ascontiguousarray(mono))
        return self._some(ready)

    def _some(self, samples: Samples) -> Iterator[Samples]:
        if len(samples):
            yield samples
