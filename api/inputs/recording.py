"""`Recording`: audio of hours, decoded as far as it is asked for.

Nothing runs between two windows: a window that is not there yet has a worker thread decode up to its end, and one more
block at most. So memory holds what lies between `Recording.forget` and the last window, and there is no thread to end.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import trio
from attrs import Factory, define, frozen

from ...core.errors import InvalidRequest, UnsupportedAudio
from .blocks import Blocks, open_blocks
from .sources import (
    MIN_SECONDS,
    SAMPLING_RATE,
    ArraySource,
    AudioSource,
    Samples,
    array_source,
    check_all,
    check_length,
    check_rate,
)
from .threads import run_in_thread

_SECONDS_AT_ONCE = 10  # of audio that one call of a thread decodes: a tenth of a second, which a cancelled caller waits
_INLINE_SAMPLES = 1_000_000  # checking more samples would hold the loop up for over a millisecond
_EXACT_SCALE = 1 / 32768  # of 16-bit samples
_LEAST_SCALE = 1e-8  # what lies 160 dB below full scale is silence, not worth bits


@frozen(eq=False)
class _Packed:
    """Samples that wait, from sample ``start`` of the recording on, as int16 times ``scale``.

    int16 and not float16: the samples of 16-bit files are kept exactly, and others to a 65,534th of their block's peak
    (96 dB below it, where Whisper's features end 80 dB below theirs); float16 keeps loud samples to a 4,096th only.
    """

    start: int
    values: npt.NDArray[np.int16]
    scale: float

    @classmethod
    def of(cls, samples: Samples, start: int) -> _Packed:
        scaled = samples * np.float32(32768)
        values = np.rint(scaled)
        if np.array_equal(values, scaled) and values.min(initial=0) >= -32768 and values.max(initial=0) <= 32767:
            return cls(start, values.astype(np.int16), _EXACT_SCALE)
        scale = max(float(np.abs(samples).max()) / 32767, _LEAST_SCALE)
        return cls(start, np.rint(samples / np.float32(scale)).astype(np.int16), scale)

    @property
    def stop(self) -> int:
        return self.start + len(self.values)

    def samples(self, start: int, stop: int) -> Samples:
        """Samples ``start`` to ``stop`` of the recording, float32."""
        part = self.values[start - self.start : stop - self.start]
        return part * np.float32(self.scale)


@define
class _Waiting:
    """The samples that are decoded and not forgotten."""

    start: int = 0  # samples before it were forgotten
    stop: int = 0  # samples that are decoded
    ended: bool = False  # there are no more
    _packed: deque[_Packed] = Factory(deque)

    @property
    def held(self) -> int:
        return sum(len(packed.values) for packed in self._packed)

    def add(self, packed: list[_Packed], stop: int, *, ended: bool) -> None:
        self._packed.extend(packed)
        self.stop, self.ended = stop, ended
        self.forget(self.start)

    def forget(self, before: int) -> None:
        self.start = max(self.start, before)
        while self._packed and self._packed[0].stop <= self.start:
            self._packed.popleft()

    def samples(self, start: int, stop: int) -> Samples:
        samples = np.zeros(max(stop - start, 0), np.float32)
        for packed in self._packed:
            first, last = max(start, packed.start), min(stop, packed.stop)
            if first < last:
                samples[first - start : last - start] = packed.samples(first, last)
        return samples


@define
class _Decoder:
    """Takes blocks and packs them, in a worker thread; the loop looks at it between two calls only."""

    blocks: Blocks
    done: int = 0  # samples
    ended: bool = False
    fault: InvalidRequest | None = None  # why it ended, if not at the end of the audio

    def decode(self, upto: int, *, wanted_from: int) -> list[_Packed]:
        """Blocks up to sample ``upto``, or to the end. Those before ``wanted_from`` are decoded and dropped."""
        found: list[_Packed] = []
        while self.done < upto and not self.ended:
            samples = self._next()
            if samples is not None:
                if self.done + len(samples) > wanted_from:
                    found.append(_Packed.of(samples, self.done))
                self.done += len(samples)
        return found

    def _next(self) -> Samples | None:
        try:
            return next(self.blocks)
        except StopIteration:
            self.ended = True
        except InvalidRequest as error:
            self.ended, self.fault = True, error.with_traceback(None)  # else its frames would live on with it
        return None


def _open(source: AudioSource, sampling_rate: int) -> tuple[_Decoder, list[_Packed]]:
    """Opens ``source`` and decodes its beginning, so that what can never work is refused at once."""
    blocks = open_blocks(source, sampling_rate)
    try:
        decoder = _Decoder(blocks)
        least = round(MIN_SECONDS * sampling_rate)
        packed = decoder.decode(least, wanted_from=0)
        if decoder.done < least:
            fault, decoder.fault = decoder.fault, None
            try:
                if fault is not None:
                    raise fault
                check_length(decoder.done, blocks.name, sampling_rate)
            finally:
                del fault
    except BaseException:
        blocks.close()
        raise
    return decoder, packed


class Recording:
    """One audio, read window by window: ``async with Recording(source) as recording``.

    Entering opens the source in a worker thread and decodes its first block. A file given by its path is read as a
    stream. Bytes, and what a file object gives, stay in memory as they are, encoded. An array at ``sampling_rate`` is
    neither copied nor kept as int16: it is read where it lies, and must not change meanwhile. Any number of tasks may
    ask for windows at once. Leaving the block closes the file, on every way out; it waits for a call of a thread that
    still decodes, which takes a tenth of a second or so.

    Where the audio breaks in the middle the recording ends there, and `broken` says so. Where less than `MIN_SECONDS`
    can be read entering the block raises, as `load_audio` does.

    Attributes:
        sampling_rate: of the windows, in Hz.
        broken: what is wrong and from which second on nothing could be read; ``None`` while all is well.

    Args:
        source: see `load_audio`.
        sampling_rate: of the windows, in Hz; the model's.
        strict: a window that reaches to where the audio breaks raises `UnsupportedAudio`.

    Raises:
        InvalidRequest: as `load_audio`, on entering; `UnsupportedAudio` among them.
    """

    def __init__(self, source: AudioSource, *, sampling_rate: int = SAMPLING_RATE, strict: bool = False) -> None:
        self.sampling_rate = sampling_rate
        self.broken: str | None = None
        self._strict = strict
        self._source: AudioSource | None = source
        self._entered = False
        self._array: ArraySource | None = None
        self._decoder: _Decoder | None = None
        self._waiting = _Waiting()
        self._decoding = trio.Lock()

    # -- the block -----------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection  # a ^C behind the thread's call would leave the file open
    async def __aenter__(self) -> Self:
        assert not self._entered, "a recording is entered once"
        source: Any = self._source
        self._source, self._entered = None, True
        check_rate(self.sampling_rate, "sampling_rate", InvalidRequest)
        array = array_source(source)
        if array is not None and array.rate in (None, self.sampling_rate):
            await self._check(array)
            self._array = array
            return self
        self._decoder, packed = await run_in_thread(partial(_open, source, self.sampling_rate))
        self._take(packed)
        return self

    async def _check(self, array: ArraySource) -> None:
        check = partial(check_all, array.samples, "the array")
        if len(array.samples) <= _INLINE_SAMPLES:
            check()
        else:
            await run_in_thread(check)
        check_length(len(array.samples), "the array", self.sampling_rate)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del error, traceback
        await self.aclose()

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Closes the file and drops all samples. Leaving the block does it too; a second call does nothing."""
        with trio.CancelScope(shield=True):
            async with self._decoding:
                decoder, self._decoder = self._decoder, None
                self._array, self._source = None, None
                self._waiting = _Waiting()
                if decoder is not None:
                    decoder.blocks.close()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """Samples of the whole recording; ``None`` until its end was reached."""
        if self._array is not None:
            return len(self._array.samples)
        return self._waiting.stop if self._waiting.ended else None

    @property
    def duration(self) -> float | None:
        """Seconds: what the header promises (an estimate for MP3 and Ogg; ``None``: nothing), or what was decoded where
        that is more; exact once the end was reached."""
        if self.length is not None:
            return self.length / self.sampling_rate
        promised = None if self._decoder is None else self._decoder.blocks.seconds
        return None if promised is None else max(promised, self._waiting.stop / self.sampling_rate)

    @property
    def held(self) -> int:
        """Samples that wait in memory, 2 bytes each; none of an array, which is the caller's."""
        return self._waiting.held

    # -- samples -------------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def window(self, start: int, length: int) -> Samples:
        """Samples ``start`` to ``start + length``: float32 of its own, shape (n,), n < ``length`` at the end alone.

        It returns at once, and is no checkpoint, where the samples are there.

        Raises:
            UnsupportedAudio: with ``strict``, where the audio breaks before the window's end.
        """
        assert start >= self._waiting.start, f"sample {start} was forgotten: all before {self._waiting.start} were"
        stop = start + length
        if self._array is not None:
            return self._array.part(start, stop)
        while self._waiting.stop < stop and self.length is None:
            await self._decode(stop)
        if self.broken is not None and self._strict and stop > self._waiting.stop:
            raise UnsupportedAudio(self.broken)
        return self._waiting.samples(start, min(stop, self._waiting.stop))

    def forget(self, before: int) -> None:
        """Drops the samples before ``before``, which will not be asked for again. They need not be decoded yet."""
        self._waiting.forget(before)

    async def _decode(self, upto: int) -> None:
        """Decodes up to ``upto``, or a part of the way, after which a cancellation is seen."""
        async with self._decoding:
            decoder = self._decoder
            assert decoder is not None, "a window was asked of a recording that is not open"
            if self._waiting.stop >= upto or self._waiting.ended:
                return  # another task has had it decoded
            upto = min(upto, decoder.done + _SECONDS_AT_ONCE * self.sampling_rate)
            self._take(await run_in_thread(partial(decoder.decode, upto, wanted_from=self._waiting.start)))

    def _take(self, packed: list[_Packed]) -> None:
        decoder = self._decoder
        assert decoder is not None, "samples without a decoder"
        self._waiting.add(packed, decoder.done, ended=decoder.ended)
        if decoder.fault is not None:
            seconds = decoder.done / self.sampling_rate
            self.broken = f"{decoder.fault} (nothing could be read from {seconds:.2f} s on)"
            decoder.fault = None
