"""Conversations: ``/v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import to_json

from .base import AnswerBody, Body, Marked, Name, SamplingBody, Text, Unread, Usage, check_length, unused, up_to
from .weighing import check_object, check_texts

MOST_MESSAGES = 4_096
MOST_PARTS = 2_048  # of one message
MOST_TOOLS = 128  # OpenAI's
MOST_SCHEMA = 5_000  # values of the schema of an answer
MOST_CHARACTERS = 1_000_000  # of it, and of each of these
_MOST_VALUES = {"tools": 20_000, "chat_template_kwargs": 20_000}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_READ_BY_THE_CLIENT = "OpenAI's client adds it to an answer that it sends back"


class TextPart(Marked):
    """A part of a message: text."""

    type: Literal["text"]
    text: Text


class RefusalPart(Marked):
    """A part of a message of the assistant: the words in which it has refused."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        """The words."""
        return self.refusal


class ThinkingPart(Marked):
    """A part of a message of the assistant: its reasoning, which goes to the chat template as ``reasoning_content``."""

    model_config = ConfigDict(extra="ignore")  # a signature

    type: Literal["thinking"]
    thinking: Text | Annotated[list[TextPart], up_to(MOST_PARTS)]

    @property
    def text(self) -> str:
        """The reasoning."""
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


class ImageUrl(Body):
    """The place of an image: ``data:image/...;base64,...``, or an address that the server allows."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "low", "high"] | None = unused()


class ImagePart(Marked):
    """A part of a message: an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Body):
    """Audio in base64, in any format that FFmpeg reads."""

    data: str = Field(min_length=1)
    format: str | None = Field(
        default=None, max_length=32, description="Accepted and not used: the data show the format."
    )


class AudioPart(Marked):
    """A part of a message: audio."""

    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrl(Body):
    """The place of audio: ``data:...``, or an address that the server allows."""

    url: str = Field(min_length=1)


class AudioUrlPart(Marked):
    """A part of a message: audio that lies elsewhere."""

    type: Literal["audio_url"]
    audio_url: AudioUrl


SpokenPart = TextPart | RefusalPart | ThinkingPart
ContentPart = Annotated[SpokenPart | ImagePart | AudioPart | AudioUrlPart, Field(discriminator="type")]


def _as_text(arguments: Any) -> Any:
    """Returns the text of arguments that a client has as an object, or has not at all."""
    return "" if arguments is None else arguments if isinstance(arguments, str) else to_json(arguments).decode()


Arguments = Annotated[
    Text, BeforeValidator(_as_text), Field(description="JSON in a text; an object and null are taken, too.")
]


def check_content(role: str, content: object) -> None:
    """Raises `ValueError` if a message has no content, but for those that models and functions write."""
    if content is None and role not in ("assistant", "tool"):
        raise ValueError(f"a message with the role {role} has no content; give a text")


class FunctionCall(Body):
    """The function that an assistant has called, and its arguments as JSON in a text."""

    name: Name
    arguments: Arguments = ""
    parsed_arguments: Unread = unused("clients add their parsed arguments")


class ToolCall(Body):
    """One call of a tool, in a message of the assistant."""

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = unused()


class ChatMessage(Marked):
    """One message of the conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[ContentPart], up_to(MOST_PARTS)] | None = None
    name: Name | None = Field(default=None, description="Given to the chat template.")
    tool_calls: Annotated[list[ToolCall], up_to(MOST_TOOLS)] | None = None
    tool_call_id: Name | None = None
    reasoning_content: Text | None = Field(default=None, description="Given to the chat template.")
    reasoning: Text | None = Field(default=None, description="Another name of reasoning_content.")
    reasoning_details: Unread = unused("a member of OpenRouter's")
    refusal: Text | None = Field(default=None, description="Stands for a content that is missing.")
    id: Unread = unused(_READ_BY_THE_CLIENT)
    parsed: Unread = unused(_READ_BY_THE_CLIENT)
    provider_specific_fields: Unread = unused("a member of LiteLLM's")
    annotations: Unread = unused()
    audio: None = unused()
    function_call: None = unused()

    @property
    def length(self) -> int:
        """The number of characters in the texts of the message."""
        parts = self.content if isinstance(self.content, list) else [self.content or ""]
        texts = [part if isinstance(part, str) else getattr(part, "text", "") for part in parts]
        texts += [call.function.arguments for call in self.tool_calls or ()]
        texts += [self.reasoning_content or "", self.reasoning or "", self.refusal or ""]
        return sum(map(len, texts))

    @model_validator(mode="after")
    def _fits_together(self) -> ChatMessage:
        check_content(self.role, self.content)
        thoughts = [one for one in (self.reasoning_content, self.reasoning) if one]
        if len({*thoughts}) > 1:
            raise ValueError("reasoning_content and reasoning differ; give one of them")
        parts = self.content if isinstance(self.content, list) else ()
        if self.role != "assistant" and (thoughts or any(isinstance(part, ThinkingPart) for part in parts)):
            raise ValueError(f"a message with the role {self.role} has reasoning; allowed: in the assistant's messages")
        return self


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")
    description: Text | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="A JSON schema.")
    strict: bool | None = None


class Tool(Marked):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of one function."""

    name: Name


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools of the request that may be called, or of which one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], up_to(MOST_TOOLS, 1)]


class AllowedChoice(Body):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


def check_choice(choice: object, tools: list[str]) -> None:
    """Raises `ValueError` if ``choice``, a ``tool_choice``, does not fit ``tools``, their names."""
    named: list[str] = []
    if isinstance(choice, NamedTool):
        named = [choice.function.name]
    elif isinstance(choice, AllowedChoice):
        named = [one.function.name for one in choice.allowed_tools.tools]
    elif choice != "required":
        return
    if not tools:
        raise ValueError("tool_choice is given without tools; give both, or neither")
    if unknown := [name for name in named if name not in tools]:
        raise ValueError(f"tool_choice names {unknown[0]!r}, which is not one of the tools")


class TextFormat(Body):
    """Text, without a structure."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """A JSON object."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    type: Literal["json_object"]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema", description="As llama.cpp and others have it.")


class NamedSchema(Body):
    """A JSON schema with its name."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = Field(min_length=1, max_length=64)
    description: Text | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", default_factory=dict)]
    strict: bool | None = Field(default=None, description="The schema is always followed.")


class JsonSchemaFormat(Body):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def schema_of(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    """Returns the schema of an answer in this form; ``None``: it may be any text."""
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_
    return (wanted.schema_ or {"type": "object"}) if isinstance(wanted, JsonObjectFormat) else None


class TalkBody(SamplingBody):
    """The parameters that the bodies of all conversations have."""

    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Given to the chat template, as vLLM does."
    )
    max_reasoning_tokens: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Then the answer must begin."
    )


class ChatRequest(TalkBody):
    """A conversation that the model goes on with."""

    messages: Annotated[list[ChatMessage], up_to(MOST_MESSAGES, 1)]
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], up_to(MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    add_generation_prompt: bool | None = Field(default=None, description="Default: true; a turn of the model begins.")
    continue_final_message: bool | None = Field(default=None, description="The answer goes on with the last message.")
    return_token_ids: bool | None = Field(default=None, description="The answer has the tokens, too.")
    modalities: Annotated[list[Literal["text"]], up_to(8)] | None = None
    reasoning_effort: Effort | None = Field(default=None, description="Told to the chat template, or a budget.")
    verbosity: Unread = unused()
    prediction: Unread = unused("draft tokens come from the text itself")

    _places: tuple[str, ...] = ()  # of the messages' contents, if the client sent them in another form

    def place_of(self, index: int) -> str:
        """Returns the place of a message's content in what the client has sent."""
        return self._places[index] if self._places else f"messages.{index}.content"

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message and add_generation_prompt are both true; set one of them")
        check_choice(self.tool_choice, [tool.function.name for tool in self.tools or ()])
        return self

    def check_size(self) -> None:
        """Checks the size of members that are joined, become objects a second time, or are read more than once."""
        kind, calls_kind = ("the input", "function calls") if self._places else ("messages", "tool_calls")
        check_length(kind, sum(message.length for message in self.messages))
        calls = (call for message in self.messages for call in message.tool_calls or ())
        check_texts(f"the arguments of all {calls_kind}", (call.function.arguments for call in calls))
        tools = [[tool.function.description or "", tool.function.parameters] for tool in self.tools or ()]
        given = {"tools": tools, "chat_template_kwargs": self.chat_template_kwargs or {}}
        given[self.form] = schema_of(self.response_format) or {}
        for name, found in given.items():
            check_object(name, found, _MOST_VALUES.get(name, MOST_SCHEMA), MOST_CHARACTERS)


class TopLogprob(AnswerBody):
    """A token that was likely at its place. ``bytes`` are ``null`` where the token is a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer, and those that were likely at its place."""

    top_logprobs: list[TopLogprob]


class Logprobs(AnswerBody):
    """The tokens of an answer with their natural log-probabilities."""

    content: list[TokenLogprob] | None
    refusal: None = None


class CalledFunction(AnswerBody):
    """The function that the model calls, and its arguments as JSON in a text."""

    name: str
    arguments: str


class AnsweredCall(AnswerBody):
    """A call of a tool that the model wants."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AnswerMessage(AnswerBody):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredCall] | None = None
    reasoning_content: str | None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(AnswerBody):
    """One of the answers."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None


class ChatAnswer(AnswerBody):
    """The answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(AnswerBody):
    """More of a function's call."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(AnswerBody):
    """More of a tool's call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class MessageDelta(AnswerBody):
    """More of the message of the model."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CallDelta] | None = None
    reasoning_content: str | None = None


class ChunkChoice(AnswerBody):
    """More of one of the answers."""

    index: int
    delta: MessageDelta
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | None = None


class ChatChunk(AnswerBody):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
