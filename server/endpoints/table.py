"""The endpoints, as values: `triolet.server.app` routes by them, and `triolet.server.openapi` describes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from attrs import field, frozen
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..schemas import chat as chat_bodies
from ..schemas import completions as completion_bodies
from ..schemas import models as model_bodies
from ..schemas import speech as speech_bodies
from ..schemas import vectors as vector_bodies
from . import chat, completions, models, page, speech, vectors

JSON = "application/json"
EVENTS = "text/event-stream"


@frozen(kw_only=True)
class Endpoint:
    """One path and method.

    Args:
        handle: answers; its docstring is the summary.
        body: the JSON that it takes, or (``form``) the members of its form beside the file.
        answers: what it answers, by content type; ``None``: text.
    """

    path: str
    handle: Callable[[Request], Awaitable[Response]]
    method: str = "POST"
    body: type[BaseModel] | None = None
    form: bool = False
    answers: Mapping[str, tuple[type[BaseModel], ...] | None] = field(factory=dict)
    tag: str


ENDPOINTS = (
    Endpoint(
        path="/v1/audio/transcriptions",
        handle=speech.transcribe,
        body=speech_bodies.TranscriptionForm,
        form=True,
        answers={
            JSON: (speech_bodies.TranscriptionAnswer, speech_bodies.VerboseAnswer),
            EVENTS: (speech_bodies.TextDelta, speech_bodies.TextDone),
            "text/plain": None,
            "application/x-subrip": None,
            "text/vtt": None,
        },
        tag="speech",
    ),
    Endpoint(
        path="/v1/audio/translations",
        handle=speech.translate,
        body=speech_bodies.TranslationForm,
        form=True,
        answers={
            JSON: (speech_bodies.TranscriptionAnswer, speech_bodies.VerboseAnswer),
            "text/plain": None,
            "application/x-subrip": None,
            "text/vtt": None,
        },
        tag="speech",
    ),
    Endpoint(
        path="/v1/chat/completions",
        handle=chat.converse,
        body=chat_bodies.ChatRequest,
        answers={JSON: (chat_bodies.ChatAnswer,), EVENTS: (chat_bodies.ChatChunk,)},
        tag="text",
    ),
    Endpoint(
        path="/v1/completions",
        handle=completions.complete,
        body=completion_bodies.CompletionRequest,
        answers={JSON: (completion_bodies.CompletionAnswer,), EVENTS: (completion_bodies.CompletionAnswer,)},
        tag="text",
    ),
    Endpoint(
        path="/v1/embeddings",
        handle=vectors.embed,
        body=vector_bodies.EmbeddingRequest,
        answers={JSON: (vector_bodies.EmbeddingAnswer,)},
        tag="vectors",
    ),
    Endpoint(
        path="/v1/rerank",
        handle=vectors.rerank,
        body=vector_bodies.RerankRequest,
        answers={JSON: (vector_bodies.RerankAnswer,)},
        tag="vectors",
    ),
    Endpoint(
        path="/v2/rerank",
        handle=vectors.rerank_by_cohere,
        body=vector_bodies.RerankRequest,
        answers={JSON: (vector_bodies.RerankAnswer,)},
        tag="vectors",
    ),
    Endpoint(
        path="/v1/classify",
        handle=vectors.classify,
        body=vector_bodies.ClassifyRequest,
        answers={JSON: (vector_bodies.ClassifyAnswer,)},
        tag="vectors",
    ),
    Endpoint(
        path="/v1/models",
        handle=models.list_models,
        method="GET",
        answers={JSON: (model_bodies.ModelList,)},
        tag="server",
    ),
    Endpoint(
        path="/v1/models/{model:path}",
        handle=models.show_model,
        method="GET",
        answers={JSON: (model_bodies.Model,)},
        tag="server",
    ),
    Endpoint(
        path="/metrics",
        handle=models.metrics,
        method="GET",
        answers={"text/plain": None},
        tag="server",
    ),
    Endpoint(
        path="/health",
        handle=models.health,
        method="GET",
        answers={JSON: (model_bodies.Health,)},
        tag="server",
    ),
    Endpoint(path="/", handle=page.show_page, method="GET", answers={"text/html": None}, tag="server"),
    Endpoint(path="/events", handle=page.watch, method="GET", answers={EVENTS: None}, tag="server"),
)
