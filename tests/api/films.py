"""Files with sound for tests, and films with several audio tracks."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import av
import numpy as np
import soundfile

from triolet.api.inputs.audio import Samples

RATE = 16_000


def tone(seconds: float = 1.0, rate: int = RATE, hertz: float = 440.0) -> np.ndarray:
    """A soft sine, float32."""
    return (0.25 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encode(samples: np.ndarray, rate: int = RATE, *, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file by libsndfile; ``samples`` have shape (frames,) or (frames, channels)."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def mux(samples: np.ndarray, codec: str, rate: int, kind: str) -> bytes:
    """A mono file by FFmpeg's libraries."""
    file = io.BytesIO()
    mux_into(file, samples, codec, rate, kind)
    return file.getvalue()


def mux_into(file: Any, samples: np.ndarray, codec: str, rate: int, kind: str, **options: str) -> None:
    with av.open(file, "w", format=kind, options=options) as container:
        stream: Any = container.add_stream(codec, rate=rate, layout="mono")
        for packet in encoded(stream, samples, rate):
            container.mux(packet)


def encoded(stream: Any, samples: Samples, rate: int, layout: str = "mono") -> Iterator[Any]:
    """Yields the packets of mono ``samples`` for a stream."""
    frame = av.AudioFrame.from_ndarray(samples[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts = rate, 0
    resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 1_024)
    for part in [*resampler.resample(frame), *resampler.resample(None), None]:
        yield from stream.encode(part)


@cache
def film_of_two_tracks() -> bytes:
    """Returns a Matroska file of 2 s: track 1 is German, 400 Hz; track 2 is English, 900 Hz, and the default."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        streams: list[Any] = [out.add_stream("aac", rate=RATE, layout="mono") for _ in range(2)]
        for stream, language in zip(streams, ("ger", "eng"), strict=True):
            stream.metadata["language"] = language
        streams[0].disposition, streams[1].disposition = 0, av.stream.Disposition.default
        packets = [
            list(encoded(one, tone(2, hertz=hertz), RATE)) for one, hertz in zip(streams, (400, 900), strict=True)
        ]
        for pair in zip(*packets, strict=True):
            for packet in pair:
                out.mux(packet)
    return file.getvalue()
