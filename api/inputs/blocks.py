"""Mono samples of any audio source, float32, at one rate, about a second at a time. soxr resamples."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing

import numpy as np
import soxr
from attrs import define, field

from ...core.errors import InvalidRequest, UnsupportedAudio
from .decoding import Part, open_decoder
from .sources import (
    AudioSource,
    Samples,
    array_source,
    check_all,
    check_length,
    check_rate,
    check_values,
    opened,
)


@define(eq=False)
class Blocks:
    """The blocks of one open source, float32 of shape (n,), n at least 1. One thread at a time may call `read`, which
    waits for the source.

    Attributes:
        sampling_rate: the rate of the blocks, in Hz.
        name: the name of the source, for messages.
        seconds: the length that the source promises, see `Decoding.seconds`.
        done: the number of samples that were read.
        ended: no more blocks come.
        fault: the error that ended the audio early; ``None``: there was none.
    """

    _blocks: Iterator[Samples]
    _stack: ExitStack
    sampling_rate: int
    name: str
    seconds: float | None
    done: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    fault: InvalidRequest | None = field(default=None, init=False)

    def read(self, upto: float) -> list[Samples]:
        """Returns the next blocks, up to sample ``upto`` of the source or to its end."""
        found: list[Samples] = []
        while self.done < upto and not self.ended:
            try:
                found.append(next(self._blocks))
                self.done += len(found[-1])
            except StopIteration:
                self.ended = True
            except OSError as error:
                self._fail(unreadable(self.name, error))
            except InvalidRequest as error:
                self._fail(error)
        return found

    def _fail(self, error: InvalidRequest) -> None:
        self.ended, self.fault = True, error.with_traceback(None)  # else it would keep its frames

    def check(self) -> None:
        """Raises the fault, or `InvalidRequest` if too little was read to hear anything."""
        fault, self.fault = self.fault, None
        try:
            if fault is not None:
                raise fault
            check_length(self.done, self.name, self.sampling_rate)
        finally:
            del fault  # a frame in its own error's traceback would be a reference cycle

    def close(self) -> None:
        """Closes the source; no more blocks come. A second call does nothing."""
        self._stack.close()


def open_blocks(source: AudioSource, sampling_rate: int) -> Blocks:
    """Opens ``source`` and returns its `Blocks` at ``sampling_rate`` Hz. `load_audio` says what a source may be.

    Raises:
        InvalidRequest: the source can never work, or cannot be read.
        UnsupportedAudio: the source is not audio, has no audio stream, or is empty.
    """
    array = array_source(source)
    if array is not None:
        check_all(array.samples, "the array")
        rate = array.rate or sampling_rate
        parts = ((rate, array.part(start, start + rate)[:, None]) for start in range(0, len(array.samples), rate))
        mono = _mono(parts, "the array", sampling_rate)
        return Blocks(mono, ExitStack(), sampling_rate, "the array", len(array.samples) / rate)
    with ExitStack() as stack:
        file, name = stack.enter_context(opened(source))
        try:
            decoding = open_decoder(file, name, stack)
        except OSError as error:
            raise unreadable(name, error) from error
        mono = stack.enter_context(closing(_mono(decoding.parts, name, sampling_rate)))
        return Blocks(mono, stack.pop_all(), sampling_rate, name, decoding.seconds)


def unreadable(name: str, error: OSError) -> InvalidRequest:
    """Returns the error for a file whose device fails."""
    return InvalidRequest(f"{name} cannot be read ({error}); allowed: a readable audio file")


def _mono(parts: Iterator[Part], name: str, sampling_rate: int) -> Generator[Samples, None, None]:
    """Yields the mono blocks of the parts. All samples before an error are yielded before it is raised, including those
    that are still in the resampler.
    """
    resampler, current, heard = None, 0, 0
    try:
        for rate, frames in parts:
            if rate != current:  # joined streams may have different rates
                yield from _resampled(resampler, _NOTHING, last=True)
                check_rate(rate, f"the sampling rate of {name}", UnsupportedAudio)
                resampler, current, heard = new_resampler(rate, sampling_rate), rate, 0
            channels = frames.shape[1]
            mono = frames[:, 0] if channels == 1 else frames @ np.full(channels, 1 / channels, np.float32)
            sound = np.isfinite(mono)
            good = len(mono) if sound.all() else int(sound.argmin())
            check_values(mono[:good], name, UnsupportedAudio, heard)
            yield from _resampled(resampler, mono[:good])
            check_values(mono, name, UnsupportedAudio, heard)
            heard += len(mono)
    except (UnsupportedAudio, OSError):
        yield from _resampled(resampler, _NOTHING, last=True)
        raise
    yield from _resampled(resampler, _NOTHING, last=True)


_NOTHING = np.zeros(0, np.float32)


def new_resampler(rate: int, sampling_rate: int) -> soxr.ResampleStream | None:
    """Returns the resampler of mono samples from ``rate`` to ``sampling_rate``, or ``None`` if the rates are the
    same."""
    if rate == sampling_rate:
        return None
    return soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")


def _resampled(resampler: soxr.ResampleStream | None, mono: Samples, *, last: bool = False) -> Iterator[Samples]:
    ready = mono if resampler is None else resampler.resample_chunk(np.ascontiguousarray(mono), last=last)
    if len(ready):
        yield ready
