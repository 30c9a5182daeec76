"""Loads audio: any file, bytes or array becomes mono float32 samples at one rate.

`sources` defines what may be given, and `decoding` turns files into frames. `Blocks` are mono samples at one rate,
about a second at a time; soxr resamples. `load_audio` returns all samples at once; `recording` reads hours of audio bit
by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing

import numpy as np
import soxr
from attrs import define, field

from ...core.errors import InvalidRequest, UnsupportedAudio
from ...core.tracebacks import raise_kept
from ...models.speech.content import content_key
from .containers import Stopped, Stops, Watch, go_on
from .decoding import Decoding, open_decoder
from .sources import (
    MAX_PEAK,
    MIN_SECONDS,
    SAMPLING_RATE,
    AudioSource,
    AudioTrack,
    Samples,
    array_source,
    check_all,
    check_bound,
    check_length,
    check_rate,
    check_values,
    opened,
)
from .timeline import AudioFault, FaultLog, Timeline

_LOUDEST = 2.0**32  # integers kept as floats are smaller; larger values are no sound
_CANCELLED = 1e-3  # of the channels' mean power: a mix with less is as good as silent
_AS_INTEGERS = 0.25  # if more samples than this are above `MAX_PEAK`, they are integers kept as floats


@define(eq=False)
class Blocks:
    """The blocks of one open source, float32 of shape (n,). One thread at a time may call `read`, which waits for the
    source.

    Attributes:
        sampling_rate: the rate of the blocks, in Hz.
        decoding: the decoder.
        done: the number of samples that were read.
        ended: no more blocks come.
        fault: the error that ended the audio early; ``None``: there was none.
    """

    _blocks: Iterator[Samples]
    _stack: ExitStack
    sampling_rate: int
    decoding: Decoding
    _reopen: Callable[[ExitStack], Decoding] | None = None
    _watch: Watch = field(factory=Watch)
    done: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    fault: InvalidRequest | None = field(default=None, init=False)
    _again: int = field(default=0, init=False)  # samples that were read before the source was opened again
    _died: str | None = field(default=None, init=False)  # of an error that nobody expected

    @property
    def name(self) -> str:
        """The name of the source, for messages."""
        return self.decoding.timeline.faults.name

    @property
    def faults(self) -> tuple[AudioFault, ...]:
        """The faults of the source, as far as it was read."""
        return self.decoding.timeline.faults.faults

    def read(self, upto: float, stops: Stops = go_on) -> list[Samples]:
        """Returns the next blocks, up to sample ``upto`` of the source or to its end; fewer if ``stops`` returns
        true."""
        if self._died is not None:  # its generator has ended, but the audio has not
            raise RuntimeError(f"{self.name} cannot be read on after an error: {self._died}")
        found: list[Samples] = []
        self._watch.stops = stops
        while self.done < upto and not self.ended and not (found and stops()):
            try:
                if self._watch.stopped:
                    self._begin_again()
                block = next(self._blocks)
                skipped = min(self._again, len(block))
                self._again -= skipped
                self.done += len(block) - skipped
                found.append(block[skipped:])
            except Stopped:
                break
            except StopIteration:
                self.ended = True
            except (OSError, InvalidRequest) as error:
                fault = unreadable(self.name, error) if isinstance(error, OSError) else error
                self.ended, self.fault = True, fault.with_traceback(None)  # else it would keep its frames
            except BaseException as error:
                self._died = repr(error)
                raise
        self._watch.stops = go_on  # it may belong to the owner of this object
        return found

    def _begin_again(self) -> None:
        """Opens the source again, and skips what was read."""
        assert self._reopen is not None, "only FFmpeg's decoders are stopped"
        self._watch.stopped, self._again = False, self.done
        self.decoding = self._reopen(self._stack)
        self._blocks = self._stack.enter_context(closing(_mono(self.decoding, self.sampling_rate)))

    def check_bound(self, most_seconds: float) -> None:
        """Raises `RequestTooLarge` if the audio is known to be longer: by its header, by what was read, or by a time
        that was met."""
        stated = (self.decoding.seconds if self.decoding.is_stated else None) or 0.0
        known = max(self.done / self.sampling_rate, self.decoding.timeline.end, stated)
        check_bound(known, self.name, most_seconds)

    def check(self) -> None:
        """Raises the fault, or `InvalidRequest` if too little was read to hear anything."""
        raise_kept(self, "fault")
        lost = [one.message for one in self.faults if one.is_loss]
        if lost and self.done < round(MIN_SECONDS * self.sampling_rate):
            raise UnsupportedAudio(lost[0])
        check_length(self.done, self.name, self.sampling_rate)

    def close(self) -> None:
        """Closes the source; no more blocks come. A second call does nothing."""
        self._stack.close()


def open_blocks(source: AudioSource, sampling_rate: int, stops: Stops = go_on) -> Blocks:
    """Opens ``source`` and returns its `Blocks` at ``sampling_rate`` Hz. `load_audio` says what a source may be.

    Raises:
        InvalidRequest: the source can never work, or cannot be read.
        UnsupportedAudio: the source is not audio, has no audio stream, or is empty.
    """
    source, track = (source.source, source.track) if isinstance(source, AudioTrack) else (source, None)
    array = array_source(source)
    if array is not None:
        check_all(array.samples, "the audio")
        rate = array.rate or sampling_rate
        parts = ((0.0, rate, array.part(start, start + rate)[:, None]) for start in range(0, len(array.samples), rate))
        decoding = Decoding(parts, len(array.samples) / rate, True, Timeline(FaultLog("the audio")))
        return Blocks(_mono(decoding, sampling_rate), ExitStack(), sampling_rate, decoding)
    with ExitStack() as stack:
        file, name = stack.enter_context(opened(source))
        watch = Watch(stops)

        def reopen(stack: ExitStack) -> Decoding:
            return open_decoder(file, FaultLog(name), stack, track, watch)

        try:
            decoding = reopen(stack)
        except OSError as error:
            raise unreadable(name, error) from error
        finally:
            watch.stops = go_on
        mono = stack.enter_context(closing(_mono(decoding, sampling_rate)))
        return Blocks(mono, stack.pop_all(), sampling_rate, decoding, reopen, watch)


def unreadable(name: str, error: OSError) -> InvalidRequest:
    """Returns the error for a file whose device fails."""
    return InvalidRequest(f"{name} cannot be read ({error}); allowed: a readable audio file")


def _mono(decoding: Decoding, sampling_rate: int) -> Generator[Samples, None, None]:
    """Yields the mono blocks of the parts; a block may be empty. All samples before an error are yielded before it is
    raised, including those that are still in the resampler.
    """
    faults, resampler, current = decoding.timeline.faults, None, 0
    end, done = 0.0, 0  # seconds of the file, and samples that were yielded
    try:
        for gap, rate, frames in decoding.parts:
            if not len(frames) and not gap:
                yield _NOTHING
                continue
            if gap or rate != current:  # joined streams may have different rates
                left = _resampled(resampler, _NOTHING, last=True)
                yield left
                done += len(left)
                check_rate(rate, f"the sampling rate of {faults.name}", UnsupportedAudio)
                resampler, current = new_resampler(rate, sampling_rate), rate
                end += gap
            for silence in _silence(round(end * sampling_rate) - done if gap else 0, sampling_rate):
                yield silence
                done += len(silence)
            ready = _resampled(resampler, _mixed(frames, rate, end, faults))
            yield ready
            end, done = end + len(frames) / rate, done + len(ready)
    except (UnsupportedAudio, OSError):
        yield _resampled(resampler, _NOTHING, last=True)
        raise
    yield _resampled(resampler, _NOTHING, last=True)


def _silence(count: int, most: int) -> Iterator[Samples]:
    """Yields ``count`` zeros, which take no memory, however many they are."""
    for start in range(0, count, most):
        yield np.broadcast_to(_ZERO, min(most, count - start))


def _mixed(frames: Samples, rate: int, start: float, faults: FaultLog) -> Samples:
    """Returns the mean of the channels, or one of them if they cancel each other. Samples that are no sound count as 0.

    Raises:
        UnsupportedAudio: the samples are integers kept as floats.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        channels = frames.shape[1]
        mono: Samples = frames[:, 0] if channels == 1 else frames @ np.full(channels, 1 / channels, np.float32)
        powers = np.einsum("ij,ij->j", frames, frames)
        if channels > 1 and mono @ mono < _CANCELLED * powers.mean():
            faults.add("channels", start, start + len(frames) / rate)
            mono = frames[:, np.argmax(powers >= powers.max() / 2)].copy()
        if np.abs(mono).max(initial=0.0) <= MAX_PEAK:
            return mono
        loud = ~(np.abs(frames) <= MAX_PEAK)
        if (loud & (np.abs(frames) <= _LOUDEST)).mean() > _AS_INTEGERS:
            check_values(frames[np.isfinite(frames)], faults.name, UnsupportedAudio)
        places = np.flatnonzero(loud.any(axis=1))
        first = start + int(places[0]) / rate
        faults.add("no number", first, first + len(places) / rate)
        silenced: Samples = np.where(loud, np.float32(0), frames).mean(axis=1)
        return silenced


_NOTHING = np.zeros(0, np.float32)
_ZERO = np.float32(0)


def new_resampler(rate: int, sampling_rate: int) -> soxr.ResampleStream | None:
    """Returns the resampler of mono samples from ``rate`` to ``sampling_rate``, or ``None`` if the rates are the
    same."""
    if rate == sampling_rate:
        return None
    return soxr.ResampleStream(rate, sampling_rate, 1, dtype="float32", quality="HQ")


def _resampled(resampler: soxr.ResampleStream | None, mono: Samples, *, last: bool = False) -> Samples:
    return mono if resampler is None else resampler.resample_chunk(np.ascontiguousarray(mono), last=last)


# ---- all blocks at once ----------------------------------------------------------------------------------------------


__all__ = ["SAMPLING_RATE", "AudioSource", "Samples", "content_key", "load_audio"]

_LEAST_LOSS = 0.1  # seconds


def promised_seconds(source: AudioSource, sampling_rate: int) -> float:
    """Returns the length that the header of ``source`` promises, which may be wrong; infinity if it promises none.
    Blocks and raises as `load_audio` does."""
    with closing(open_blocks(source, sampling_rate)) as blocks:
        seconds = blocks.decoding.seconds
        return math.inf if seconds is None else seconds


def load_audio(source: AudioSource, *, sampling_rate: int = SAMPLING_RATE, most_seconds: float = math.inf) -> Samples:
    """Returns the audio of ``source`` as mono samples, float32, shape (n,), at ``sampling_rate`` Hz.

    A source is a path, bytes, a binary file object or an array. Files and bytes may have any sampling rate and
    channels: channels are averaged (one is read where they cancel each other), and soxr converts the rate. A file
    object is read from its position to its end and left open. Of a film it is the track that the file marks as its
    default, or else the first; `with_track` chooses another one.

    A sample's place is its time in the file. Where a track begins late or its times leave out a part, there is silence;
    so it is where less than 0.1 s is damaged, or a sample is NaN or infinite. It is an error if more is damaged, or if
    the end is missing by the header (of Ogg: by the end mark). Broadcasts and many MP3 files do not say where they end.

    An array is mono, float32 or float64, and is copied. An array alone is taken to be at ``sampling_rate``. An array
    with its rate is converted to ``sampling_rate``. It is given as ``(samples, rate)``, as soundfile returns it, or as
    ``{"array": samples, "sampling_rate": rate}``, as in the library datasets. It may also be int16, full scale at
    32768, since a caller who knows the rate knows the format. The level is never changed.

    The whole audio is held in memory, 230 MB an hour at 16 kHz, and a file of a megabyte may hold hours of silence.
    Audio that lasts longer than ``most_seconds`` is decoded no further, and refused. The call blocks: make it in a
    worker thread from async code.

    Raises:
        InvalidRequest: no such file, not a kind of source listed above, an array of another shape, dtype or rate,
            samples of an array that are NaN or infinite, no such track, less than `MIN_SECONDS` of audio.
        RequestTooLarge: more than ``most_seconds`` of audio.
        UnsupportedAudio: the source is not audio, cut short, damaged, without an audio stream, or empty.
    """
    check_rate(sampling_rate, "sampling_rate", InvalidRequest)
    blocks = open_blocks(source, sampling_rate)
    with closing(blocks):
        blocks.check_bound(most_seconds)
        found = blocks.read(most_seconds * sampling_rate + 1)
    blocks.check_bound(most_seconds)
    blocks.check()
    for fault in blocks.faults:
        if fault.kind == "cut short" or (fault.kind == "damaged" and fault.seconds >= _LEAST_LOSS):
            raise UnsupportedAudio(fault.message)
    samples = np.zeros(blocks.done, np.float32)  # an hour without packets takes no memory: nobody writes it
    done = 0
    for block in found:
        if block.strides[0]:
            samples[done : done + len(block)] = block
        done += len(block)
    return samples
