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

from attrs import define, field

from ...core.errors import RequestTooLarge

MOST_JSON = 32 * 2**20  # bytes
MOST_VALUES = 2**18
MOST_BESIDE = 4 * 2**20  # bytes outside of texts: numbers of thousands of digits take long to read
MOST_WIDE = 8 * 2**20  # bytes of texts that are not plain
MOST_BACKSLASHES = 7 * 2**20  # escapes are slow to parse; PHP writes one for each slash of a picture
_PIECE = 2**16  # bytes that are counted at once: fewer take nearly as long
_SHORT_ESCAPE, _WIDE_ESCAPE = re.compile(rb"\\[^u]"), re.compile(rb"\\u(?!00[0-7])")
_OPEN = re.compile(rb"\\(?:u[0-9A-Fa-f]{0,3})?\Z")  # an escape that is not complete
_OF_MEMBER = 8  # values that a member, a list or an object counts as; a comma separates two values


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
    _open: int = field(default=0, init=False)  # bytes of the open text
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
            self._read()

    def end(self) -> None:
        """Counts the rest of the body, which is complete now. Raises as `add` does. Another body may follow."""
        self._read()
        self._unread.clear()
        self._within = False

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

    def _read(self) -> None:
        """Counts the next bytes, but for an escape at their end that is not complete. Signs of the same length stand
        for the escapes, so that each quotation mark that is left begins or ends a text."""
        piece = bytes(self._unread[:_PIECE])
        if self._within and piece.isascii() and b'"' not in piece and b"\\" not in piece:  # of a picture, as a rule
            del self._unread[: len(piece)]
            self._open += len(piece)
            self.wide += len(piece) * self._is_wide
            self.check()
            return
        piece = _SHORT_ESCAPE.sub(b"..", piece)
        goes_on = _OPEN.search(piece)
        piece = piece if goes_on is None else piece[: goes_on.start()]
        self.backslashes += self._unread.count(b"\\", 0, len(piece))
        del self._unread[: len(piece)]
        self._count(_WIDE_ESCAPE.sub(b"\x80.", piece))
        self.check()

    def _count(self, piece: bytes) -> None:
        """Counts ``piece``. A text with a character beyond ASCII counts as a whole, since one such character decides
        how all are stored."""
        parts = piece.split(b'"')
        goes_on, self._within = self._within, self._within ^ (len(parts) % 2 == 0)
        beside, texts = b"".join(parts[goes_on::2]), parts[not goes_on :: 2]
        self.values += beside.count(b",") + _OF_MEMBER * sum(map(beside.count, (b":", b"[", b"{")))
        self.beside += len(beside) + len(texts) - self._within  # with the marks that end texts
        if goes_on:
            text = texts.pop(0)
            if not (self._is_wide or text.isascii()):
                self._is_wide = True
                self.wide += self._open
            self.wide += len(text) * self._is_wide
            self._open += len(text)
        self.wide += sum(1 + len(text) for text in texts if not text.isascii())
        if texts and self._within:
            self._open, self._is_wide = 1 + len(texts[-1]), not texts[-1].isascii()


def check_texts(name: str, texts: Iterable[str]) -> None:
    """Weighs ``texts`` of JSON, which are parsed one after another, as if they were one body.

    Raises:
        RequestTooLarge: together they have more than a body may have.
    """
    whole = Weighing(name)
    for text in texts:
        whole.add(text.encode())
        whole.end()


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
