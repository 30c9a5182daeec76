"""Calls whose arguments are JSON, between markers. `NamedCalls` have the name before the arguments. `JsonCalls` are
objects with a name and arguments, alone or in an array."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from attrs import frozen

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import NoCall, Scanner, is_value
from .syntax import Syntax, Tools, Write, choice, json_rule, schema_of

# -- calls with a name -------------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z0-9_.:-]+")


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
    def begins(self) -> tuple[str, ...]:
        """The first marker."""
        return (self.before or self.begin,)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return tuple(filter(None, (self.before, self.begin, self.middle, self.end, self.after)))

    def read(self, scanner: Scanner, tools: Tools) -> Iterator[ToolCall]:
        """Reads one call, or several if there is a marker `before` them."""
        scanner.literal(self.before)
        scanner.blank()
        scanner.literal(self.begin)
        yield self._call(scanner, tools)
        scanner.tail(self.end)
        while self.before and scanner.tail(self.begin):
            yield self._call(scanner, tools)
            scanner.tail(self.end)
        scanner.tail(self.after)

    def _call(self, scanner: Scanner, tools: Tools) -> ToolCall:
        """Reads a call after ``begin``. Models omit the other markers now and then."""
        scanner.blank()
        name = scanner.run(_NAME)
        if name not in tools:
            raise NoCall
        if self.ignored and scanner.maybe(self.ignored):
            scanner.run(_NAME)
        scanner.maybe(self.middle)
        scanner.blank()
        return ToolCall(name, scanner.value("{"))

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of calls with all their markers."""
        rules: dict[str, str] = {}
        for index, tool in enumerate(tools):
            head, end = write(self.begin + tool.name + self.middle), write(self.end)
            call = f"call_{index}: {head} arguments_{index} {end}"
            rules[f"call_{index}"] = f"{call}\n{json_rule(f'arguments_{index}', schema_of(tool), tool.name)}"
        return choice(f"{write(self.before)} call{'+' if several else ''} {write(self.after)}", rules)


# -- calls that are objects --------------------------------------------------------------------------------------------

_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
_NONE = "{}"


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
    def begins(self) -> tuple[str, ...]:
        """The marker before the calls."""
        return (self.begin.strip(),)

    @property
    def opens(self) -> tuple[str, ...]:
        """A brace, if calls may come without ``begin``."""
        return ("{",) if self.bare else ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers before and after the calls."""
        return tuple(filter(None, (self.begin.strip(), self.end.strip())))

    def read(self, scanner: Scanner, tools: Tools) -> Iterator[ToolCall]:
        """Reads one call, an array of calls, or calls separated by `between`."""
        if not scanner.maybe(self.begin.strip()) and not self.bare:
            raise NoCall
        scanner.blank()
        is_array = scanner.maybe("[")
        between = "," if is_array else "" if self.array else self.between.strip()
        scanner.blank()
        yield _call(scanner, tools)
        while scanner.tail(between):
            scanner.blank()
            yield _call(scanner, tools)
        if is_array:
            scanner.blank()
            scanner.literal("]")
        scanner.tail(self.end.strip())

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


def _call(scanner: Scanner, tools: Tools) -> ToolCall:
    members = scanner.members(_KEYS)
    name = members.get("name", "")
    if not name.startswith('"') or json.loads(name) not in tools or {"arguments", "parameters"} <= members.keys():
        raise NoCall
    return ToolCall(json.loads(name), _arguments(members.get("arguments", members.get("parameters", _NONE))))


def _arguments(text: str) -> str:
    """The text of the object of arguments. Some models write the object as a JSON string, and some write null for no
    arguments."""
    if text.startswith("{"):
        return text
    if text == "null":
        return _NONE
    inner: str = json.loads(text) if text.startswith('"') else ""
    if not (inner.lstrip().startswith("{") and is_value(inner)):
        raise NoCall
    return inner
