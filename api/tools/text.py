"""A text that is still being written, and JSON in it.

If an answer depends on text that has not come yet, `More` is raised, and the reader asks again when there is more text.
So the result does not depend on how the text is cut. If the text does not follow the syntax, `NoCall` is raised.
"""

from __future__ import annotations

import json
from typing import Any, Never, TypeAlias

import regex
from attrs import define

Pattern: TypeAlias = regex.Pattern[str]
Match: TypeAlias = regex.Match[str]

_DEEPEST = 100  # levels of JSON; readers of JSON have a limit, too
_LONGEST_PART = 8  # characters of a part that was cut short, such as -Infinit, beside strings


class NoCall(Exception):
    """The text at this place is not a call."""


class More(Exception):
    """More text must come before the text at this place can be read."""


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse)  # numbers may have any length
_RAW = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=_refuse, strict=False)
_STRING = regex.compile(r'"(?:[^"\\]|\\(?s:.))*+"')
_CONTROL = regex.compile(r"[\x00-\x1f]")


@define(eq=False)
class Text:
    """A text, as far as it has come.

    Attributes:
        ended: true if nothing follows ``text``.
    """

    text: str = ""
    ended: bool = False

    def match(self, pattern: Pattern, place: int) -> Match:
        """The match of ``pattern`` at ``place``. A match that is whole must not change with more text."""
        return self.whole(pattern.match(self.text, place, partial=not self.ended))

    def search(self, pattern: Pattern, place: int) -> Match | None:
        """The first match of ``pattern`` from ``place`` on. An end of the text that may become a match counts, too."""
        return pattern.search(self.text, place, partial=not self.ended)

    @staticmethod
    def whole(found: Match | None) -> Match:
        """``found``, if it is there as a whole."""
        if found is None:
            raise NoCall
        if found.partial:
            raise More
        return found

    def value(self, place: int, *, raw: bool = True) -> tuple[Any, int]:
        """The JSON value (RFC 8259) at ``place``, and its end. Numbers count as integers. ``raw``: texts may have line
        ends and other control characters, which models forget to escape."""
        try:
            found, end = (_RAW if raw else _JSON).raw_decode(self.text, place)
        except json.JSONDecodeError as error:
            is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _LONGEST_PART
            raise (More if is_cut and not self.ended else NoCall) from None
        except (ValueError, RecursionError):
            raise NoCall from None
        if _is_deep(found, _DEEPEST):
            raise NoCall
        if end == len(self.text) and not self.ended and self.text[end - 1] not in '}]"':
            raise More  # a number may go on
        return found, end


def _is_deep(value: Any, most: int) -> bool:
    """True if ``value`` has more than ``most`` levels of arrays and objects."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(one, most - 1) for one in inner)


def is_value(text: str) -> bool:
    """True if ``text`` is a JSON value."""
    bare = text.strip(" \t\r\n")
    try:
        return Text(bare, ended=True).value(0, raw=False)[1] == len(bare)
    except NoCall:
        return False


def escaped(text: str) -> str:
    """``text``, which `Text.value` has read, as JSON whose strings have no control characters."""
    found: str = _STRING.sub(lambda one: _CONTROL.sub(lambda sign: json.dumps(sign[0])[1:-1], one[0]), text)
    return found
