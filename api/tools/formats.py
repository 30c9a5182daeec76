"""`ToolFormat`: the syntax of a checkpoint's calls, and its uses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

from attrs import field, frozen

from ...core.checks import shown
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.request import Structure
from ...core.tools import Tool, read_tools
from .json_calls import JsonCalls, NamedCalls
from .reader import ToolReader
from .syntax import ArgumentsPiece, CallBegin, ContentPiece, Syntax, ToolCall, literal
from .templated import TemplatedCalls
from .xml_calls import XmlCalls

SYNTAXES: Mapping[str, Syntax] = {
    "hermes": JsonCalls(begin="<tool_call>\n", end="\n</tool_call>"),
    "qwen3_coder": XmlCalls(),
    "llama3_json": JsonCalls(begin="<|python_tag|>", bare=True, between="; ", arguments="parameters"),
    "mistral": JsonCalls(begin="[TOOL_CALLS] ", between=", ", array=True),
    "mistral_v11": NamedCalls(begin="[TOOL_CALLS]", middle="[ARGS]", ignored="[CALL_ID]"),
    "granite": JsonCalls(begin="<|tool_call|>", between=", ", array=True),
    "deepseek_v31": NamedCalls(
        before="<｜tool▁calls▁begin｜>",
        begin="<｜tool▁call▁begin｜>",
        middle="<｜tool▁sep｜>",
        end="<｜tool▁call▁end｜>",
        after="<｜tool▁calls▁end｜>",
    ),
}
"""The syntaxes, by the names that other servers use for them."""

_SIGNS = (  # of a chat template: texts that it has, texts that it lacks
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]"), ()),
    ("mistral", ("[TOOL_CALLS]",), ()),
    ("qwen3_coder", ("<function=", "<parameter="), ()),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",), ("```json",)),  # an earlier version writes the arguments in a fence
    ("granite", ("<|tool_call|>",), ()),
    ("hermes", ("<tool_call>", "arguments"), ("<arg_key>",)),  # another family writes the same tag, without JSON in it
    ("llama3_json", ("<|python_tag|>",), ()),
    ("llama3_json", ('"parameters": dictionary of argument name',), ()),
)
_NAMES = ", ".join(SYNTAXES)
_UNKNOWN = (
    "the checkpoint's chat template does not write tool calls in a known format; leave the tools out, or name one "
    f"of these formats (triolet serve --tool-format, ToolFormat.named): {_NAMES}"
)


def find_format(template: str) -> str | None:
    """The name of the format in which a chat template writes calls, found by the markers in the template; ``None``: no
    known format."""
    for name, there, absent in _SIGNS:
        if all(sign in template for sign in there) and not any(sign in template for sign in absent):
            return name
    return None


@frozen(kw_only=True)
class ToolFormat:
    """The way in which a checkpoint writes tool calls. It finds calls in a text, and forces the model to write them.

    ::

        form = ToolFormat.of(engine.model)
        completion = await engine.generate(messages=messages, tools=tools)
        content, calls = form.parse(completion.text, tools)

    Attributes:
        name: ``"hermes"``, ``"qwen3_coder"``, ``"llama3_json"``, ``"mistral"``, ``"mistral_v11"``, ``"granite"`` or
            ``"deepseek_v31"``; ``"response_template"`` if the checkpoint itself describes how its text is read.
        special: the id of each marker that is a special token of the checkpoint.
    """

    name: str
    special: Mapping[str, int] = field(factory=dict)
    _syntax: Syntax = field(repr=False)

    @classmethod
    def of(cls, model: ModelDescription, name: str | None = None) -> Self:
        """The format of a loaded model, found by the response template of its tokenizer, or else by its chat template.

        Args:
            name: the name of a format, such as ``"hermes"``, to use instead.

        Raises:
            InvalidRequest: there is no format of this name, the template reads no tools or writes calls in no format
                that is known, or the response template cannot be read.
        """
        if name is not None:
            return cls.named(name, model.tokenizer)
        template = "" if model.preparer is None else model.preparer.template(tools=True)
        found = find_format(template)
        spec = getattr(model.tokenizer, "response_template", None)
        own = None if spec is None else TemplatedCalls.of(spec, SYNTAXES.get(found or ""))
        if own is not None:
            return cls(name="response_template", syntax=own, special=_special(model.tokenizer, own))
        if found is None:
            from ...models.architectures.conversations import tools_fault  # it imports jinja2

            raise InvalidRequest(tools_fault(template) or _UNKNOWN)
        return cls.named(found, model.tokenizer)

    @classmethod
    def named(cls, name: str, tokenizer: Any = None) -> Self:
        """The format of this name.

        Args:
            tokenizer: the tokenizer of the checkpoint, as in `ModelDescription`. Without it no marker counts as a
                special token; only `structure` needs to know.

        Raises:
            InvalidRequest: there is no such format.
        """
        if name not in SYNTAXES:
            raise InvalidRequest(f"the tool format {shown(name)} is not known; allowed: {_NAMES}")
        return cls(name=name, syntax=SYNTAXES[name], special=_special(tokenizer, SYNTAXES[name]))

    def parse(self, text: str, tools: Sequence[Mapping[str, Any] | Tool]) -> tuple[str | None, tuple[ToolCall, ...]]:
        """The content and the calls of a whole text: the joined parts that a `reader` returns. The content is ``None``
        if the text has nothing but calls.

        Raises:
            InvalidRequest: ``tools`` do not describe tools, see `Engine.generate`.
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

    def reader(self, tools: Sequence[Mapping[str, Any] | Tool]) -> ToolReader:
        """Returns a reader of the text of one completion, piece by piece.

        Raises:
            InvalidRequest: ``tools`` do not describe tools, see `Engine.generate`.
        """
        return ToolReader(self._syntax, {tool.name: tool for tool in read_tools(tools)})

    def structure(
        self,
        tools: Sequence[Mapping[str, Any] | Tool],
        choice: str = "auto",
        *,
        parallel: bool = False,
        answer: Structure | None = None,
    ) -> Structure | None:
        """The structure of the whole output, for `SamplingParams`; ``None``: the output may be any text.

        Args:
            choice: ``"required"`` forces a call of any tool; the name of a tool forces a call of that tool; ``"auto"``
                and ``"none"`` allow any text.
            parallel: true if there may be several calls.
            answer: a structure of JSON, which an output with the choice ``"auto"`` has if it is no call.

        Raises:
            InvalidRequest: there is no such tool, or ``tools`` do not describe tools.
        """
        found = read_tools(tools)
        if choice == "none" or (choice == "auto" and (answer is None or not found)):
            return answer
        chosen = [tool for tool in found if choice in ("required", "auto", tool.name)]
        if not chosen:
            names = ", ".join(repr(tool.name) for tool in found) or "none is given"
            raise InvalidRequest(
                f"choice={shown(choice)}; allowed: 'none', 'auto', 'required' or the name of a tool: {names}"
            )
        text = self._syntax.grammar(chosen, partial(literal, self.special), several=parallel)
        if choice == "auto" and answer is not None:
            exact = f"%exact [null, {json.dumps(answer.text)}]"  # a text in a text: it may have lines
            text = f"start: called | answer\n{text.replace('start:', 'called:', 1)}\nanswer: {exact}"
        return Structure(kind="lark", text=text)


def _special(tokenizer: Any, syntax: Syntax) -> dict[str, int]:
    """The ids of the markers of ``syntax`` that are special tokens. Encoding a text never gives such a token, and
    decoding one gives no text.
    """
    added = _added(tokenizer)
    return {marker: added[marker] for marker in syntax.markers if marker in added}


def _added(tokenizer: Any) -> dict[str, int]:
    known = getattr(tokenizer, "added_tokens_decoder", {})
    return {token.content: token_id for token_id, token in known.items() if token.special}


def silent_beside_calls(model: ModelDescription) -> frozenset[int]:
    """The special tokens that mark no call in the texts of a model. None if its chat template writes calls in no known
    format: any of them may mark one."""
    own = str(getattr(model.tokenizer, "response_template", None) or "").replace("\\", "")  # it may have expressions
    if model.preparer is None or not (own or find_format(model.preparer.template(tools=True))):
        return frozenset()
    marks = {mark for syntax in SYNTAXES.values() for mark in syntax.markers}
    return frozenset(token for text, token in _added(model.tokenizer).items() if text not in marks and text not in own)
