"""`Syntax`: the base of all syntaxes of tool calls, and the parts that they share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import Scanner

Tools = Mapping[str, Tool]  # by name
Write = Callable[[str], str]
"""A function that writes literal text in Lark's syntax; special tokens in the text become tokens."""


class Syntax(ABC):
    """A way in which models write calls."""

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """The markers with which calls begin."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Other characters with which a call may begin if only blanks and calls stand before it."""
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of this syntax that are special tokens in some checkpoints."""
        return ()

    def first(self, text: str, start: int, *, ended: bool) -> int:
        """The first place in ``text``, from ``start`` on, where a call may begin, or else the end of ``text``.

        Args:
            ended: true if nothing follows ``text``. Otherwise an end of ``text`` that is the beginning of a marker
                counts, too.
        """
        return min(_first(begin, text, start, ended=ended) for begin in self.begins)

    @abstractmethod
    def read(self, scanner: Scanner, tools: Tools) -> Iterator[ToolCall]:
        """Reads one call, or several that belong together, from a place where a call may begin. Yields each call as
        soon as it is complete. If it raises `NoCall`, the text since the last call is content; if it raises `More`, it
        is called again for the same place when there is more text."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar, in llguidance's dialect of Lark, of a text that is a call of one of ``tools`` or, with
        ``several``, one or more calls. The first rule is ``start``.

        Raises:
            InvalidRequest: the syntax cannot force a call of these tools.
        """


def literal(special: Mapping[str, int], text: str) -> str:
    """``text`` as a sequence of Lark's strings and tokens. ``special``: the id of each text that is a special token."""
    for marker, token in special.items():
        before, found, after = text.partition(marker)
        if found:
            return " ".join(filter(None, (literal(special, before), f"<[{token}]>", literal(special, after))))
    return json.dumps(text, ensure_ascii=False) if text else ""


def _first(begin: str, text: str, start: int, *, ended: bool) -> int:
    found = text.find(begin, start)
    if found >= 0:
        return found
    longest = 0 if ended else min(len(text) - start, len(begin) - 1)
    return len(text) - next((length for length in range(longest, 0, -1) if text.endswith(begin[:length])), 0)


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of ``tool``."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def json_rule(name: str, schema: Mapping[str, Any], tool: str) -> str:
    """The rule ``name``, which describes JSON that follows ``schema``, a part of ``tool``. The schema is checked where
    the grammar is made, within limits: that may take long."""
    return f"{name}: %exact {json.dumps([tool, schema])}"


def choice(start: str, rules: Mapping[str, str]) -> str:
    """The grammar that begins with the rule ``start``. In that rule, ``call`` stands for one of ``rules``."""
    return "\n".join((f"start: {start}", f"call: {' | '.join(rules)}", *rules.values()))
