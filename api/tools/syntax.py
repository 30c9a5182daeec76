"""`Syntax`: the base of all syntaxes of tool calls, and the parts that they share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import Scanner

Tools = Mapping[str, Tool]  # by name
Calls = Generator[ToolCall | None, None, None]
"""Gives calls. ``None`` between them: more text is needed."""

Write = Callable[[str], str]
"""Writes literal text as Lark reads it, with the special tokens in it as tokens."""

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are trained


class Syntax(ABC):
    """A way in which models write calls."""

    @property
    @abstractmethod
    def begins(self) -> tuple[str, ...]:
        """The texts with which calls begin."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Characters with which a call may begin, too, where nothing but blanks and calls stands before it."""
        return ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of this syntax that are special tokens in some checkpoints."""
        return ()

    def first(self, text: str, start: int, *, ended: bool) -> int:
        """The first place in ``text``, from ``start`` on, where a call may begin; else its end.

        Args:
            ended: nothing follows ``text``; else what its end may become counts, too.
        """
        return min(_first(begin, text, start, ended=ended) for begin in self.begins)

    @abstractmethod
    def read(self, scanner: Scanner, tools: Tools) -> Calls:
        """Reads a call, or several that belong together, from where one may begin. Gives each as soon as all of it is
        read. Raises `NoCall`; the text since the last call is content then."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The rules of a text that is one call of one of ``tools``, or several calls, in llguidance's dialect of Lark.
        The first rule is ``start``.

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


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """The rule ``name`` of JSON that follows ``schema``."""
    return f"{name}: %json {json.dumps({'x-guidance': _COMPACT, **schema})}"


def choice(start: str, rules: Mapping[str, str]) -> str:
    """The grammar that begins with the rule ``start`` of a ``call``, which is one of ``rules``."""
    return "\n".join((f"start: {start}", f"call: {' | '.join(rules)}", *rules.values()))
