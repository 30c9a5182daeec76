"""Calls as the checkpoint's own response template describes them. transformers' declarative parser reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Self

from attrs import field, frozen

from ...core.errors import InvalidRequest
from ...core.tools import Tool
from .syntax import CallReading, Syntax, ToolCall, Tools, Write
from .text import Match, More, NoCall, Pattern, Text

_FIELD = "tool_calls"  # of the assistant's message
_NAME_ONE = "name a tool format (triolet serve --tool-format, ToolFormat.named)"


@frozen(kw_only=True)
class TemplatedCalls(Syntax):
    """The regions that the response template calls ``tool_calls``. Each is found by the template's patterns and read by
    transformers on its own. So a region that transformers cannot read is content, and no text between regions is lost.
    """

    _spec: dict[str, Any] = field(repr=False)  # only with the region of calls
    head: Pattern = field(repr=False)
    _close: Pattern | None = field(repr=False)
    _forced: Syntax | None = None

    @classmethod
    def of(cls, spec: dict[str, Any], forced: Syntax | None) -> Self | None:
        """The syntax of the calls in a tokenizer's ``response_template``; ``None``: the template does not describe
        calls.

        Args:
            forced: the syntax of the chat template. Calls are forced in this syntax, since no grammar is made from a
                response template.

        Raises:
            InvalidRequest: transformers cannot read the template.
        """
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            region = load_response_template(spec).fields.get(_FIELD)
            alone = {**spec, "fields": {_FIELD: {**spec["fields"].get(_FIELD, {}), "optional": True}}}
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(f"the checkpoint's response_template cannot be read: {error}; {_NAME_ONE}") from error
        if region is None or region.open_re is None:
            return None
        return cls(spec=alone, head=region.open_re, close=region.close_re, forced=forced)

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers of the syntax that can be forced."""
        return () if self._forced is None else self._forced.markers

    def read(self, text: Text, head: Match, tools: Tools) -> CallReading:
        """Reads one region of the template, up to the marker at its end or the end of the text, and the calls in it."""
        written, partial = text.text, not text.ended
        if partial and head.end() == len(written):  # the match may grow
            raise More
        closed = None if self._close is None else self._close.search(written, head.end(), partial=partial)
        if partial and (closed is None or closed.end() == len(written)):
            raise More
        end = len(written) if closed is None else closed.end()
        return CallReading(self._calls(written[head.start() : end], tools), end)

    def _calls(self, region: str, tools: Tools) -> list[ToolCall]:
        from transformers.utils.chat_parsing import parse_response

        given: list[Any] = [dict(tool.given) for tool in tools.values()]
        try:
            message = parse_response(region, self._spec, prefix="", tools=given)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise NoCall from None
        calls = [_call(one, tools) for one in _flat(message.get(_FIELD))]
        if not calls:
            raise NoCall
        return calls

    def grammar(self, tools: Sequence[Tool], write: Write, *, several: bool) -> str:
        """The grammar of the syntax of the chat template.

        Raises:
            InvalidRequest: the chat template has none of the known syntaxes.
        """
        if self._forced is None:
            raise InvalidRequest(f"this checkpoint's response template cannot force a call; {_NAME_ONE}")
        return self._forced.grammar(tools, write, several=several)


def _flat(found: Any) -> Iterator[Any]:
    """Yields the calls in ``found``, which is a call or nested lists of calls."""
    if isinstance(found, list):
        for one in found:
            yield from _flat(one)
    elif found is not None:
        yield found


def _call(found: Any, tools: Tools) -> ToolCall:
    function: Any = found.get("function") if isinstance(found, dict) else None
    name, arguments = (function.get("name"), function.get("arguments")) if isinstance(function, dict) else (None, None)
    if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
        raise NoCall
    try:
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
    except (ValueError, TypeError):
        raise NoCall from None
