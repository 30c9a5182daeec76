"""The tools of a conversation: their form for the engine, and the tool calls in the engine's text, in the form of
answers."""

from __future__ import annotations

import secrets
import string
from typing import Any

from attrs import define, field, frozen

from ...api.tools.formats import ToolFormat
from ...api.tools.reader import ToolReader
from ...api.tools.syntax import ArgumentsPiece, CallBegin, ContentPiece, ToolPart
from ...core.model import ModelDescription
from ...core.request import Structure
from ...core.tools import Tool, read_tools
from ..problems import BadBody
from ..schemas import chat
from .sampling import structure_of

_LETTERS = string.ascii_letters + string.digits


@frozen
class Tools:
    """The tools that one request may call."""

    format: ToolFormat
    given: tuple[Tool, ...]  # parsed once, since the reader of each answer needs them
    allowed: tuple[Tool, ...]  # those of them that may be called
    choice: str
    parallel: bool
    told: dict[str, Any]  # the request's line in the access log
    answer: Structure | None = None  # the form of an answer without a call

    @classmethod
    def of(
        cls, body: chat.ChatRequest, model: ModelDescription, name: str | None, told: dict[str, Any]
    ) -> Tools | None:
        """Returns the tools of ``body``; ``None``: there are no tools, or none may be called. ``name``: the tool format
        from the settings of the server. ``told`` gets the number of calls that could not be read.

        Raises:
            InvalidRequest: the checkpoint's template writes calls in no known format.
            BadBody: the body also wants an answer in a form that leaves no room for tool calls.
        """
        if not body.tools or body.tool_choice == "none":
            return None
        if body.structures:
            named = next(iter(body.structures))
            raise BadBody(
                f"{named} and tools are both given; give one of them, {body.form}, or tool_choice none", named
            )
        given = read_tools([tool.model_dump(exclude_none=True) for tool in body.tools])
        choice, allowed, wanted = "auto", given, body.tool_choice
        if isinstance(wanted, chat.NamedTool):
            choice = wanted.function.name
        elif isinstance(wanted, chat.AllowedChoice):
            names = {one.function.name for one in wanted.allowed_tools.tools}
            choice, allowed = wanted.allowed_tools.mode, tuple(tool for tool in given if tool.name in names)
        elif wanted is not None:
            choice = wanted
        answer = structure_of(body, body.response_format) if choice == "auto" else None
        parallel = body.parallel_tool_calls is not False
        return cls(ToolFormat.of(model, name), given, allowed, choice, parallel, told, answer)

    def structure(self) -> Structure | None:
        """Returns the structure that the output must have; ``None``: any text."""
        parallel = self.parallel and self.choice in ("required", "auto")
        return self.format.structure(self.allowed, self.choice, parallel=parallel, answer=self.answer)

    def message(self, text: str) -> chat.AnswerMessage:
        """Returns the message of a whole answer: the sum of its deltas."""
        content, calls = list[str](), list[chat.AnsweredCall]()
        for delta in self.reader().feed(text, last=True):
            content += [delta.content] if delta.content is not None else []
            for call in delta.tool_calls or ():
                assert call.function is not None, "a delta of a call has more of its function"
                if call.id is not None:
                    function = chat.CalledFunction(name=call.function.name or "", arguments="")
                    calls.append(chat.AnsweredCall(id=call.id, type="function", function=function))
                calls[-1].function.arguments += call.function.arguments or ""
        whole = "".join(content) if content or not calls else None
        more: dict[str, Any] = {"tool_calls": calls} if calls else {}
        return chat.AnswerMessage(role="assistant", content=whole, refusal=None, **more)

    def reader(self) -> CallReader:
        """Returns a reader of one answer, piece by piece."""
        return CallReader(self.format.reader(self.allowed), self.parallel, self.told)


@define(eq=False)
class CallReader:
    """Turns the text of one answer into the deltas of its stream. ``called``: the answer has a tool call."""

    _reader: ToolReader
    _parallel: bool
    _told: dict[str, Any]
    called: bool = field(default=False, init=False)

    def feed(self, text: str, *, last: bool) -> list[chat.MessageDelta]:
        """Returns what ``text`` adds to the message. Where the client wants one call, those after it are left out: an
        empty delta stands for what was there."""
        parts = [*self._reader.feed(text), *(self._reader.end() if last else ())]
        if last:
            dropped = 0 if self._parallel else max(self._reader.calls - 1, 0)
            for name, count in (("unread_calls", self._reader.unread), ("dropped_calls", dropped)):
                if count:
                    self._told[name] = self._told.get(name, 0) + count  # of all answers
        return [self._delta(part) for part in parts]

    def _delta(self, part: ToolPart) -> chat.MessageDelta:
        match part:
            case ContentPiece(text):
                return chat.MessageDelta(content=text)
            case CallBegin(index) | ArgumentsPiece(index) if index and not self._parallel:
                return chat.MessageDelta()
            case CallBegin(index, name):
                self.called = True
                begun = chat.FunctionDelta(name=name, arguments="")
                call = chat.CallDelta(index=index, id=_new_id(), type="function", function=begun)
            case ArgumentsPiece(index, text):
                call = chat.CallDelta(index=index, function=chat.FunctionDelta(arguments=text))
        return chat.MessageDelta(tool_calls=[call])


def _new_id() -> str:
    """Returns a new id of nine letters and digits, which Mistral's templates require."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))
