"""`Recording`: hours of audio, decoded only as far as windows are asked for.

Nothing runs between two windows. If a window is not decoded yet, a worker thread decodes up to its end, and at most one
more block. So memory holds only the samples from `Recording.forget` to the last window, and no thread outlives a call.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from typing import Any, Self

import numpy as np
import trio
from attrs import define, field

from ...core.errors import InvalidRequest, UnsupportedAudio
from .audio import Blocks, open_blocks
from .containers import Stops
from .sources import (
    INLINE_SAMPLES,
    MIN_SECONDS,
    SAMPLING_RATE,
    ArraySource,
    AudioSource,
    Samples,
    array_source,
    check_all,
    check_bound,
    check_length,
    check_rate,
)
from .threads import run_in_thread
from .timeline import AudioFault


@define(eq=False)
class HeldSamples:
    """Samples that were appended and may still be read, counted from the stream's beginning.

    Attributes:
        start: the samples before this one were forgotten.
        stop: the number of samples that were appended so far.
    """

    start: int = field(default=0, init=False)
    stop: int = field(default=0, init=False)
    _parts: deque[tuple[int, Samples]] = field(factory=deque, init=False)  # each with the place of its first sample

    @property
    def count(self) -> int:
        """The number of samples in memory."""
        return sum(len(part) for _, part in self._parts)

    def append(self, samples: Samples) -> None:
        """Adds the next samples, without a copy."""
        if len(samples):
            self._parts.append((self.stop, samples))
            self.stop += len(samples)
            self.forget(self.start)

    def forget(self, before: int) -> None:
        """Drops the parts that end at sample ``before`` or earlier. ``before`` may lie beyond the last sample that was
        appended."""
        self.start = max(self.start, before)
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= self.start:
            self._parts.popleft()

    def read(self, start: int, stop: int) -> Samples:
        """Returns a copy of samples ``start`` to ``stop``, which must not be forgotten; fewer if fewer were
        appended."""
        assert start >= self.start, f"sample {start} was forgotten: all before {self.start} were"
        found = np.zeros(max(min(stop, self.stop) - start, 0), np.float32)
        for first, part in self._parts:
            begin, end = max(start, first), min(stop, first + len(part))
            if begin < end:
                found[begin - start : end - start] = part[begin - first : end - first]
        return found


# ---- recordings ------------------------------------------------------------------------------------------------------


_SECONDS_AT_ONCE = 10  # of audio for one call in a thread


def _open(source: AudioSource, sampling_rate: int, most_seconds: float, stops: Stops) -> tuple[Blocks, list[Samples]]:
    """Opens ``source`` and reads its beginning, so that a source that can never work is refused at once."""
    blocks = open_blocks(source, sampling_rate, stops)
    try:
        least = round(MIN_SECONDS * sampling_rate)
        blocks.check_bound(most_seconds)
        found = blocks.read(least, stops)
        if blocks.done < least:
            blocks.check()
    except BaseException:
        blocks.close()
        raise
    return blocks, found


class Recording:
    """One audio, read window by window: ``async with Recording(source) as recording``.

    Entering opens the source in a worker thread and decodes its first block. A file given by its path is read as a
    stream. Bytes, and the content of a file object, stay in memory as they are, encoded. An array at ``sampling_rate``
    is not copied, so it must not change meanwhile. Any number of tasks may ask for windows at once. Leaving the block
    closes the file, on every way out. A thread that still decodes is stopped between two packets.

    What cannot be decoded becomes silence of the same length, and `faults` says so. If nothing more can be read, the
    recording ends there. If less than `MIN_SECONDS` can be read, entering the block raises an error, as `load_audio`
    does.

    Attributes:
        sampling_rate: the rate of the windows, in Hz.
        faults: what is wrong with the audio, as far as it was decoded.
        lost: the seconds that have no sound therefore, (start, end), if they are a second or more.

    Args:
        source: see `load_audio`.
        sampling_rate: the rate of the windows, in Hz: the model's.
        strict: a window that reaches to a loss raises `UnsupportedAudio`.
        most_seconds: longer audio raises `RequestTooLarge` as soon as that is known.

    Raises:
        InvalidRequest: on entering, as from `load_audio`; `UnsupportedAudio` and `RequestTooLarge` are kinds of it.
    """

    def __init__(
        self,
        source: AudioSource,
        *,
        sampling_rate: int = SAMPLING_RATE,
        strict: bool = False,
        most_seconds: float = math.inf,
    ) -> None:
        self.sampling_rate = sampling_rate
        self.faults: tuple[AudioFault, ...] = ()
        self.lost: tuple[tuple[float, float], ...] = ()
        self._strict = strict
        self._most_seconds = most_seconds
        self._closing = False
        self._source: AudioSource | None = source
        self._entered = False
        self._array: ArraySource | None = None
        self._blocks: Blocks | None = None
        self._length: int | None = None  # of the whole recording, once it is known
        self._promised: float | None = None  # seconds
        self._held = HeldSamples()
        self._decoding = trio.Lock()

    # -- the block -----------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection  # a ^C after the thread's call would leave the file open
    async def __aenter__(self) -> Self:
        assert not self._entered, "a recording is entered once"
        source: Any = self._source
        self._source, self._entered = None, True
        check_rate(self.sampling_rate, "sampling_rate", InvalidRequest)
        array = array_source(source)
        if array is not None and array.rate in (None, self.sampling_rate):
            await self._check(array)
            self._array, self._length = array, len(array.samples)
            return self
        try:
            work = partial(_open, source, self.sampling_rate, self._most_seconds, self._stops)
            blocks, found = await run_in_thread(work)
        except InvalidRequest:
            await trio.lowlevel.checkpoint_if_cancelled()  # the thread was stopped
            raise
        self._blocks, self._promised = blocks, blocks.decoding.seconds
        self._take(blocks, found)
        return self

    async def _check(self, array: ArraySource) -> None:
        check = partial(check_all, array.samples, "the audio")
        await run_in_thread(check, short=len(array.samples) <= INLINE_SAMPLES)
        check_length(len(array.samples), "the audio", self.sampling_rate)
        check_bound(len(array.samples) / self.sampling_rate, "the audio", self._most_seconds)

    async def __aexit__(self, *end: object) -> None:
        del end
        await self.aclose()

    @trio.lowlevel.enable_ki_protection
    async def aclose(self) -> None:
        """Closes the file and drops all samples. Leaving the block does the same; a second call does nothing."""
        self._closing = True
        with trio.CancelScope(shield=True):
            async with self._decoding:
                blocks, self._blocks = self._blocks, None
                self._array, self._source = None, None
                self._held.forget(self._held.stop)
                if blocks is not None:
                    blocks.close()

    # -- what is known -------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int | None:
        """The number of samples in the whole recording; ``None`` until its end is reached. Closing keeps the value."""
        return self._length

    @property
    def duration(self) -> float | None:
        """The length in seconds, exact once the end is reached. Before that it is the promise of the header (an
        estimate for MP3 and Ogg), or the decoded length if that is longer. ``None``: the header promises no length.
        Closing keeps the value.
        """
        if self._length is not None:
            return self._length / self.sampling_rate
        return None if self._promised is None else max(self._promised, self._held.stop / self.sampling_rate)

    @property
    def broken(self) -> str | None:
        """The sentences about losses; ``None`` while all is well."""
        return " ".join(fault.message for fault in self.faults if fault.is_loss) or None

    @property
    def held(self) -> int:
        """The number of samples that wait in memory; 0 for an array, which is the caller's."""
        return self._held.count

    # -- samples -------------------------------------------------------------------------------------------------------

    @trio.lowlevel.enable_ki_protection
    async def window(self, start: int, length: int) -> Samples:
        """Returns samples ``start`` to ``start + length`` as a float32 copy of shape (n,). n is less than ``length``
        only at the end of the recording.

        If the samples are decoded already, the call returns at once and is no checkpoint.

        Raises:
            UnsupportedAudio: with ``strict``, if something is lost before the end of the window.
            RequestTooLarge: the audio is too long.
        """
        stop = start + length
        if self._array is not None:
            return self._array.part(start, stop)
        assert self._blocks is not None, "a window was asked of a recording that is not open"
        while self._held.stop < stop and self._length is None:
            await self._decode(stop)
        lost = [fault for fault in self.faults if fault.is_loss and fault.start * self.sampling_rate < stop]
        if self._strict and lost:
            raise UnsupportedAudio(lost[0].message)
        return self._held.read(start, stop)

    def forget(self, before: int) -> None:
        """Drops the samples before ``before``, which nobody will ask for again. They need not be decoded yet."""
        self._held.forget(before)

    async def _decode(self, upto: int) -> None:
        """Decodes up to ``upto``, or only a part of the way, so that a cancellation is noticed between two calls."""
        async with self._decoding:
            blocks = self._blocks
            assert blocks is not None, "a recording was closed while a window was asked of it"
            if self._held.stop >= upto or self._length is not None:
                return  # another task has decoded them
            upto = min(upto, blocks.done + _SECONDS_AT_ONCE * self.sampling_rate)
            self._take(blocks, await run_in_thread(partial(blocks.read, upto, self._stops)))
            blocks.check_bound(self._most_seconds)

    def _stops(self) -> bool:
        """Tells the thread to stop: nobody waits for its answer any more."""
        try:
            trio.from_thread.check_cancelled()
        except trio.Cancelled:
            return True
        return self._closing

    def _take(self, blocks: Blocks, found: list[Samples]) -> None:
        for samples in found:
            self._held.append(samples)
        self._length, self.faults = self._held.stop if blocks.ended else None, blocks.faults
        self.lost = tuple(blocks.decoding.timeline.faults.lost)
        if blocks.fault is not None:
            seconds = blocks.done / self.sampling_rate
            told = f"{blocks.fault} (nothing could be read from {seconds:.2f} s on)"
            self.faults += (AudioFault(seconds, seconds, "damaged", told),)
            blocks.fault = None
