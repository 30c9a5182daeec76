"""Which syntax a checkpoint's calls have, and what a caller does with it: `ToolFormat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from attrs import field, frozen

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.request import Structure
from ...core.tools import read_tools
from .calls import ArgumentsPiece, CallBegin, ContentPiece, ToolCall
from .json_calls import JsonCalls
from .reader import ToolReader
from .syntax import Literals, Syntax

SYNTAXES: Mapping[str, Syntax] = {
    "hermes": JsonCalls(begin="<tool_call>\n", end="\n</tool_call>"),
    "llama": JsonCalls(begin="<|python_tag|>", bare=True, between="; ", arguments="parameters"),
    "mistral": JsonCalls(begin="[TOOL_CALLS] ", between=", ", array=True),
    "granite": JsonCalls(begin="<|tool_call|>", between=", ", array=True),
}
"""By the name of the format."""


@frozen(kw_only=True)
class ToolFormat:
    """How a checkpoint writes tool calls: finds them in its text, and forces them.

    ::

        form = ToolFormat.of(engine.model)
        completion = await engine.generate(messages=messages, tools=tools)
        content, calls = form.parse(completion.text, tools)

    Attributes:
        name: a key of `SYNTAXES`.
        special: the id of each marker that is a special token of the checkpoint.
    """

    name: str
    special: Mapping[str, int] = field(factory=dict)
    _syntax: Syntax = field(repr=False)

    @classmethod
    def of(cls, model: ModelDescription, name: str | None = None) -> Self:
        """The format of a loaded model.

        Args:
            name: chosen by the caller, ``"hermes"`` say; by default found from the chat template.

        Raises:
            InvalidRequest: there is no format of this name, or the template writes calls in none that is known.
        """
        template = "" if model.preparer is None else model.preparer.tool_template
        found = name if name is not None else find_format(template)
        if found is None:
            raise InvalidRequest(
                f"the chat template of {model.name} writes tool calls in no known format; name one: {_NAMES}"
            )
        if found not in SYNTAXES:
            raise InvalidRequest(f"the tool format {shown(name)}; allowed: {_NAMES}")
        syntax = SYNTAXES[found]
        return cls(name=found, syntax=syntax, special=_special(model.tokenizer, syntax))

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, tuple[ToolCall, ...]]:
        """The content and the calls of a whole text: what `reader` gives, joined. The content is ``None`` where there
        is nothing but calls.

        Raises:
            InvalidRequest: ``tools`` that are none, see `Engine.generate`.
        """
        reader = self.reader(tools)
        content: list[str] = []
        calls: list[ToolCall] = []
        for part in (*reader.feed(text), *reader.end()):
            match part:
                case ContentPiece(piece):
                    content.append(piece)
                case CallBegin(_, name):
                    calls.append(ToolCall(name, ""))
                case ArgumentsPiece(index, piece):
                    calls[index] = ToolCall(calls[index].name, calls[index].arguments + piece)
        return "".join(content) if content or not calls else None, tuple(calls)

    def reader(self, tools: Sequence[Mapping[str, Any]]) -> ToolReader:
        """Reads the text of one completion piece by piece.

        Raises:
            InvalidRequest: ``tools`` that are none, see `Engine.generate`.
        """
        return ToolReader(self._syntax, {tool.name: tool for tool in read_tools(tools)})

    def structure(
        self, tools: Sequence[Mapping[str, Any]], choice: str = "auto", *, parallel: bool = False
    ) -> Structure | None:
        """What the whole output must be, for `SamplingParams`; ``None``: any text.

        Args:
            choice: ``"required"``: a call of any tool; the name of a tool: a call of it; ``"auto"`` and ``"none"``: any
                text.
            parallel: true if there may be several calls.

        Raises:
            InvalidRequest: there is no such tool, or ``tools`` that are none.
        """
        found = read_tools(tools)
        if choice in ("auto", "none"):
            return None
        chosen = [tool for tool in found if choice in ("required", tool.name)]
        if not chosen:
            names = ", ".join(repr(tool.name) for tool in found) or "none is given"
            raise InvalidRequest(
                f"choice={shown(choice)}; allowed: 'none', 'auto', 'required' or the name of a tool: {names}"
            )
        return Structure(kind="lark", text=self._syntax.grammar(chosen, Literals(self.special), several=parallel))


_NAMES = ", ".join(SYNTAXES)


def find_format(template: str) -> str | None:
    """The name of the format in which a chat template writes calls, by the markers in its text; ``None``: none that is
    known."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|tool_call|>" in template:
        return "granite"
    if "<tool_call>" in template:
        return "hermes"
    return "llama" if "<|python_tag|>" in template else None


def _special(tokenizer: Any, syntax: Syntax) -> dict[str, int]:
    """The markers of ``syntax`` that are special tokens: no text becomes them, and no text comes of them."""
    added = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {marker: added[marker] for marker in syntax.markers if marker in added}
