"""Responses: ``/v1/responses``. A request is a conversation in another form, and is turned into a `ChatRequest`."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from . import chat
from .base import AnswerBody, Body, Name, OutputDetails, Text, Unread, only, unused, up_to

_READ_BY_THE_CLIENT = "a member of answers, which clients send back"
_NOTHING_IS_STORED = "nothing is stored; leave it out, and send the whole conversation as input"
_STAYS = "nothing is stored, so a response ends with its connection; leave it out"
_NO_PROMPTS = "no prompts are stored; send their text as input"
_NO_FILES = "no files are stored; send the image as image_url"


class ReadBack(Body):
    """A part of an answer, which the client sends back in the next request."""

    id: Unread = unused(_READ_BY_THE_CLIENT)
    status: Unread = unused(_READ_BY_THE_CLIENT)


class InputText(Body):
    """Text of a message, or of the model's own answer."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: Unread = unused(_READ_BY_THE_CLIENT)
    logprobs: Unread = unused(_READ_BY_THE_CLIENT)
    parsed: Unread = unused(_READ_BY_THE_CLIENT)


class InputImage(Body):
    """An image: ``data:image/...;base64,...``, or an address that the server allows."""

    type: Literal["input_image"]
    image_url: str = Field(min_length=1)
    file_id: Annotated[None, only(None, _NO_FILES)] = Field(default=None, description=_NO_FILES)
    detail: Literal["auto", "low", "high"] | None = unused()


InputPart = Annotated[InputText | InputImage | chat.AudioPart, Field(discriminator="type")]


class InputMessage(ReadBack):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[InputPart], up_to(chat.MOST_PARTS)] | None = None
    phase: Unread = unused()

    @model_validator(mode="after")
    def _has_content(self) -> InputMessage:
        chat.check_content(self.role, self.content)
        return self


class InputCall(ReadBack):
    """A call of a function that the model has made."""

    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: chat.Arguments = ""
    parsed_arguments: Unread = unused(_READ_BY_THE_CLIENT)
    async_: None = unused(_READ_BY_THE_CLIENT)
    caller: None = unused(_READ_BY_THE_CLIENT)
    namespace: None = unused(_READ_BY_THE_CLIENT)


class InputCallOutput(ReadBack):
    """The result of a function that the model has called."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Text | Annotated[list[InputPart], up_to(chat.MOST_PARTS)] | None = None


class ReasoningText(AnswerBody):
    """Reasoning that the model has written."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """Reasoning, which goes to the chat template with the message of the assistant or the call that follows."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], up_to(chat.MOST_PARTS)] | None = None


class ItemReference(Body):
    """An item of an earlier answer, by its id. It is refused, since nothing is stored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["item_reference"]

    @model_validator(mode="before")
    @classmethod
    def _is_refused(cls, _: Any) -> Any:
        raise ValueError("this server stores no items; send the item itself, as OpenAI's clients do with store=false")


def _kind(item: Any) -> Any:
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


class FunctionTool(chat.Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(Body):
    """The function that must be called."""

    type: Literal["function"]
    name: Name


class SchemaFormat(chat.NamedSchema):
    """JSON that follows a schema."""

    type: Literal["json_schema"]


class AllowedFunctions(Body):
    """The functions of the request that may be called, or of which one must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], up_to(chat.MOST_TOOLS, 1)]


_Choice = Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")]


class TextOptions(Body):
    """The form of the text."""

    format: chat.TextFormat | chat.JsonObjectFormat | SchemaFormat | None = Field(default=None, discriminator="type")
    verbosity: Unread = unused()


class ReasoningOptions(Body):
    """The way in which the model reasons."""

    model_config = ConfigDict(extra="ignore")

    effort: chat.Effort | None = None


class ResponsesRequest(chat.TalkBody):
    """Items that the model goes on with."""

    input: Text | Annotated[list[InputItem], up_to(chat.MOST_MESSAGES, 1)]
    instructions: Text | None = Field(default=None, description="A system message before the input.")
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], up_to(chat.MOST_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        default=None, max_length=8
    )
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = Field(default=None, description="Longer input is refused.")
    background: Annotated[Literal[False] | None, only(False, _STAYS)] = Field(default=None, description=_STAYS)
    previous_response_id: Annotated[None, only(None, _NOTHING_IS_STORED)] = Field(
        default=None, description=_NOTHING_IS_STORED
    )
    conversation: Annotated[None, only(None, _NOTHING_IS_STORED)] = Field(default=None, description=_NOTHING_IS_STORED)
    prompt: Annotated[None, only(None, _NO_PROMPTS)] = Field(default=None, description=_NO_PROMPTS)
    max_tool_calls: Unread = unused("it limits OpenAI's own tools")
    prompt_cache_retention: Unread = unused()
    n: Literal[1] | None = Field(default=None, description="Only 1, since a response is one answer.")

    @model_validator(mode="after")
    def _fits_together(self) -> ResponsesRequest:
        chat.check_choice(self._choice, [tool.name for tool in self.tools or ()])
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            raise ValueError("continuous_usage_stats is true, but the last event alone has the usage; leave it out")
        items = [self.input] if isinstance(self.input, str) else self.input
        count = sum(not isinstance(item, InputReasoning) for item in items) + (self.instructions is not None)
        if not 1 <= count <= chat.MOST_MESSAGES:
            raise ValueError(
                f"input has {count:,} messages, including the instructions; allowed: 1 to {chat.MOST_MESSAGES:,}"
            )
        return self

    def check_size(self) -> None:
        self.as_chat.check_size()

    @property
    def wants_logprobs(self) -> bool:
        """True if the client wants the tokens with their log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())

    @property
    def _choice(self) -> Any:
        """The choice as conversations have it."""
        choice = self.tool_choice
        if isinstance(choice, NamedFunction):
            return _named(choice)
        if isinstance(choice, AllowedFunctions):
            allowed = chat.AllowedTools(mode=choice.mode, tools=[_named(one) for one in choice.tools])
            return chat.AllowedChoice(type="allowed_tools", allowed_tools=allowed)
        return choice

    @cached_property
    def as_chat(self) -> chat.ChatRequest:
        """Returns the request as a conversation."""
        given = {name: getattr(self, name) for name in chat.TalkBody.model_fields if getattr(self, name) is not None}
        tools = [
            chat.Tool(type="function", function=chat.Function(**one.model_dump(exclude={"type"})))
            for one in self.tools or ()
        ]
        messages, places = _messages(self.instructions, self.input)
        made = chat.ChatRequest(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            response_format=_format(self.text),
            tools=tools or None,
            tool_choice=self._choice,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            **given,
        )
        made._places, made._form = places, "text.format"
        return made


def _named(function: NamedFunction) -> chat.NamedTool:
    return chat.NamedTool(type="function", function=chat.FunctionName(name=function.name))


def _format(text: TextOptions | None) -> Any:
    if text is None or not isinstance(text.format, SchemaFormat):
        return None if text is None else text.format
    named = chat.NamedSchema(name=text.format.name, schema_=text.format.schema_)
    return chat.JsonSchemaFormat(type="json_schema", json_schema=named)


def _messages(instructions: str | None, given: str | list[Any]) -> tuple[list[chat.ChatMessage], tuple[str, ...]]:
    """Returns the messages of the conversation, and the place of each one's content in the request. A call that
    directly follows another call, or a text of the assistant, is joined with it into one message of the assistant."""
    messages: list[chat.ChatMessage] = []
    places: list[str] = []
    thoughts: list[str] = []  # of the items of reasoning before the item

    def add(place: str, **members: Any) -> None:
        thought = "\n".join(filter(None, thoughts))
        more: dict[str, Any] = {"reasoning_content": thought} if thought and members["role"] == "assistant" else {}
        messages.append(chat.ChatMessage(**members, **more))
        places.append(place)

    if instructions is not None:
        add("instructions", role="system", content=instructions)
    if isinstance(given, str):
        add("input", role="user", content=given)
        return messages, tuple(places)
    for index, item in enumerate(given):
        match item:
            case InputMessage():
                add(f"input.{index}.content", role=item.role, content=_content(item.content))
            case InputCallOutput():
                content = _content(item.output)
                add(f"input.{index}.output", role="tool", content=content, tool_call_id=item.call_id)
            case InputCall():
                function = chat.FunctionCall(name=item.name, arguments=item.arguments)
                call = chat.ToolCall(id=item.call_id, function=function)
                last = messages[-1] if messages and messages[-1].role == "assistant" else None
                if last is None or any(thoughts):
                    add(f"input.{index}", role="assistant", tool_calls=[call])
                else:
                    last.tool_calls = [*(last.tool_calls or ()), call]
        if isinstance(item, InputReasoning):
            thoughts.append("".join(part.text for part in item.content or ()))
        else:
            thoughts.clear()
    return messages, tuple(places)


def _content(content: str | list[Any] | None) -> str | list[Any]:
    return [_part(part) for part in content] if isinstance(content, list) else content or ""


def _part(part: InputText | InputImage | chat.AudioPart) -> chat.TextPart | chat.ImagePart | chat.AudioPart:
    if isinstance(part, InputImage):
        return chat.ImagePart(type="image_url", image_url=chat.ImageUrl(url=part.image_url))
    return chat.TextPart(type="text", text=part.text) if isinstance(part, InputText) else part


class OutputText(AnswerBody):
    """Text that the model has written."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[chat.TokenLogprob]


class OutputMessage(AnswerBody):
    """A message of the model."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputCall(AnswerBody):
    """A function that the model calls, and its arguments as JSON in a text."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputReasoning(AnswerBody):
    """Reasoning of the model, before its answer."""

    type: Literal["reasoning"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    summary: list[Any]
    content: list[ReasoningText]


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputDetails(AnswerBody):
    """Tokens of the prompt, by kind. Cached tokens are not counted apart."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(AnswerBody):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class InputTokens(AnswerBody):
    """The answer of ``/v1/responses/input_tokens``."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Incomplete(AnswerBody):
    """The reason for an incomplete response."""

    reason: Literal["max_output_tokens"]


class ResponseAnswer(AnswerBody):
    """The answer of ``/v1/responses``."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    temperature: float | None
    text: TextOptions
    tool_choice: _Choice
    tools: list[FunctionTool]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseEvent(AnswerBody):
    """One event of a stream. ``type`` says which members it has; the names are OpenAI's."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: OutputItem | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    logprobs: list[chat.TokenLogprob] | None = None
