"""`Syntax`: the base of all syntaxes of tool calls, and what they share. `ToolPart` is a part of a text with calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import regex
from attrs import frozen

from ...core.tools import Tool
from .text import Match, Pattern, Text


@frozen
class ToolCall:
    """One call that a model wrote: the name of the tool, and its arguments, the text of a JSON object."""

    name: str
    arguments: str


@frozen
class ContentPiece:
    """The next piece of the content, the text beside the calls."""

    text: str


@frozen
class CallBegin:
    """The beginning of a call. ``index`` counts the calls of a text from 0."""

    index: int
    name: str


@frozen
class ArgumentsPiece:
    """The next piece of the arguments of call ``index``."""

    index: int
    text: str


ToolPart = ContentPiece | CallBegin | ArgumentsPiece


# ---- syntaxes --------------------------------------------------------------------------------------------------------


Tools = Mapping[str, Tool]  # by name
Write = Callable[[str], str]
"""A function that writes literal text in Lark's syntax; special tokens in the text become tokens."""

BLANKS = r"[ \t\r\n]*+"  # JSON's
_BARE = regex.compile(r"[\s\x1c-\x1f]*+(?=\{)")


@frozen
class CallReading:
    """Calls that were read, and the place where they end. ``after``: the patterns of what may follow in the same group,
    a call or the `closing` markers; the first that matches counts."""

    calls: Sequence[ToolCall]
    end: int
    after: tuple[Pattern, ...] = ()


class Syntax(ABC):
    """A way in which models write calls."""

    @property
    @abstractmethod
    def head(self) -> Pattern:
        """The beginning of a call, with what must follow to tell."""

    @property
    def bare(self) -> bool:
        """True if a call may begin with its brace where only blanks and calls stand before it."""
        return False

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of this syntax that are special tokens in some checkpoints."""
        return ()

    def find(self, text: Text, place: int, *, bare: bool) -> Match | None:
        """The next beginning of a call. It may be partial: it ends where the text ends, and may become one."""
        return (_BARE.match(text.text, place) if bare and self.bare else None) or text.search(self.head, place)

    @abstractmethod
    def read(self, text: Text, head: Match, tools: Tools) -> CallReading:
        """Reads the call that begins with ``head``, a match of `head` or of a pattern in `CallReading.after`.

        Raises:
            NoCall: the text is not a call.
            More: more text is needed.
        """

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


def closing(*markers: str) -> tuple[Pattern, ...]:
    """The pattern of the markers that end a group of calls, with blanks before each. None if a marker is empty."""
    text = "".join(BLANKS + regex.escape(marker) for marker in markers)
    return (regex.compile(f"{text}(?P<end>)"),) if all(markers) else ()


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of ``tool``."""
    if tool.parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {**tool.parameters, "type": "object"}


def json_rule(name: str, schema: Mapping[str, Any], tool: str) -> str:
    """The rule ``name``, which describes JSON that follows ``schema``, a part of ``tool``. The schema is checked where
    the grammar is made, within limits: that may take long."""
    return f"{name}: %exact {json.dumps([tool, schema])}"


def left_out(tool: str, what: Collection[str]) -> tuple[str, ...]:
    """The comment in a grammar that says what of its schema a call of ``tool`` need not follow; none for nothing. It is
    read where the grammar is made, and logged."""
    return (f"// %exact {json.dumps([tool, ', '.join(map(json.dumps, sorted(what)))])}",) if what else ()


def choice(start: str, rules: Mapping[str, str]) -> str:
    """The grammar that begins with the rule ``start``. In that rule, ``call`` stands for one of ``rules``."""
    return "\n".join((f"start: {start}", f"call: {' | '.join(rules)}", *rules.values()))
