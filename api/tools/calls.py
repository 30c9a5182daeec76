"""The parts of a text with tool calls, as frozen values."""

from __future__ import annotations

from attrs import frozen


@frozen
class ToolCall:
    """One call that a model wrote: the name of the tool, and its arguments, the text of a JSON object."""

    name: str
    arguments: str


@frozen
class ContentPiece:
    """The next piece of the text beside the calls."""

    text: str


@frozen
class CallBegin:
    """A call begins. The calls of a text are counted from 0."""

    index: int
    name: str


@frozen
class ArgumentsPiece:
    """The next piece of the arguments of call ``index``."""

    index: int
    text: str


ToolPart = ContentPiece | CallBegin | ArgumentsPiece
