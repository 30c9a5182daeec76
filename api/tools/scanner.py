"""Reads syntax from a text that is still being written.

The reader of a syntax is a generator: it asks a `Scanner` for literals, blanks and JSON, and pauses (``yield``) while
the answer depends on text that has not come yet. So the result does not depend on how the text is cut, and each
character is read once. The reader raises `NoCall` if the text does not follow the syntax.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import TypeVar

from attrs import define, field

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A generator that returns a value. It yields ``None`` whenever it needs more text."""

_BLANKS = " \t\r\n"  # JSON's
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a JSON string
_SCALAR = re.compile(r"[-+.\w]+", re.ASCII)
_SCALARS = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")
_DEEPEST = 100  # levels of JSON; readers of JSON have a limit, too


class NoCall(Exception):
    """The text at this place is not a call."""


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

    def peek(self) -> Steps[str]:
        """The next character; ``""`` at the end of the text."""
        while self.place == len(self.text) and not self.ended:
            yield
        return self.text[self.place : self.place + 1]

    def maybe(self, literal: str) -> Steps[bool]:
        """Reads ``literal`` if it comes next; returns whether it did."""
        while not self.text.startswith(literal, self.place):
            there = self.text[self.place : self.place + len(literal)]
            if self.ended or not literal.startswith(there):
                return False
            yield
        self.place += len(literal)
        return True

    def literal(self, literal: str) -> Steps[None]:
        """Reads ``literal``; raises `NoCall` if it does not come next."""
        if not (yield from self.maybe(literal)):
            raise NoCall

    def blank(self) -> Steps[None]:
        """Reads any number of blanks."""
        while (character := (yield from self.peek())) and character in _BLANKS:
            self.place += 1

    def tail(self, literal: str) -> Steps[bool]:
        """Reads blanks and ``literal`` if they come next, or else nothing. Reads nothing if ``literal`` is empty."""
        if not literal:
            return False
        place = self.place
        yield from self.blank()
        if (yield from self.maybe(literal)):
            return True
        self.place = place
        return False

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Reads the longest match of ``pattern``, a repeated class of characters. The match may be empty."""
        start = self.place
        while True:
            found = pattern.match(self.text, self.place)
            self.place = self.place if found is None else found.end()
            if self.place < len(self.text) or self.ended:
                return self.text[start : self.place]
            yield

    def until(self, literal: str) -> Steps[str]:
        """Reads the text up to ``literal`` and ``literal`` itself; returns the text before it."""
        start = seen = self.place
        while (found := self.text.find(literal, seen)) < 0:
            if self.ended:
                raise NoCall
            seen = max(start, len(self.text) - len(literal) + 1)
            yield
        self.place = found + len(literal)
        return self.text[start:found]

    # -- JSON (RFC 8259) ---------------------------------------------------------------------------------------------

    def members(self, keys: frozenset[str], depth: int = 0) -> Steps[dict[str, str]]:
        """Reads an object. Returns the text of each value by its key.

        Args:
            keys: the keys that the object may have; empty: any. If ``keys`` are given, a key that comes twice is
                refused.
        """
        found: dict[str, str] = {}
        yield from self.literal("{")
        yield from self.blank()
        if (yield from self.maybe("}")):
            return found
        while True:
            key = json.loads((yield from self._string()))
            if keys and (key not in keys or key in found):
                raise NoCall
            yield from self.blank()
            yield from self.literal(":")
            found[key] = yield from self.value(depth + 1)
            if (yield from self._is_last("}")):
                return found
            yield from self.blank()

    def value(self, depth: int = 0) -> Steps[str]:
        """Reads blanks and a value; returns the text of the value."""
        yield from self.blank()
        start, character = self.place, (yield from self.peek())
        if depth > _DEEPEST:
            raise NoCall
        if character == "{":
            yield from self.members(frozenset(), depth)
        elif character == "[":
            yield from self._array(depth)
        elif character == '"':
            yield from self._string()
        else:
            yield from self._scalar()
        return self.text[start : self.place]

    def _array(self, depth: int) -> Steps[None]:
        yield from self.literal("[")
        yield from self.blank()
        if (yield from self.maybe("]")):
            return
        yield from self.value(depth + 1)
        while not (yield from self._is_last("]")):
            yield from self.value(depth + 1)

    def _is_last(self, closing: str) -> Steps[bool]:
        """Reads the text after a value: a comma, or the end of the object or array. True at the end."""
        yield from self.blank()
        if (yield from self.maybe(closing)):
            return True
        yield from self.literal(",")
        return False

    def _string(self) -> Steps[str]:
        """Reads a string; returns its text with the quotation marks."""
        start = self.place
        yield from self.literal('"')
        while True:
            yield from self.run(_PLAIN)
            if (yield from self.maybe('"')):
                return self.text[start : self.place]
            yield from self.literal("\\")
            yield from self._escaped()

    def _escaped(self) -> Steps[None]:
        character = yield from self.peek()
        self.place += 1
        if character == "u":
            for _ in range(4):
                if (yield from self.peek()) not in _HEX:
                    raise NoCall
                self.place += 1
        elif not character or character not in '"\\/bfnrt':
            raise NoCall

    def _scalar(self) -> Steps[None]:
        if not _SCALARS.fullmatch((yield from self.run(_SCALAR))):
            raise NoCall


def is_value(text: str) -> bool:
    """True if ``text`` is a JSON value."""
    scanner = Scanner(text)
    scanner.ended = True
    try:
        for _ in scanner.value():
            raise AssertionError("the scanner waits for more text, although the text has ended")
        for _ in scanner.blank():
            raise AssertionError("the scanner waits for more text, although the text has ended")
    except NoCall:
        return False
    return scanner.place == len(text)
