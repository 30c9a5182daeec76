"""The lengths that files state, where libsndfile and FFmpeg do not report them: by these two a file that was cut short
looks like a whole one.
"""

from __future__ import annotations

import os
import re
import struct
from typing import IO, Any

from attrs import frozen

_LONGEST_PAGE = 27 + 255 + 255 * 255  # bytes, in Ogg
_PADDING = 1 << 16  # bytes that are looked at to see whether a file ends in zeros
_UNKNOWN_SIZE = 0x7FFF_0000  # sizes from here to 2**32 - 1 come from programs that cannot seek back to fill the size in


@frozen
class DataChunk:
    """The number of frames that a header promises, and the number that the file has."""

    promised: int
    found: int


def data_chunk(file: IO[bytes]) -> DataChunk | None:
    """Returns the data chunk of a WAV (RIFF, RIFX, RF64), AIFF or AU file, or ``None`` for other files and for an
    unknown size."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(12)
    if head[:4] == b".snd" and size >= 24:
        file.seek(4)
        start, length, encoding, _, channels = struct.unpack(">5I", file.read(20))
        frame_bytes = max({1: 1, 2: 1, 4: 3, 5: 4, 6: 4, 7: 8, 27: 1}.get(encoding, 2) * channels, 1)
        return None if length == 0xFFFF_FFFF else DataChunk(length // frame_bytes, max(size - start, 0) // frame_bytes)
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


def mp3_frames(file: Any) -> int:
    """Returns the number of frames by the Xing or VBRI header of an MP3 file; 0 if it has none."""
    place, tag = file.tell(), 0
    head = read_at(file, 0, 10)
    if head.startswith(b"ID3") and len(head) == 10:
        tag = 10 + (head[6] << 21 | head[7] << 14 | head[8] << 7 | head[9])
    head = read_at(file, tag, 4096)
    file.seek(place)
    mark = re.search(rb"(?:Xing|Info)...[\x01\x03\x05\x07-\x0f](....)|VBRI.{10}(....)", head, re.DOTALL)
    return 0 if mark is None else int.from_bytes(mark[1] or mark[2], "big")


def lacks(file: Any, container: str, read: int) -> tuple[str, str] | None:
    """Returns what a file of FFmpeg's ``container`` states about its end, and what it has; ``None``: it is whole, or
    says nothing. ``read`` is the number of bytes in all packets that FFmpeg has found."""
    size = file.seek(0, os.SEEK_END)
    if container == "avi":
        stated = 8 + int.from_bytes(read_at(file, 4, 4), "little")
        return (f"{stated:,} bytes", f"{size:,}") if size < stated else None
    if container == "mpegts" and all(size % packet for packet in (188, 192, 204)):
        return "whole packets", "a part of one at its end"
    if container.startswith("mov"):
        at, media, in_fragments = 0, 0, False
        while at + 8 <= size:  # the boxes of the file
            head = read_at(file, at, 16)
            length = int.from_bytes(head[8:16] if head[:4] == b"\0\0\0\1" else head[:4], "big")
            if length < 8:  # the last box, or no box any more
                is_box = head[4:8].isalnum() or not read_at(file, at, _PADDING).strip(b"\0")
                return None if is_box else (f"{size:,} bytes", f"{at:,} that can be read")
            media += (length - 8) * (head[4:8] == b"mdat")
            in_fragments |= head[4:8] == b"moof"
            at += length
        if at > size:
            return f"{at:,} bytes", f"{size:,}"
        return (f"{media:,} bytes of media", f"{read:,}") if in_fragments and read < media else None
    if container == "ogg":
        page = _last_page(file)
        if not page or not page[5] & 4:
            return "an end mark", "none, or a damaged one"
    return None


def ogg_samples(file: Any) -> int:
    """Returns the samples of an Ogg file by its last page (RFC 3533); 0 if that is damaged."""
    place, page = file.tell(), _last_page(file)
    file.seek(place)
    return max(int.from_bytes(page[6:14], "little", signed=True), 0)


def _last_page(file: Any) -> bytes:
    """Returns the last page of an Ogg file; empty if it is not whole."""
    size = file.seek(0, os.SEEK_END)
    tail = read_at(file, max(size - _LONGEST_PAGE, 0), _LONGEST_PAGE)
    page = tail[max(tail.rfind(b"OggS"), 0) :]
    length = 27 + sum(page[26:27]) + sum(page[27 : 27 + sum(page[26:27])])
    is_whole = len(page) >= length and crc32(page[:22] + bytes(4) + page[26:length]) == page[22:26][::-1]
    return page[:length] if is_whole else b""


def crc32(data: bytes, start: int = 0) -> bytes:
    """Returns the CRC of Ogg (RFC 3533) and, with ``start=0xFFFFFFFF``, of transport streams (ISO 13818-1)."""
    crc = start
    for byte in data:
        crc ^= byte << 24
        for _ in range(8):
            crc = (crc << 1 ^ (0x04C11DB7 if crc >> 31 else 0)) & 0xFFFFFFFF
    return crc.to_bytes(4, "big")
