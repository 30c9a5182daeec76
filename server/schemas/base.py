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


def up_to(most: int, least: int = 0) -> Any:
    """Returns the bounds of a list. Only the first wrong item is reported, since there might be a million of them."""
    return Field(min_length=least, max_length=most, fail_fast=True)


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


class Answer(BaseModel):
    """A part of an answer. Members that are not set are left out."""


class ErrorObject(Answer):
    """The error that a request got in place of an answer."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    """The answer to a request that failed."""

    error: ErrorObject


class Ignored(Body):
    """Members of OpenAI's API that are accepted and change nothing here."""

    user: Annotated[Unread, Field(description="Accepted and not used.")] = None
    metadata: Annotated[Unread, Field(description="Accepted and not used.")] = None
    store: Annotated[bool | None, Field(description="Accepted and not used: nothing is stored.")] = None
    service_tier: Annotated[Literal["auto", "default"] | None, Field(description="Accepted and not used.")] = None
    safety_identifier: Annotated[Unread, Field(description="Accepted and not used.")] = None
    prompt_cache_key: Annotated[Unread, Field(description="Accepted and not used: all prompts are shared.")] = None


class StreamOptions(Body):
    """``stream_options`` of a request."""

    include_usage: Annotated[bool | None, Field(description="Send a last event with the usage.")] = None
    include_obfuscation: Annotated[bool | None, Field(description="Accepted and not used.")] = None


class SamplingBody(Ignored):
    """A request for text: its model, its stream, and how tokens are sampled, by OpenAI's names and vLLM's for the
    rest."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float | None, Field(ge=0.0, le=2.0, description="0 is greedy. Default: 1.")] = None
    top_p: Annotated[float | None, Field(gt=0.0, le=1.0)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stop: (
        Annotated[str, Field(min_length=1, max_length=1_024)]
        | Annotated[list[Annotated[str, Field(min_length=1, max_length=1_024)]], up_to(64)]
        | None
    ) = None
    presence_penalty: Annotated[float | None, Field(ge=-2.0, le=2.0)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2.0, le=2.0)] = None
    logit_bias: Annotated[
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100.0, le=100.0)]],
            Field(max_length=1_024),
        ]
        | None,
        Field(description="Numbers to add to the logits, by token id."),
    ] = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63, description="Default: a fresh seed.")] = None
    top_k: (
        Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 and -1 are off."), AfterValidator(partial(max, 0))]
        | None
    ) = None
    min_p: Annotated[float | None, Field(ge=0.0, le=1.0)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.001, le=1_000.0)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    ignore_eos: bool | None = None
    skip_special_tokens: Annotated[bool | None, Field(description="Default: true, but false with tools.")] = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], up_to(1_024)] | None = None
    priority: Annotated[int | None, Field(ge=-100, le=100, description="Smaller numbers run first.")] = None

    @model_validator(mode="after")
    def _streams(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true")
        return self


class Usage(Answer):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
