"""Tokens of texts: ``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from . import chat
from .base import Answer, Body, Name, Text, up_to


class TokenizeRequest(Body):
    """A prompt, or a conversation with its tools."""

    model: Name
    prompt: Text | None = None
    messages: Annotated[list[chat.ChatMessage], up_to(chat.MOST_MESSAGES, 1)] | None = None
    tools: Annotated[list[chat.Tool], up_to(chat.MOST_TOOLS)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="Given to the chat template.")] = None

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt and messages; give one of them")
        return self

    def check_size(self) -> None:
        if self.messages is not None:
            self.as_chat().check_size()

    def as_chat(self) -> chat.ChatRequest:
        """Returns the request as a conversation."""
        return chat.ChatRequest(
            model=self.model,
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class TokenizeAnswer(Answer):
    """The tokens, as the model reads them: with those that its tokenizer, its chat template and images add."""

    count: int
    max_model_len: int
    tokens: list[int]


class DetokenizeRequest(Body):
    """Tokens of a model."""

    model: Name
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], up_to(262_144)]


class DetokenizeAnswer(Answer):
    """The text of tokens."""

    prompt: str


class Version(Answer):
    """The version of the server."""

    version: str
