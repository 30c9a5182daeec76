"""Loads audio: any file, bytes or array becomes mono float32 samples at one rate.

`sources` defines what may be given, `decoding` turns files into frames, and `blocks` turns frames into mono samples at
one rate, block by block. `load_audio` returns all samples at once; `recording` reads hours of audio bit by bit.
"""

from __future__ import annotations

import math
from contextlib import closing

import numpy as np

from ...core.errors import InvalidRequest, RequestTooLarge
from ...models.speech.content import content_key
from .blocks import open_blocks
from .sources import SAMPLING_RATE, AudioSource, Samples, check_rate

__all__ = ["SAMPLING_RATE", "AudioSource", "Samples", "content_key", "load_audio"]


def load_audio(source: AudioSource, *, sampling_rate: int = SAMPLING_RATE, most_seconds: float = math.inf) -> Samples:
    """Returns the audio of ``source`` as mono samples, float32, shape (n,), at ``sampling_rate`` Hz.

    A source is a path, bytes, a binary file object or an array. Files and bytes may have any sampling rate and
    channels: channels are averaged, and soxr converts the rate. A file object is read from its position to its end and
    left open. MP3 and Ogg state no dependable length, so a file that was cut short is decoded up to its end. In other
    formats it is an error if there is less audio than the header promises.

    An array is mono, float32 or float64, and is copied. An array alone is taken to be at ``sampling_rate``. An array
    with its rate is converted to ``sampling_rate``. It is given as ``(samples, rate)``, as soundfile returns it, or as
    ``{"array": samples, "sampling_rate": rate}``, as in the library datasets. It may also be int16, full scale at
    32768, since a caller who knows the rate knows the format. The level is never changed.

    The whole audio is held in memory, 230 MB an hour at 16 kHz, and a file of a megabyte may hold hours of silence.
    Audio that lasts longer than ``most_seconds`` is decoded no further, and refused. The call blocks: make it in a
    worker thread from async code.

    Raises:
        InvalidRequest: no such file, not a kind of source listed above, an array of another shape, dtype or rate,
            samples that are NaN or infinite, less than `MIN_SECONDS` of audio.
        RequestTooLarge: more than ``most_seconds`` of audio.
        UnsupportedAudio: the source is not audio, cut short, damaged, without an audio stream, or empty.
    """
    check_rate(sampling_rate, "sampling_rate", InvalidRequest)
    blocks = open_blocks(source, sampling_rate)
    with closing(blocks):
        found = blocks.read(most_seconds * sampling_rate + 1)
    if blocks.done > most_seconds * sampling_rate:
        raise RequestTooLarge(f"{blocks.name} is too long; allowed: up to {most_seconds:.6g} s. Cut it into pieces")
    blocks.check()
    return np.concatenate(found)
