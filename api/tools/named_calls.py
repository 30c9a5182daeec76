"""Calls that have the name before the JSON of the arguments, and markers around both."""

from __future__ import annotations

import re
from collections.abc import Sequence

from attrs import frozen

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import NoCall, Scanner, Steps
from .syntax import Calls, Syntax, Tools, Write, choice, json_rule, schema_of

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

    def read(self, scanner: Scanner, tools: Tools) -> Calls:
        """Reads one call, or several if there is a marker `before` them."""
        yield from scanner.literal(self.before)
        yield from scanner.blank()
        yield from scanner.literal(self.begin)
        yield (yield from self._call(scanner, tools))
        yield from scanner.tail(self.end)
        while self.before and (yield from scanner.tail(self.begin)):
            yield (yield from self._call(scanner, tools))
            yield from scanner.tail(self.end)
        yield from scanner.tail(self.after)

    def _call(self, scanner: Scanner, tools: Tools) -> Steps[ToolCall]:
        """Reads a call after ``begin``. Models omit the other markers now and then."""
        yield from scanner.blank()
        name = yield from scanner.run(_NAME)
        if name not in tools:
            raise NoCall
        if self.ignored and (yield from scanner.maybe(self.ignored)):
            yield from scanner.run(_NAME)
        yield from scanner.maybe(self.middle)
        yield from scanner.blank()
        start = scanner.place
        yield from scanner.members(frozenset())
        return ToolCall(name, scanner.text[start : scanner.place])

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of calls with all their markers."""
        rules: dict[str, str] = {}
        for index, tool in enumerate(tools):
            head, end = write(self.begin + tool.name + self.middle), write(self.end)
            call = f"call_{index}: {head} arguments_{index} {end}"
            rules[f"call_{index}"] = f"{call}\n{json_rule(f'arguments_{index}', schema_of(tool), tool.name)}"
        return choice(f"{write(self.before)} call{'+' if several else ''} {write(self.after)}", rules)
