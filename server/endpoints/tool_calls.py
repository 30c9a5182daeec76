"""The tools of a conversation: their form for the engine, and the tool calls in the engine's text, in the form of
answers."""

from __future__ import annotations

import secrets
import string

from attrs import define, field, frozen

from ...api.tools.formats import ToolFormat
from ...api.tools.reader import ToolReader
from ...api.tools.syntax import ArgumentsPiece, CallBegin, ContentPiece, ToolPart
from ...core.model import ModelDescription
from ...core.request import Structure
from ...core.tools import Tool, read_tools
from ..problems import BadBody
from ..schemas import chat

_LETTERS = string.ascii_letters + string.digits


@frozen
class Tools:
    """The tools that one request may call."""

    format: ToolFormat
    given: tuple[Tool, ...]  # parsed once, since the reader of each answer needs them
    choice: str
    parallel: bool

    @classmethod
    def of(cls, body: chat.ChatRequest, model: ModelDescription, name: str | None) -> Tools | None:
        """Returns the tools of ``body``; ``None``: there are no tools, or none may be called. ``name``: the tool format
        from the settings of the server.

        Raises:
            InvalidRequest: the checkpoint's template writes calls in no known format.
            BadBody: the body also has a response format, which leaves no room for tool calls.
        """
        if not body.tools or body.tool_choice == "none":
            return None
        if body.response_format is not None and body.response_format.type != "text":
            raise BadBody(
                "response_format and tools are both given; give one of them, or tool_choice none", "response_format"
            )
        given = read_tools([tool.model_dump(exclude_none=True) for tool in body.tools])
        choice = body.tool_choice or "auto"
        named = choice.function.name if isinstance(choice, chat.NamedTool) else choice
        return cls(ToolFormat.of(model, name), given, named, body.parallel_tool_calls is not False)

    def structure(self) -> Structure | None:
        """Returns the structure that the output must have; ``None``: any text."""
        parallel = self.parallel and self.choice == "required"
        return self.format.structure(self.given, self.choice, parallel=parallel)

    def message(self, text: str) -> chat.AnswerMessage:
        """Returns the message of a whole answer."""
        content, calls = self.format.parse(text, self.given)
        message = chat.AnswerMessage(role="assistant", content=content, refusal=None)
        if calls:
            functions = [chat.CalledFunction(name=call.name, arguments=call.arguments) for call in calls]
            message.tool_calls = [chat.AnsweredCall(id=_new_id(), type="function", function=one) for one in functions]
        return message

    def reader(self) -> CallReader:
        """Returns a reader of one answer, piece by piece."""
        return CallReader(self.format.reader(self.given))


@define(eq=False)
class CallReader:
    """Turns the text of one answer into the deltas of its stream. ``called``: the answer has a tool call."""

    _reader: ToolReader
    called: bool = field(default=False, init=False)

    def feed(self, text: str, *, last: bool) -> list[chat.MessageDelta]:
        """Returns what ``text`` adds to the message."""
        parts = [*self._reader.feed(text), *(self._reader.end() if last else ())]
        return [self._delta(part) for part in parts]

    def _delta(self, part: ToolPart) -> chat.MessageDelta:
        match part:
            case ContentPiece(text):
                return chat.MessageDelta(content=text)
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
