"""The lengths that files state, where libsndfile and FFmpeg do not report them: by these two a file that was cut short
looks like a whole one.
"""

from __future__ import annotations

import os
import re
from typing import IO, Any

_LONGEST_PAGE = 27 + 255 + 255 * 255  # bytes, in Ogg
_PADDING = 1 << 16  # bytes that are looked at to see whether a file ends in zeros
_SLOPPY = 16  # bytes: some programs count the head of the file as a part of its body
_UNKNOWN_SIZE = 0x7FFF_0000  # sizes from here to 2**32 - 1 come from programs that cannot seek back to fill the size in


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


def short_of(file: Any) -> tuple[int, int] | None:
    """Returns the bytes that the header of a WAV, AVI (RIFF), AIFF (FORM) or AU file states, and those that the file
    has, if these are fewer; ``None`` for other files, and where the size is not known."""
    size, head = file.seek(0, os.SEEK_END), read_at(file, 0, 28)
    kind, stated = head[:4], int.from_bytes(head[4:8], "little" if head[:4] == b"RIFF" else "big")
    if kind == b".snd":
        length = int.from_bytes(head[8:12], "big")
        stated = 0 if length == 0xFFFF_FFFF else stated + length
    elif kind == b"RF64":  # its first chunk has the size
        stated = 8 + int.from_bytes(head[20:28], "little")
    elif kind in (b"RIFF", b"RIFX", b"FORM") and stated < _UNKNOWN_SIZE:
        stated += 8
    else:
        return None
    return (stated, size) if size < stated - _SLOPPY else None


def lacks(file: Any, container: str, read: int) -> tuple[str, str] | None:
    """Returns what a file of FFmpeg's ``container`` states about its end, and what it has; ``None``: it is whole, or
    says nothing. ``read`` is the number of bytes in all packets that FFmpeg has found."""
    if (sizes := short_of(file)) is not None:
        return f"{sizes[0]:,} bytes", f"{sizes[1]:,}"
    size = file.seek(0, os.SEEK_END)
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
