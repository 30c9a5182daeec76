"""What every syntax of tool calls can do, and what the syntaxes share."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ...core.tools import Tool
from .calls import ToolCall
from .scanner import Scanner, Steps

Tools = Mapping[str, Tool]  # by name

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as models are trained


class Syntax(Protocol):
    """How a model writes its calls."""

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts with which calls begin."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Further texts with which calls begin, where nothing but blanks and calls comes before them."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of this syntax that are special tokens in some checkpoints."""

    def read(self, scanner: Scanner, tools: Tools) -> Steps[list[ToolCall]]:
        """Reads a call, or several that belong together, from one of `begins` or `opens` on. Raises `NoCall`."""

    def grammar(self, tools: Sequence[Tool], write: Literals, *, several: bool) -> str:
        """The rules of a text that is one call of one of ``tools``, or several calls; the first rule is ``start``. In
        llguidance's dialect of Lark."""


class Literals:
    """Writes literal text as Lark reads it, with the special tokens in it as tokens."""

    def __init__(self, special: Mapping[str, int]) -> None:
        """``special``: the id of each text that is a special token."""
        self._special = special

    def __call__(self, text: str) -> str:
        """``text`` as a sequence of Lark's strings and tokens."""
        for marker, token in self._special.items():
            before, found, after = text.partition(marker)
            if found:
                return " ".join(filter(None, (self(before), f"<[{token}]>", self(after))))
        return json.dumps(text, ensure_ascii=False) if text else ""


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of ``tool``."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def json_rule(name: str, schema: Mapping[str, Any]) -> str:
    """The rule ``name`` of JSON that follows ``schema``."""
    return f"{name}: %json {json.dumps({'x-guidance': _COMPACT, **schema})}"


def alternatives(name: str, rules: Sequence[str]) -> str:
    """The rule ``name`` of one of ``rules``."""
    return f"{name}: {' | '.join(rules)}"
