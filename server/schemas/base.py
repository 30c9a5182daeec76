"""The parts that all bodies share."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ...core.errors import RequestTooLarge

Name = Annotated[str, Field(min_length=1, max_length=512)]
Short = Annotated[str, Field(max_length=64)]
Text = Annotated[str, Field(max_length=4_000_000)]
MOST_TEXT = 8_000_000  # characters of all texts of one request
Share = Annotated[float, Field(ge=0.0, le=1.0)]
_Stop = Annotated[str, Field(min_length=1, max_length=1_024)]
_TopK = Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 and -1 are off."), AfterValidator(partial(max, 0))]
_TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]


_DETECTED = frozenset({"", "auto", "none", "null", "undefined"})


def _spoken(name: Any) -> Any:
    return None if isinstance(name, str) and name.strip().lower() in _DETECTED else name


Language = Annotated[Short | None, BeforeValidator(_spoken)]
"""A language that is spoken. Clients send some texts in place of none."""


def up_to(most: int, least: int = 0) -> Any:
    """Returns the bounds of a list. Only the first wrong item is reported, since there might be a million of them."""
    return Field(min_length=least, max_length=most, fail_fast=True)


def unused(why: str = "") -> Any:
    """Returns the default of a member that is accepted and changes nothing, and its description."""
    return Field(default=None, description=f"Accepted and not used: {why}." if why else "Accepted and not used.")


def only(allowed: object, why: str) -> BeforeValidator:
    """Returns a check for a member that is ``allowed`` or null, and refused otherwise with the reason ``why``."""

    def check(value: Any) -> Any:
        if value is not None and value is not allowed:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


def check_length(texts: str, length: int) -> None:
    """Raises `RequestTooLarge` if ``texts``, the name of some texts of one request, have more than `MOST_TEXT`
    characters together."""
    if length > MOST_TEXT:
        raise RequestTooLarge(f"{texts} have {length:,} characters together; allowed: up to {MOST_TEXT:,}")


class _Unread:
    """A member whose value is replaced by ``None``. pydantic still parses the value; `Weighing` bounds the cost of
    that."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {}


Unread = Annotated[None, _Unread()]


class Body(BaseModel):
    """A request's body: members that are not listed are refused."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    def check_size(self) -> None:
        """Raises `RequestTooLarge` for sizes that `Weighing` cannot know. It is not a validator, since pydantic would
        keep the input of a fault, and the text of the error would need the body once more."""


class AnswerBody(BaseModel):
    """A part of an answer. Members that are not set are left out."""


class ErrorObject(AnswerBody):
    """The error that a request got in place of an answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(AnswerBody):
    """The answer to a request that failed."""

    error: ErrorObject


class Ignored(Body):
    """Members of OpenAI's API that are accepted and change nothing here."""

    user: Unread = unused()
    metadata: Unread = unused()
    store: bool | None = unused("nothing is stored")
    service_tier: Literal["auto", "default"] | None = unused()
    safety_identifier: Unread = unused()
    prompt_cache_key: Unread = unused("all prompts are shared")


class Marked(Body):
    """A part of a conversation, which clients of other programs mark for a cache."""

    cache_control: Unread = unused("all prompts are shared")


class StreamOptions(Body):
    """``stream_options`` of a request."""

    include_usage: bool | None = Field(default=None, description="Send a last event with the usage.")
    continuous_usage_stats: bool | None = Field(
        default=None, description="With include_usage: each event has the usage so far."
    )
    include_obfuscation: bool | None = unused()


class StructuredOutputs(Body):
    """The form of the whole text, by vLLM's names: one of them."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    json_: Text | dict[str, Any] | None = Field(default=None, alias="json", description="A JSON schema.")
    regex: Text | None = None
    choice: Annotated[list[Text], up_to(1_024, 1)] | None = None
    grammar: Text | None = Field(default=None, description="In llguidance's dialect of Lark.")
    json_object: bool | None = None


class SamplingBody(Ignored):
    """A request for text: its model, its stream, and how tokens are sampled, by OpenAI's names and vLLM's for the
    rest."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(default=None, ge=0.0, le=2.0, description="0 is greedy. Default: 1.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    n: int | None = Field(default=None, ge=1, le=128)
    stop: _Stop | Annotated[list[_Stop], up_to(64)] | None = None
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    logit_bias: dict[_TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        default=None, max_length=1_024, description="Numbers to add to the logits, by token id."
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="Default: a fresh seed.")
    top_k: _TopK | None = None
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(default=None, ge=0.001, le=1_000.0)
    min_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(default=None, description="Default: true, but for marks of calls.")
    include_stop_str_in_output: bool | None = Field(default=None, description="The text ends with its stop string.")
    structured_outputs: StructuredOutputs | None = None
    guided_json: Text | dict[str, Any] | None = Field(default=None, description="As json in structured_outputs.")
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], up_to(1_024)] | None = None
    priority: int | None = Field(default=None, ge=-100, le=100, description="Smaller numbers run first.")

    _form: str = "response_format"

    @property
    def form(self) -> str:
        """The member with the form of a text, as the client has sent it."""
        return self._form

    @property
    def structures(self) -> dict[str, Any]:
        """The forms of the text that the client wants, by the members that say so."""
        given = {} if self.structured_outputs is None else self.structured_outputs.model_dump(by_alias=True)
        wanted = {"guided_json": self.guided_json, **{f"structured_outputs.{name}": one for name, one in given.items()}}
        return {name: value for name, value in wanted.items() if value not in (None, False)}

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true")
        return self


class OutputDetails(AnswerBody):
    """Tokens of the answers, by kind: those before an answer, marks included."""

    reasoning_tokens: int


class Usage(AnswerBody):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: OutputDetails | None = None
