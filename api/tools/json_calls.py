"""Calls whose arguments are JSON, between markers. `NamedCalls` have the name before the arguments. `JsonCalls` are
objects with a name and arguments, alone or in an array."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import regex
from attrs import frozen

from ...core.tools import Tool
from .syntax import BLANKS, CallReading, Syntax, ToolCall, Tools, Write, choice, closing, json_rule, schema_of
from .text import Match, NoCall, Pattern, Text, escaped, is_value

# -- calls with a name -------------------------------------------------------------------------------------------------

_NAME = "[A-Za-z0-9_.:-]"


@frozen(kw_only=True)
class NamedCalls(Syntax):
    """Calls that consist of ``begin``, the name, ``middle``, the arguments and ``end``.

    Args:
        before, after: the markers around all calls together; empty: no marker.
        ignored: a marker that may follow the name; the id after it is skipped.
    """

    begin: str
    middle: str
    end: str = ""
    before: str = ""
    after: str = ""
    ignored: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return tuple(filter(None, (self.before, self.begin, self.middle, self.ignored, self.end, self.after)))

    @cached_property
    def head(self) -> Pattern:
        """The markers and the name, up to the brace. Models omit the markers behind the name now and then."""
        return regex.compile((regex.escape(self.before) + BLANKS if self.before else "") + self._named)

    @property
    def _named(self) -> str:
        ignored, middle = regex.escape(self.ignored), regex.escape(self.middle)
        skipped = f"(?:{ignored}{_NAME}*+)?+" if ignored else ""
        return rf"{regex.escape(self.begin)}{BLANKS}(?P<name>{_NAME}++){skipped}(?:{middle})?+{BLANKS}(?=\{{)"

    @cached_property
    def _after(self) -> tuple[Pattern, ...]:
        """Another call if there is a marker `before` them, or else the markers at the end, each of which may lack."""
        end = f"(?:{BLANKS}{regex.escape(self.end)})?+"
        last = rf"{BLANKS}{regex.escape(self.end)}(?!{BLANKS}{regex.escape(self.begin)})(?P<end>)"
        more = (regex.compile(end + BLANKS + self._named),)
        return (*more, *closing(self.end, self.after), *closing(self.after), regex.compile(last)) if self.before else ()

    def read(self, text: Text, head: Match, tools: Tools) -> CallReading:
        """Reads the arguments."""
        if head["name"] not in tools:
            raise NoCall
        _, end = text.value(head.end())
        return CallReading((ToolCall(head["name"], escaped(text.text[head.end() : end])),), end, self._after)

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of calls with all their markers."""
        rules: dict[str, str] = {}
        for index, tool in enumerate(tools):
            head, end = write(self.begin + tool.name + self.middle), write(self.end)
            call = f"call_{index}: {head} arguments_{index} {end}"
            rules[f"call_{index}"] = f"{call}\n{json_rule(f'arguments_{index}', schema_of(tool), tool.name)}"
        return choice(f"{write(self.before)} call{'+' if several else ''} {write(self.after)}", rules)


# -- calls that are objects --------------------------------------------------------------------------------------------

_KEYS = frozenset({"name", "arguments", "parameters", "id", "type", "function"})
_FIRST = regex.compile(rf'\{{{BLANKS}(?=")')
_COLON = regex.compile(rf"{BLANKS}:{BLANKS}(?=[^ \t\r\n])")
_NEXT = regex.compile(rf'{BLANKS}(?:,{BLANKS}(?=")|\}})')


@frozen(kw_only=True)
class JsonCalls(Syntax):
    """``{"name": ..., "arguments": {...}}`` between ``begin`` and ``end``.

    Args:
        begin: the marker before the calls.
        end: the marker after the calls; models omit it now and then.
        bare: true if calls at the beginning of the text may lack ``begin``. Forced calls then lack it.
        between: the separator of calls that share one ``begin``; empty: each call has its own ``begin``.
        array: true if forced calls are written as a JSON array. Arrays are read in any case.
        arguments: the key of the arguments in forced calls: ``arguments`` or ``parameters``. Both are read.
    """

    begin: str
    end: str = ""
    bare: bool = False
    between: str = ""
    array: bool = False
    arguments: str = "arguments"

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers before and after the calls."""
        return tuple(filter(None, (self.begin.strip(), self.end.strip())))

    @cached_property
    def head(self) -> Pattern:
        """The marker, and the bracket of an array, up to the brace."""
        return regex.compile(rf"{regex.escape(self.begin.strip())}{BLANKS}(?P<array>\[)?+{BLANKS}(?=\{{)")

    @cached_property
    def _after(self) -> tuple[Pattern, ...]:
        """Another call behind `between`, or the marker at the end. Models write a brace too many before the marker, and
        two calls before one, now and then."""
        between, end = "" if self.array else regex.escape(self.between.strip()), regex.escape(self.end.strip())
        more = (regex.compile(rf"{BLANKS}{between}{BLANKS}(?=\{{)"),) if between or end else ()
        return (*more, regex.compile(rf"{BLANKS}\}}?+{BLANKS}{end}(?P<end>)")) if end else more

    @cached_property
    def _after_in_array(self) -> tuple[Pattern, ...]:
        more = regex.compile(rf"{BLANKS}(?P<array>,){BLANKS}(?=\{{)")
        return (more, *closing("]", self.end.strip()), *closing("]"))

    def read(self, text: Text, head: Match, tools: Tools) -> CallReading:
        """Reads the object, or the object that is its member ``function``, as in OpenAI's messages."""
        members, end = _members(text, head.end())
        if "function" in members and not members.keys() - {"function", "id", "type"}:
            members, _ = _members(Text(members["function"][1], ended=True), 0)
        name, _ = members.get("name", (None, ""))
        if not isinstance(name, str) or name not in tools or {"arguments", "parameters"} <= members.keys():
            raise NoCall
        arguments = _arguments(*members.get("arguments", members.get("parameters", (None, ""))))
        after = self._after_in_array if head.lastgroup == "array" else self._after
        return CallReading((ToolCall(name, arguments),), end, after)

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of calls with their keys in the order in which models write them."""
        rules: dict[str, str] = {}
        for index, tool in enumerate(tools):
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            call = f"call_{index}: {write(head)} arguments_{index} {write('}')}"
            rules[f"call_{index}"] = f"{call}\n{json_rule(f'arguments_{index}', schema_of(tool), tool.name)}"
        opened, closed = ("[", "]") if self.array else ("", "")
        begin, end = write("" if self.bare else self.begin + opened), write(closed + self.end)
        if self.between:
            more = f"({write(self.between)} call)*" if several else ""
            start = f"{begin} call {more} {end}"
        else:
            start = f"{begin} call {end} " + (f'("\\n" {begin} call {end})*' if several else "")
        return choice(start, rules)


def _members(text: Text, place: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The object at ``place``: its members, each with its value and the text of the value; and its end."""
    found: dict[str, tuple[Any, str]] = {}
    before = text.match(_FIRST, place)
    while before[0][-1] != "}":
        key, place = text.value(before.end())
        if key not in _KEYS or key in found:
            raise NoCall
        start = text.match(_COLON, place).end()
        value, place = text.value(start)
        found[key] = value, text.text[start:place]
        before = text.match(_NEXT, place)
    return found, before.end()


def _arguments(value: Any, text: str) -> str:
    """The text of the object of arguments. Some models write the object as a JSON string, and some write null for no
    arguments."""
    if value in (None, ""):
        return "{}"
    if isinstance(value, str) and value.lstrip().startswith("{") and is_value(value):
        return value
    if not isinstance(value, dict):
        raise NoCall
    return escaped(text)
