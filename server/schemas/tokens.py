"""Tokens of texts: ``/tokenize`` and ``/detokenize``, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from . import chat
from .base import AnswerBody, Body, Name, Text, up_to


class TokenizeRequest(Body):
    """A prompt, or a conversation with its tools."""

    model: Name | None = Field(default=None, description="By default the only one that is served.")
    prompt: Text | None = None
    messages: Annotated[list[chat.ChatMessage], up_to(chat.MOST_MESSAGES, 1)] | None = None
    tools: Annotated[list[chat.Tool], up_to(chat.MOST_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="Given to the chat template.")
    add_special_tokens: bool | None = Field(
        default=None, description="False: no special tokens around the prompt. A chat template writes its own."
    )
    return_token_strs: bool | None = Field(default=None, description="The answer has each token as a text, too.")
    add_generation_prompt: bool | None = Field(default=None, description="Default: true; a turn of the model begins.")
    continue_final_message: bool | None = Field(default=None, description="The text ends within the last message.")

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give one of prompt and messages, not both")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError(
                "add_special_tokens is given with messages, whose template writes special tokens; leave it out"
            )
        return self

    def check_size(self) -> None:
        if self.messages is not None:
            self.as_chat(model="unnamed").check_size()

    def as_chat(self, *, model: str) -> chat.ChatRequest:
        """Returns the request as a conversation for ``model``."""
        return chat.ChatRequest(
            model=model,
            messages=self.messages or [],
            tools=self.tools,
            chat_template_kwargs=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class TokenizeAnswer(AnswerBody):
    """The tokens, as the model reads them: with those that its tokenizer, its chat template and images add."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body):
    """Tokens of a model."""

    model: Name | None = Field(default=None, description="By default the only one that is served.")
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], up_to(262_144)]


class DetokenizeAnswer(AnswerBody):
    """The text of tokens."""

    prompt: str


class Version(AnswerBody):
    """The version of the server."""

    version: str
