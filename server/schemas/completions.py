"""Prompts: ``/v1/completions``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from .base import AnswerBody, SamplingBody, Text, Usage, check_length, up_to
from .chat import ResponseFormat
from .weighing import MOST_VALUES

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=2**31)]], up_to(MOST_VALUES, 1)
]  # as many as a body may have values


_MOST_ANSWERS = 256  # each is a request of the engine's


class CompletionRequest(SamplingBody):
    """Text, or tokens, that the model goes on with."""

    prompt: Text | Annotated[list[Text], up_to(2_048, 1)] | TokenIds | Annotated[list[TokenIds], up_to(2_048, 1)]
    max_tokens: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Default: 16. 0, with echo and logprobs, scores the prompt."
    )
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool | None = Field(default=None, description="Begin the answer with the prompt.")
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = Field(default=None, description="The answer has the tokens, too.")
    best_of: None = Field(default=None, description="Accepted only as null: use n.")
    suffix: None = Field(default=None, description="Accepted only as null.")

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if len(self.prompts()) * (self.n or 1) > _MOST_ANSWERS:
            raise ValueError(
                f"{len(self.prompts())} prompts with n={self.n or 1} make too many answers; allowed: {_MOST_ANSWERS}"
            )
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} with max_tokens=0; allowed: min_tokens=0")
        return self

    def check_size(self) -> None:
        """Checks the size of all prompts together."""
        check_length("prompts", sum(map(len, self.prompts())))

    @property
    def scores(self) -> bool:
        """True if the client wants the log-probabilities of the prompt's tokens."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """Returns each prompt of the request."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        tokens = [one for one in prompt if isinstance(one, int)]
        return [tokens] if tokens else [one for one in prompt if not isinstance(one, int)]


class CompletionLogprobs(AnswerBody):
    """The tokens of an answer with their natural log-probabilities; ``null`` for the first token of a prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(AnswerBody):
    """One of the answers, or more of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionAnswer(AnswerBody):
    """The answer of ``/v1/completions``, whole or as one event."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
