"""`Framing`: finds where each request of a connection begins and ends, by strict rules.

Parsers of HTTP/1.1 forgive different things: a line that ends without CR, a length that is given twice, a field that
goes on in the next line. If a proxy and a server forgive different things, they see different requests in the same
bytes, and one client can send a request in the name of another (request smuggling). h11 forgives some things, too;
bytes that pass here are read in the same way by all parsers.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

AT_ONCE = 128  # lines that are read before others get a turn
_MOST_FIELDS = 256  # of one head, or trailers
_MOST_CHUNKS, _LEAST_CHUNK = 4_096, 64  # chunks of any size; bytes of further ones, on average
LONGEST_LINE = 16 * 1024  # bytes; h11 has the same bound for a whole head
UNREADABLE = b"\0\r\n\r\n"
"""Bytes that h11 refuses at the beginning of any line: they begin no request line, field, or size or end of a chunk."""

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(_TOKEN + rb" [!-~]+ HTTP/1\.([01])")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):([^\x00-\x08\x0a-\x1f\x7f]*)")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*"'
_EXTENSION = rb";" + _TOKEN + rb"(?:=(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?"
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,16})(?:" + _EXTENSION + rb")*")


class _Next(enum.Enum):
    """The kinds of parts that may come next: lines, or bytes of a body."""

    REQUEST_LINE = enum.auto()
    FIELD = enum.auto()
    BODY = enum.auto()
    CHUNK_SIZE = enum.auto()
    CHUNK = enum.auto()
    CHUNK_END = enum.auto()
    TRAILER = enum.auto()


class Framing:
    """Follows the bytes that one client sends (RFC 9112).

    Attributes:
        fault: the first fault; ``None``: there was none.
        has_more: bytes have come that were not read yet, since they have many lines.
    """

    def __init__(self) -> None:
        self.fault: str | None = None
        self.has_more = False
        self._next = _Next.REQUEST_LINE
        self._line = b""  # the beginning of a line whose end has not come
        self._left = 0  # bytes of the body or the chunk that are still to come
        self._fields = 0  # of the head, or of the trailers
        self._chunks = 0
        self._chunked = 0  # bytes of these chunks
        self._version = b""
        self._told: dict[bytes, list[bytes]] = {}  # the values of the fields that say where a body ends
        self._readers: dict[_Next, Callable[[bytes], str | None]] = {
            _Next.REQUEST_LINE: self._request_line,
            _Next.FIELD: self._field,
            _Next.CHUNK_SIZE: self._chunk_size,
            _Next.CHUNK_END: self._chunk_end,
            _Next.TRAILER: self._field,
        }

    def passed(self, data: bytes) -> bytes:
        """Returns the bytes that h11 may read now, from ``data`` and from earlier bytes that were kept: whole lines,
        and bodies as they come, with up to `AT_ONCE` lines. At a fault h11 gets bytes that it refuses, and after that
        nothing."""
        self.has_more = False
        if self.fault is not None:
            return b""
        data, self._line = self._line + data, b""
        at = lines = 0
        while at < len(data) and self.fault is None:
            if lines == AT_ONCE:
                self.has_more, self._line = True, data[at:]
                return data[:at]
            if self._next in (_Next.BODY, _Next.CHUNK):
                at += self._skip(len(data) - at)
                continue
            end = data.find(b"\n", at) + 1
            if not end:
                return self._unfinished(data, at)
            lines += 1
            self.fault = self._read(data[at:end])
            if self.fault is None:
                at = end
        return data if self.fault is None else data[:at] + UNREADABLE

    def _skip(self, most: int) -> int:
        skipped = min(self._left, most)
        self._left -= skipped
        if not self._left:
            self._next = _Next.REQUEST_LINE if self._next is _Next.BODY else _Next.CHUNK_END
        return skipped

    def _unfinished(self, data: bytes, at: int) -> bytes:
        """Keeps the beginning of a line, and returns the bytes before it. h11 itself refuses a line that is too long,
        but not yet the beginning of a line that cannot be a request line."""
        if self._next is _Next.REQUEST_LINE and not re.match(_TOKEN, data[at : at + 1]):
            self.fault = "bytes that cannot begin a request"
            return data[:at] + UNREADABLE
        if len(data) - at > LONGEST_LINE:
            self.fault = f"a line of more than {LONGEST_LINE:,} bytes"
            return data
        self._line = data[at:]
        return data[:at]

    def _read(self, line: bytes) -> str | None:
        """Reads a whole line. Returns its fault; ``None``: there is none."""
        text = line[:-2]
        if not line.endswith(b"\r\n") or b"\r" in text:
            return "a line that does not end with CR and LF, or has CR or LF inside"
        return self._readers[self._next](text)

    def _request_line(self, text: bytes) -> str | None:
        found = _REQUEST_LINE.fullmatch(text)
        if found is None:
            return "a line that is not a request line of HTTP/1.1"
        self._version = found[1]
        self._told = {b"content-length": [], b"transfer-encoding": []}
        self._fields = self._chunks = self._chunked = 0
        self._next = _Next.FIELD
        return None

    def _field(self, text: bytes) -> str | None:
        if not text:
            return self._end_fields()
        found = _FIELD.fullmatch(text)
        if found is None:
            return "a line that is not a field, or continues the field before"
        self._fields += 1
        if self._fields > _MOST_FIELDS:
            return f"more than {_MOST_FIELDS} fields"
        self._told.get(found[1].lower(), []).append(found[2].strip(b" \t").lower())
        return None

    def _end_fields(self) -> str | None:
        """Finds what follows: the body, whose length the head says, or behind trailers the next request."""
        lengths, codings = self._told.values() if self._next is _Next.FIELD else ([], [])
        if codings:
            self._next = _Next.CHUNK_SIZE
            if lengths:
                return "both Content-Length and Transfer-Encoding"
            if self._version != b"1":
                return "Transfer-Encoding in HTTP/1.0"
            return None if codings == [b"chunked"] else "a Transfer-Encoding that is not chunked"
        if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
            return "a Content-Length that is given twice, or is not a number"
        self._left = int(lengths[0]) if lengths else 0
        self._next = _Next.BODY if self._left else _Next.REQUEST_LINE
        return None

    def _chunk_size(self, text: bytes) -> str | None:
        found = _CHUNK_SIZE.fullmatch(text)
        if found is None:
            return "a line that is not the size of a chunk"
        self._left = int(found[1], 16)
        self._chunks += 1
        self._chunked += self._left
        if self._left and self._chunks > _MOST_CHUNKS + self._chunked // _LEAST_CHUNK:
            return f"more than {_MOST_CHUNKS:,} chunks, of less than {_LEAST_CHUNK} bytes"
        self._next = _Next.CHUNK if self._left else _Next.TRAILER
        self._fields = 0
        return None

    def _chunk_end(self, text: bytes) -> str | None:
        self._next = _Next.CHUNK_SIZE
        return "a chunk that is longer than its size" if text else None
