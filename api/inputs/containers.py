"""Facts of audio files that libsndfile and FFmpeg do not report, read from their bytes.

Without the lengths that a file states, one that was cut short looks like a whole one. Files may join several
recordings, as ``cat a.ts b.ts`` does: where the next one begins, FFmpeg's demuxers skip what they do not expect, so
each recording is opened alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from typing import IO, Any, TypeAlias

from attrs import define, field

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


# ---- where a recording begins ----------------------------------------------------------------------------------------


Stops: TypeAlias = Callable[[], bool]
"""Returns true if a thread shall stop its work. The thread asks often."""

_HEADS = {  # the first bytes of a file, and what begins a recording
    b"\x1aE\xdf\xa3": rb"\x1aE\xdf\xa3(?=.{1,60}?(?:webm|matroska))",
    b"fLaC": rb"fLaC\0\0\0\x22",
    b"FLV\x01": rb"FLV\x01[\x01\x04\x05]\0\0\0\x09",
}
_LONGEST_SEARCH = 1 << 20  # bytes, until a caller may stop it: what FFmpeg has begun would be lost
_LONGEST = 256  # bytes that are enough to recognize a beginning
_TS_AUDIO = frozenset({0x03, 0x04, 0x06, 0x0F, 0x11, 0x1C, *range(0x80, 0x88)})  # stream types of ISO 13818-1 and ATSC


def go_on() -> bool:
    """The `Stops` of work that nobody stops."""
    return False


class Stopped(Exception):
    """FFmpeg was stopped in the middle of a packet; it cannot go on from there."""


@define(eq=False)
class Watch:
    """Stops FFmpeg while it opens a file or searches for a packet, which takes seconds where much is damaged.

    Attributes:
        stops: whether the thread shall stop.
        stopped: FFmpeg was stopped: what it returns from now on is wrong.
        searched: the bytes that were read since the last packet.
    """

    stops: Stops = go_on
    stopped: bool = False
    searched: int = _LONGEST_SEARCH

    def reads(self, count: int) -> bool:
        """Adds bytes; true if these must not be read any more."""
        self.searched += count
        self.stopped |= self.searched > _LONGEST_SEARCH and self.stops()
        return self.stopped


Finder: TypeAlias = Callable[[bytes, int], int | None]
"""Returns the place in the file at which the next recording begins, if it is known after the bytes that lie at a place.
Calls get all bytes in order, and the last ones twice."""


def _magic(pattern: bytes, start: int, data: bytes, at: int) -> int | None:
    """Finds the bytes that begin a recording, after ``start``. See `Finder`."""
    places = (at + one.start() for one in re.finditer(pattern, data, re.DOTALL))
    return next((place for place in places if place > start), None)


@define
class OggChain:
    """Finds the first page of a stream ("beginning of stream") after pages of others. See RFC 3533."""

    _running: int | None = None  # the place of a page within the chain

    def find(self, data: bytes, at: int) -> int | None:
        """Implements `Finder`."""
        for page in re.finditer(rb"OggS\0([\0-\7])", data):
            place = at + page.start()
            if not page[1][0] & 2:
                self._running = place if self._running is None else self._running
            elif self._running is not None and place > self._running:
                return place
        return None


@define
class Programs:
    """Finds where the audio streams of a transport stream's programs change (ISO 13818-1, 2.4.4: the tables PAT and
    PMT)."""

    _sections: dict[int, bytes] = field(factory=dict)  # the last table, by its PID
    _known: dict[int, Table] = field(factory=dict)  # the first one
    _pat: int = 0  # the place of the last PAT

    def find(self, data: bytes, at: int) -> int | None:
        """Implements `Finder`."""
        place = 0
        while True:
            pids = [0, *(pid for _, pid in self._known.get(0, ()))]
            heads = b"|".join(re.escape(bytes((0x47, 0x40 | pid >> 8, pid & 255))) for pid in pids)
            match = re.compile(heads).search(data, place)
            if match is None:
                return None
            place = match.end()
            packet = data[match.start() : match.start() + 188]
            pid, section = (packet[1] & 31) << 8 | packet[2], _section(packet)
            if pid == 0 and section:
                self._pat = at + match.start()
            if section and self._sections.get(pid) != section and not any(crc32(section, 0xFFFFFFFF)):
                self._sections[pid] = section
                table = _streams(section) if pid else _programs(section)
                if self._known.setdefault(pid, table) != table:
                    return self._pat


Table: TypeAlias = frozenset[tuple[int, int]]


def _section(packet: bytes) -> bytes:
    """Returns the table that begins in a packet; empty if it does not fit the packet, or is none."""
    if len(packet) < 188 or not packet[3] & 0x10:
        return b""
    start = 4 + (1 + packet[4] if packet[3] & 0x20 else 0)
    section = packet[start + 1 + packet[start] :] if start < 188 else b""
    length = 3 + ((section[1] & 15) << 8 | section[2]) if len(section) > 12 else 0
    return section[:length] if 12 < length <= len(section) else b""


def _programs(section: bytes) -> Table:
    """Returns the numbers of the programs in a PAT, and the PIDs of their tables."""
    rows = (section[at : at + 4] for at in range(8, len(section) - 7, 4))
    return frozenset((row[0] << 8 | row[1], (row[2] & 31) << 8 | row[3]) for row in rows)


def _streams(section: bytes) -> Table:
    """Returns the PIDs of the audio streams in a PMT, and their types."""
    found, at = set(), 12 + ((section[10] & 15) << 8 | section[11])
    while at + 9 <= len(section):
        if section[at] in _TS_AUDIO:
            found.add(((section[at + 1] & 31) << 8 | section[at + 2], section[at]))
        at += 5 + ((section[at + 3] & 15) << 8 | section[at + 4])
    return frozenset(found)


@define(eq=False)
class Joined:
    """One recording of a file, as a file for FFmpeg: it ends where the next recording begins, or where ``watch`` stops
    it."""

    _file: IO[bytes]
    watch: Watch
    _start: int = 0
    _stop: int | None = field(default=None, init=False)
    _finder: Finder | None = field(init=False)
    _seen: int = field(init=False)  # the bytes before this one were given to the finder
    _tail: bytes = field(default=b"", init=False)

    @_finder.default
    def _choose(self) -> Finder | None:
        head = read_at(self._file, self._start, 400)
        if head.startswith(b"OggS"):
            return OggChain().find
        if any(head[at : at + 1] == b"\x47" == head[at + size : at + size + 1] for at, size in ((0, 188), (4, 192))):
            return Programs().find
        pattern = next((pattern for magic, pattern in _HEADS.items() if head.startswith(magic)), None)
        return None if pattern is None else partial(_magic, pattern, self._start)

    @_seen.default
    def _from(self) -> int:
        self._file.seek(self._start)
        return self._start

    def read(self, count: int) -> bytes:
        """Reads up to ``count`` bytes."""
        if self.watch.reads(count):
            return b""  # PyAV would print an error
        at = self._file.tell()
        data = self._file.read(count)
        if self._finder is not None and self._stop is None and at <= self._seen < at + len(data):
            fresh = self._tail + data[self._seen - at :]
            self._stop = self._finder(fresh, self._seen - len(self._tail))
            self._seen, self._tail = at + len(data), fresh[-_LONGEST:]
        return data if self._stop is None else data[: max(self._stop - at, 0)]

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a place of the recording."""
        return self._file.seek(offset + (self._start if whence == os.SEEK_SET else 0), whence) - self._start

    def tell(self) -> int:
        """Returns the place in the recording."""
        return self._file.tell() - self._start

    def next(self) -> Joined | None:
        """Returns the recording after this one, if one was found. Raises `Stopped` if the end was none."""
        if self.watch.stopped:
            raise Stopped
        return None if self._stop is None else Joined(self._file, self.watch, self._stop)
