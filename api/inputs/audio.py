"""Loads audio: any file, bytes or array becomes mono float32 samples at one rate.

`sources` defines what may be given, `decoding` turns files into frames, and `blocks` turns frames into mono samples at
one rate, block by block. `load_audio` returns all samples at once; `recording` reads hours of audio bit by bit.
"""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np

from ...core.errors import InvalidRequest, UnsupportedAudio
from ...models.speech.content import content_key
from .blocks import open_blocks
from .sources import SAMPLING_RATE, AudioSource, Samples, check_rate, with_track

__all__ = ["SAMPLING_RATE", "AudioSource", "Samples", "content_key", "load_audio"]

_LEAST_LOSS = 0.1  # seconds


def promised_seconds(source: AudioSource, sampling_rate: int) -> float:
    """Returns the length that the header of ``source`` promises, which may be wrong; infinity if it promises none.
    Blocks and raises as `load_audio` does."""
    with closing(open_blocks(source, sampling_rate)) as blocks:
        seconds = blocks.decoding.seconds
        return math.inf if seconds is None else seconds


def load_audio(
    source: AudioSource,
    *,
    sampling_rate: int = SAMPLING_RATE,
    most_seconds: float = math.inf,
    audio_track: int | str | None = None,
) -> Samples:
    """Returns the audio of ``source`` as mono samples, float32, shape (n,), at ``sampling_rate`` Hz.

    A source is a path, bytes, a binary file object or an array. Files and bytes may have any sampling rate and
    channels: channels are averaged, and soxr converts the rate. A file object is read from its position to its end and
    left open. ``audio_track`` chooses among the tracks of a film by its number, from 1 on, or by its language. ``None``
    is the track that the file marks as its default, or else the first.

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
    blocks = open_blocks(with_track(source, audio_track), sampling_rate)
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
