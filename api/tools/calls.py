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
