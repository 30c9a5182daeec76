"""The endpoints as values. `triolet.server.app` routes requests to them, and `triolet.server.openapi` describes them.

FastAPI can declare endpoints, too. But it would read a body before our limits are checked, and it does not suggest a
name for a mistyped member. So the server uses Starlette, and each endpoint is one line here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from attrs import frozen
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..schemas.chat import ChatAnswer, ChatChunk, ChatRequest
from ..schemas.completions import CompletionAnswer, CompletionRequest
from ..schemas.models import Health, Model, ModelList
from ..schemas.responses import InputTokens, ResponseAnswer, ResponseEvent, ResponsesRequest
from ..schemas.speech import (
    SpeechForm,
    TextDelta,
    TextDone,
    TranscriptionAnswer,
    TranscriptionForm,
    TranslationForm,
    VerboseAnswer,
)
from ..schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest, Version
from ..schemas.vectors import (
    ClassifyAnswer,
    ClassifyRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    RerankAnswer,
    RerankRequest,
)
from . import chat, completions, models, page, responses, speech, tokenize, vectors

JSON = "application/json"
EVENTS = "text/event-stream"


@frozen
class Endpoint:
    """One path and method.

    Args:
        path: the path of the address.
        tag: the group of endpoints in the OpenAPI document.
        handle: the function that answers; its docstring is the summary in OpenAPI.
        answers: the schemas of the answers by content type; an empty tuple stands for text.
        body: the schema of the JSON body, or of the members of the form beside the file. An endpoint without a body is
            a GET.
    """

    path: str
    tag: str
    handle: Callable[[Request], Awaitable[Response]]
    answers: Mapping[str, tuple[type[BaseModel], ...]]
    body: type[BaseModel] | None = None

    @property
    def method(self) -> str:
        """The HTTP method."""
        return "GET" if self.body is None else "POST"

    @property
    def is_form(self) -> bool:
        """True if the body is a form with a file."""
        return self.body is not None and issubclass(self.body, SpeechForm)


_SPOKEN = {
    JSON: (TranscriptionAnswer, VerboseAnswer),
    "text/plain": (),
    "application/x-subrip": (),
    "text/vtt": (),
}
_LIVE = {**_SPOKEN, EVENTS: (TextDelta, TextDone)}
_CHAT: Mapping[str, tuple[type[BaseModel], ...]] = {JSON: (ChatAnswer,), EVENTS: (ChatChunk,)}
_RESPONSE: Mapping[str, tuple[type[BaseModel], ...]] = {JSON: (ResponseAnswer,), EVENTS: (ResponseEvent,)}
_COMPLETION = {JSON: (CompletionAnswer,), EVENTS: (CompletionAnswer,)}

ENDPOINTS = (
    Endpoint("/v1/audio/transcriptions", "speech", speech.transcribe, _LIVE, TranscriptionForm),
    Endpoint("/v1/audio/translations", "speech", speech.translate, _SPOKEN, TranslationForm),
    Endpoint("/v1/chat/completions", "text", chat.converse, _CHAT, ChatRequest),
    Endpoint("/v1/responses", "text", responses.respond, _RESPONSE, ResponsesRequest),
    Endpoint("/v1/responses/input_tokens", "text", responses.count, {JSON: (InputTokens,)}, ResponsesRequest),
    Endpoint("/v1/completions", "text", completions.complete, _COMPLETION, CompletionRequest),
    Endpoint("/tokenize", "text", tokenize.tokenize, {JSON: (TokenizeAnswer,)}, TokenizeRequest),
    Endpoint("/detokenize", "text", tokenize.detokenize, {JSON: (DetokenizeAnswer,)}, DetokenizeRequest),
    Endpoint("/v1/embeddings", "vectors", vectors.embed, {JSON: (EmbeddingAnswer,)}, EmbeddingRequest),
    Endpoint("/v1/rerank", "vectors", vectors.rerank, {JSON: (RerankAnswer,)}, RerankRequest),
    Endpoint("/v2/rerank", "vectors", vectors.rerank_by_cohere, {JSON: (RerankAnswer,)}, RerankRequest),
    Endpoint("/v1/classify", "vectors", vectors.classify, {JSON: (ClassifyAnswer,)}, ClassifyRequest),
    Endpoint("/v1/models", "server", models.list_models, {JSON: (ModelList,)}),
    Endpoint("/v1/models/{model:path}", "server", models.show_model, {JSON: (Model,)}),
    Endpoint("/version", "server", tokenize.show_version, {JSON: (Version,)}),
    Endpoint("/metrics", "server", models.metrics, {"text/plain": ()}),
    Endpoint("/health", "server", models.health, {JSON: (Health,)}),
    Endpoint("/", "server", page.show_page, {"text/html": ()}),
    Endpoint("/events", "server", page.watch, {EVENTS: ()}),
)
