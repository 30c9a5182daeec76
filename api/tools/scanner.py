"""Reads syntax from a text that is still being written.

The reader of a syntax asks a `Scanner` for literals, blanks and JSON. If the answer depends on text that has not come
yet, the scanner raises `More`, and the reader begins anew when there is more text. So the result does not depend on how
the text is cut. If the text does not follow the syntax, the scanner raises `NoCall`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Never

from attrs import define, field

_BLANKS = re.compile(r"[ \t\r\n]*")  # JSON's
_DEEPEST = 100  # levels of JSON; readers of JSON have a limit, too
_LONGEST_PART = 8  # characters of a part that was cut short, such as -Infinit, beside strings


class NoCall(Exception):
    """The text at this place is not a call."""


class More(Exception):
    """More text must come before the text at this place can be read."""


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse)  # numbers may have any length


@define(eq=False)
class Scanner:
    """A text, as far as it has come, and a place in it.

    Attributes:
        place: the next character to read.
        ended: true if nothing follows ``text``.
    """

    text: str = ""
    place: int = 0
    ended: bool = field(default=False, init=False)

    def maybe(self, literal: str) -> bool:
        """Reads ``literal`` if it comes next; returns whether it did."""
        there = self.text[self.place : self.place + len(literal)]
        if there != literal:
            if literal.startswith(there) and not self.ended:
                raise More
            return False
        self.place += len(literal)
        return True

    def peek(self) -> str:
        """The next character; ``""`` at the end of the text."""
        if self.place == len(self.text) and not self.ended:
            raise More
        return self.text[self.place : self.place + 1]

    def literal(self, literal: str) -> None:
        """Reads ``literal``; raises `NoCall` if it does not come next."""
        if not self.maybe(literal):
            raise NoCall

    def blank(self) -> None:
        """Reads any number of blanks."""
        self.run(_BLANKS)

    def tail(self, literal: str) -> bool:
        """Reads blanks and ``literal`` if they come next, or else nothing. Reads nothing if ``literal`` is empty."""
        if not literal:
            return False
        place = self.place
        self.blank()
        if self.maybe(literal):
            return True
        self.place = place
        return False

    def run(self, pattern: re.Pattern[str]) -> str:
        """Reads the longest match of ``pattern``, a repeated class of characters. The match may be empty."""
        found = pattern.match(self.text, self.place)
        start, self.place = self.place, self.place if found is None else found.end()
        if self.place == len(self.text) and not self.ended:
            raise More
        return self.text[start : self.place]

    def until(self, literal: str) -> str:
        """Reads the text up to ``literal`` and ``literal`` itself; returns the text before it."""
        start, found = self.place, self.text.find(literal, self.place)
        if found < 0:
            raise NoCall if self.ended else More
        self.place = found + len(literal)
        return self.text[start:found]

    # -- JSON (RFC 8259) ---------------------------------------------------------------------------------------------

    def members(self, keys: frozenset[str]) -> dict[str, str]:
        """Reads an object. Returns the text of each value by its key.

        Args:
            keys: the keys that the object may have. A key that comes twice is refused.
        """
        found: dict[str, str] = {}
        self.literal("{")
        if self.tail("}"):
            return found
        while True:
            self.blank()
            key = json.loads(self.value('"'))
            if key not in keys or key in found:
                raise NoCall
            self.blank()
            self.literal(":")
            self.blank()
            found[key] = self.value()
            if self.tail("}"):
                return found
            self.blank()
            self.literal(",")

    def value(self, begin: str = "") -> str:
        """Reads a value that begins with ``begin``; returns its text."""
        start = self.place
        self.literal(begin)
        try:
            found, self.place = _JSON.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _LONGEST_PART
            raise (More if is_cut and not self.ended else NoCall) from None
        except (ValueError, RecursionError):
            raise NoCall from None
        if _is_deep(found, _DEEPEST):
            raise NoCall
        if self.place == len(self.text) and not self.ended and self.text[self.place - 1] not in '}]"':
            raise More  # a number may go on
        return self.text[start : self.place]


def _is_deep(value: Any, most: int) -> bool:
    """True if ``value`` has more than ``most`` levels of arrays and objects."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner)


def is_value(text: str) -> bool:
    """True if ``text`` is a JSON value."""
    scanner = Scanner(text)
    scanner.ended = True
    try:
        scanner.blank()
        scanner.value()
        scanner.blank()
    except NoCall:
        return False
    return scanner.place == len(text)
