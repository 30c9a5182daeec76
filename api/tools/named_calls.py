"""Calls that have the name before the JSON of the arguments, and markers around both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from attrs import frozen

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import NoCall, Scanner
from .syntax import Syntax, Tools, Write, choice, json_rule, schema_of

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
