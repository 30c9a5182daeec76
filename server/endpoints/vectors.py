"""``/v1/embeddings``, ``/v1/rerank`` and ``/v1/classify``."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import trio
from starlette.requests import Request
from starlette.responses import Response

from ...core.errors import EngineError, InvalidRequest
from ..body import read_json
from ..schemas import vectors as bodies
from .common import answered, engine_of, exchange_of, new_id

_OF_NUMBER = 32  # bytes of a vector's number, with those of its text in the answer


async def embed(request: Request) -> Response:
    """The vector of each text."""
    body = await read_json(request, bodies.EmbeddingRequest)
    texts, counts = body.texts(), list[int]()
    async with engine_of(request, body.model) as engine:
        vectors = await engine.inside.embed(texts, None, None, body.priority, **_told_of(request, counts))
    usage = _usage(request, counts)
    exchange_of(request).account.take(_OF_NUMBER * vectors.size)
    return await trio.to_thread.run_sync(_embedded, body, _shortened(vectors, body.dimensions), usage)


def _embedded(body: bodies.EmbeddingRequest, vectors: Any, usage: bodies.PromptUsage) -> Response:
    """Returns the answer. Its vectors are encoded one by one: encoding millions of numbers in one call would hold
    Python's lock for seconds."""
    _check_finite(vectors)
    frame = bodies.EmbeddingAnswer(object="list", model=body.model, data=[], usage=usage).model_dump_json()
    head, tail = frame.split('"data":[]')  # no text contains it: its quotation marks would be escaped
    items = []
    for index, vector in enumerate(vectors):
        in_base64 = body.encoding_format == "base64"
        coded = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_base64 else vector.tolist()
        items.append(bodies.Embedding(object="embedding", index=index, embedding=coded).model_dump_json())
    return Response(f'{head}"data":[{",".join(items)}]{tail}', media_type="application/json")


def _check_finite(numbers: Any) -> None:
    """Raises `EngineError` if a number is not finite: JSON would have ``null`` in its place."""
    if not np.isfinite(numbers).all():
        raise EngineError("the model's answer has numbers that are not finite; try another dtype")


def _shortened(vectors: Any, dimensions: int | None) -> Any:
    """Returns the first ``dimensions`` numbers of each vector, scaled to length 1 (Kusupati et al. 2022,
    "Matryoshka")."""
    if dimensions is None:
        return vectors
    if dimensions > vectors.shape[1]:
        raise InvalidRequest(f"dimensions={dimensions}; allowed: up to {vectors.shape[1]}, the dimensions of the model")
    kept = vectors[:, :dimensions]
    return kept / np.maximum(np.linalg.norm(kept, axis=1, keepdims=True), np.finfo(np.float32).tiny)


async def rerank(request: Request) -> Response:
    """The documents in the order in which they answer the query."""
    body = await read_json(request, bodies.RerankRequest)
    texts, counts = body.texts(), list[int]()
    async with engine_of(request, body.model) as engine:
        scores = await engine.inside.score(body.query, texts, body.priority, **_told_of(request, counts))
    usage = _usage(request, counts)
    return await trio.to_thread.run_sync(_ranked, body, texts, scores, usage)


def _ranked(
    body: bodies.RerankRequest, texts: Sequence[str], scores: Sequence[float], usage: bodies.PromptUsage
) -> Response:
    _check_finite(scores)
    best = sorted(range(len(texts)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        bodies.Ranked(
            index=index,
            relevance_score=_logistic(scores[index]),
            **({"document": _told(texts[index], body.documents[index])} if body.return_documents else {}),
        )
        for index in best
    ]
    return answered(bodies.RerankAnswer(id=new_id("rerank-"), model=body.model, results=results, usage=usage))


def _told(text: str, document: str | bodies.Document) -> bodies.RankedDocument:
    more = {} if isinstance(document, str) else document.model_dump(exclude_unset=True)
    return bodies.RankedDocument(**{"text": text, **more})


async def rerank_by_cohere(request: Request) -> Response:
    """The documents in the order in which they answer the query, for Cohere's clients."""
    return await rerank(request)


def _logistic(score: float) -> float:
    return 1.0 / (1.0 + math.exp(-score)) if score >= 0.0 else math.exp(score) / (1.0 + math.exp(score))


async def classify(request: Request) -> Response:
    """The probability of each label for each text."""
    body = await read_json(request, bodies.ClassifyRequest)
    texts, counts = body.texts(), list[int]()
    async with engine_of(request, body.model) as engine:
        found = await engine.inside.classify(texts, body.priority, **_told_of(request, counts))
    usage = _usage(request, counts)
    return await trio.to_thread.run_sync(_classified, body, found, usage)


def _classified(body: bodies.ClassifyRequest, found: Sequence[dict[str, float]], usage: bodies.PromptUsage) -> Response:
    data = [
        bodies.Classified(index=index, label=max(labels, key=lambda one: labels[one]), probabilities=labels)
        for index, labels in enumerate(found)
    ]
    return answered(
        bodies.ClassifyAnswer(id=new_id("classify-"), object="list", model=body.model, data=data, usage=usage)
    )


def _told_of(request: Request, counts: list[int]) -> dict[str, Any]:
    """Returns what an engine is told of a call: its id too, by which its requests are known to watchers."""
    return {"wait": True, "told": counts.append, "name": exchange_of(request).id}


def _usage(request: Request, counts: Sequence[int]) -> bodies.PromptUsage:
    """Returns the number of tokens that were read, and notes it for the access log."""
    tokens = sum(counts)
    exchange_of(request).ended(None, tokens=tokens)
    return bodies.PromptUsage(prompt_tokens=tokens, total_tokens=tokens)
