"""The number of frames that a WAV or AIFF header promises, and the number that the file has. libsndfile and FFmpeg
report only the smaller number, so by them a file that was cut short looks like a whole one.
"""

from __future__ import annotations

import os
import struct
from typing import IO

from attrs import frozen

_UNKNOWN_SIZE = 0x7FFF_0000  # sizes from here to 2**32 - 1 come from programs that cannot seek back to fill the size in


@frozen
class DataChunk:
    """The number of frames that a header promises, and the number that the file has."""

    promised: int
    found: int


def data_chunk(file: IO[bytes]) -> DataChunk | None:
    """Returns the data chunk of a WAV (RIFF, RIFX, RF64) or AIFF file, or ``None`` for other files and for an unknown
    size."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(12)
    order = {b"RIFF": "<", b"RF64": "<", b"RIFX": ">", b"FORM": ">"}.get(head[:4])
    if order is None or head[8:12] not in (b"WAVE", b"AIFF", b"AIFC"):
        return None
    frame_bytes, wide = 1, None
    at = 12
    while len(head := read_at(file, at, 8)) == 8:
        kind, length = struct.unpack(order + "4sI", head)
        body = read_at(file, at + 8, 16)
        if kind == b"ds64" and len(body) == 16:  # 64-bit sizes: of the file, of the data
            wide = struct.unpack("<8xQ", body)[0]
        elif kind == b"fmt " and len(body) == 16:
            frame_bytes = max(struct.unpack(order + "12xH2x", body)[0], 1)
        elif kind == b"COMM" and len(body) == 16:
            channels, bits = struct.unpack(">H4xH8x", body)
            frame_bytes = max(channels * ((bits + 7) // 8), 1)
        elif kind in (b"data", b"SSND"):
            promised = wide if wide is not None else length
            if wide is None and length >= _UNKNOWN_SIZE:
                return None
            skipped = 8 if kind == b"SSND" else 0  # its offset and block size
            return DataChunk((promised - skipped) // frame_bytes, (size - at - 8 - skipped) // frame_bytes)
        at += 8 + length + length % 2
    return None


def read_at(file: IO[bytes], position: int, count: int) -> bytes:
    """Reads up to ``count`` bytes from ``position`` on."""
    file.seek(position)
    return file.read(count)
