"""`Weighing`: estimates how many objects and bytes a body of JSON would become, while it comes and before it is parsed.

A parser holds Python's lock from the first byte to the last, and no other request is answered meanwhile. Its time
depends far less on the number of bytes than on the number of members, lists and objects, since each becomes Python
objects. Texts with characters beyond ASCII are costly, too: because of a single such character, written as it is or as
an escape, a text may take four bytes for each character. So both are counted here, without a parser: quotation marks
separate the texts from the signs of JSON.

The counts of a body that is not JSON have no meaning; the parser refuses such a body.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ...core.errors import RequestTooLarge

MOST_JSON = 32 * 2**20  # bytes
MOST_VALUES = 2**18
MOST_BESIDE = 4 * 2**20  # bytes outside of texts: numbers of thousands of digits take long to read
MOST_WIDE = 8 * 2**20  # bytes of texts that are not plain
MOST_BACKSLASHES = 7 * 2**20  # escapes are slow to parse; PHP writes one for each slash of a picture
_PIECE = 2**16  # bytes that are counted at once: fewer take nearly as long
_QUOTE, _BACKSLASH, _PLAIN = 0x22, 0x5C, 0x80
_OPEN = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3})?\Z")  # an escape that is not complete
_MOST_OPEN = 5  # bytes
_EACH = np.zeros(256, np.uint8)  # the weight of each sign: a comma separates two values
_EACH[ord(",")] = 1
_EACH[[ord(sign) for sign in ":[{"]] = 8

Bytes = NDArray[np.uint8]
Places = NDArray[np.intp]


@define(eq=False)
class Weighing:
    """The counts of one body, which comes in parts of any size.

    Args:
        name: the name of the body in errors.
    """

    name: str = "JSON"
    size: int = field(default=0, init=False)  # bytes
    values: int = field(default=0, init=False)
    beside: int = field(default=0, init=False)  # bytes outside of texts
    wide: int = field(default=0, init=False)  # bytes of texts with a character beyond ASCII
    backslashes: int = field(default=0, init=False)
    _unread: bytearray = field(factory=bytearray, init=False)  # bytes that are not counted yet
    _within: bool = field(default=False, init=False)  # a text is open
    _escaped: bool = field(default=False, init=False)  # the next byte is escaped
    _plain: int = field(default=0, init=False)  # bytes of the open text while it is plain
    _is_wide: bool = field(default=False, init=False)  # the open text is wide

    def add(self, part: bytes) -> None:
        """Counts ``part``. Its bytes count at once; its contents count when there are enough uncounted bytes.

        Raises:
            RequestTooLarge: the body has more than is allowed.
        """
        self.size += len(part)
        self._check(self.size, MOST_JSON, "bytes; send large files in a form, or give their address")
        self._unread += part
        while len(self._unread) >= _PIECE:
            piece = bytes(self._unread[:_PIECE])
            goes_on = _OPEN.search(piece, _PIECE - _MOST_OPEN)
            piece = piece if goes_on is None else piece[: goes_on.start()]
            del self._unread[: len(piece)]
            self._count(piece)
            self.check()

    def end(self) -> None:
        """Counts the rest of the body, which is complete now. Raises as `add` does."""
        if self._unread:
            self._count(bytes(self._unread))
            self._unread.clear()
        self.check()

    def check(self) -> None:
        """Raises `RequestTooLarge` if the body has more than is allowed."""
        counted = "values (a member, a list and an object count as eight more); send less"
        self._check(self.values, MOST_VALUES, counted)
        self._check(self.beside, MOST_BESIDE, "bytes outside of texts; write shorter numbers, and no blanks")
        wide = "bytes in texts with characters beyond ASCII; send several requests"
        self._check(self.wide, MOST_WIDE, wide)
        self._check(self.backslashes, MOST_BACKSLASHES, "backslashes; send several requests")

    def _check(self, got: int, most: int, what: str) -> None:
        if got > most:
            raise RequestTooLarge(f"{self.name} has more than {most:,} {what}")

    def _count(self, piece: bytes) -> None:
        if self._within and not self._escaped and piece.isascii() and b'"' not in piece and b"\\" not in piece:
            self._plain += len(piece)  # probably in the middle of a picture
            self.wide += len(piece) * self._is_wide
            return
        data = np.frombuffer(piece, np.uint8)
        marks, wide_escapes = self._marks(data)
        signs = np.zeros(len(data), np.uint8)
        signs[marks] = 1
        outside = (np.cumsum(signs, dtype=np.uint8) & 1) == self._within
        self.values += int((_EACH[data] * outside).sum())
        self.beside += int(outside.sum())
        self._widen(data, marks, wide_escapes)
        self._within ^= bool(len(marks) % 2)

    def _marks(self, data: Bytes) -> tuple[Places, Places]:
        """Returns the places of the quotation marks that begin or end a text, and of the escapes for characters beyond
        ASCII. A mark after an odd number of backslashes is part of a text."""
        quotes = np.flatnonzero(data == _QUOTE)
        slashes = data == _BACKSLASH
        self.backslashes += int(slashes.sum())
        if self._escaped:
            slashes[0] = False
            quotes = quotes[quotes > 0]
        self._escaped = False
        if not slashes.any():
            return quotes, quotes[:0]
        last = np.maximum.accumulate(np.where(slashes, -1, np.arange(len(data))))  # the last other byte
        self._escaped = bool((len(data) - 1 - last[-1]) % 2)
        marks = quotes[_backslashes_before(quotes, last) % 2 == 0]
        escapes = np.flatnonzero(data == ord("u"))
        escapes = escapes[_backslashes_before(escapes, last) % 2 == 1]
        after = np.concatenate((data, np.zeros(3, np.uint8)))
        zeros = (after[escapes + 1] == ord("0")) & (after[escapes + 2] == ord("0"))
        ascii_ = zeros & (after[escapes + 3] >= ord("0")) & (after[escapes + 3] <= ord("7"))
        return marks, escapes[~ascii_]

    def _widen(self, data: Bytes, marks: Places, wide_escapes: Places) -> None:
        """Counts the bytes of all texts with characters beyond ASCII. Such a text counts as a whole, since one such
        character decides how all are stored."""
        edges = np.concatenate(([0], marks, [len(data)]))
        lengths = np.diff(edges)
        wide = data >= _PLAIN
        wide[wide_escapes] = True
        before = np.concatenate(([0], np.cumsum(wide)))  # wide characters before each place
        is_wide = np.diff(before[edges]) > 0
        if self._within and self._is_wide:
            is_wide[0] = True
        elif self._within and is_wide[0]:
            self.wide += self._plain  # the beginning of the text
        texts = (np.arange(len(lengths)) % 2 == 0) == self._within
        self.wide += int(lengths[is_wide & texts].sum())
        goes_on = len(marks) == 0 and self._within
        self._is_wide = bool(is_wide[-1] and texts[-1])
        self._plain = (self._plain if goes_on else 0) + int(lengths[-1])


def _backslashes_before(places: Places, last: Places) -> Places:
    """Returns the number of backslashes directly before each of ``places``. ``last`` has, for each place, the last
    place up to it without a backslash."""
    return np.where(places > 0, places - 1 - last[places - 1], 0)


def check_texts(name: str, texts: Iterable[str]) -> None:
    """Weighs ``texts`` of JSON, which are parsed one after another, as if they were one body.

    Raises:
        RequestTooLarge: together they have more than a body may have.
    """
    whole = Weighing(name)
    for text in texts:
        one = Weighing(name)
        one.add(text.encode())
        one.end()
        whole.values += one.values
        whole.beside += one.beside
        whole.check()


def check_object(name: str, found: Any, most_values: int, most_characters: int) -> None:
    """Counts the values and characters in ``found``, a value of JSON that is read more than once.

    Raises:
        RequestTooLarge: ``found`` has more values or characters than allowed.
    """
    values = characters = 0
    waiting = [found]
    while waiting and values <= most_values and characters <= most_characters:
        one = waiting.pop()
        values += 1
        if isinstance(one, str):
            characters += len(one)
        elif isinstance(one, list):
            waiting += one
        elif isinstance(one, dict):
            characters += sum(map(len, one))
            waiting += one.values()
    if values > most_values or characters > most_characters:
        raise RequestTooLarge(
            f"{name} has more than {most_values:,} values or {most_characters:,} characters; send less"
        )
