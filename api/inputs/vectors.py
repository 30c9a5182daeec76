"""Requests for pooling models, which turn texts into vectors or scores."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import trio
from attrs import evolve, frozen
from numpy.typing import NDArray

from ...core.config import EngineConfig
from ...core.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge
from ...core.model import Kind, ModelDescription
from ...core.order import read_priority
from ...core.request import Pooling, Request
from .lengths import PIECE, Limit, Pause, read_texts, tokenizer_made
from .prompts import INLINE_TEXT, keyed
from .threads import run_in_thread

_INLINE_TEXTS = 32  # tokenizing more takes longer than a thread costs
_TEXT = 100  # characters: even the shortest text takes as long as so many characters

Vectors = NDArray[np.float32]
Told = Callable[[int], object]  # is called with the number of tokens that were read


@frozen(kw_only=True, eq=False)
class VectorQuery:
    """Texts, or pairs of texts, and the pooling that turns each into a vector."""

    texts: Sequence[str | tuple[str, str]]
    pooling: Pooling
    priority: int

    @property
    def is_short(self) -> bool:
        """True if tokenizing the texts takes less time than a thread costs."""
        texts = [text if isinstance(text, str) else "".join(text) for text in self.texts[: _INLINE_TEXTS + 1]]
        return len(texts) <= _INLINE_TEXTS and sum(map(len, texts)) <= INLINE_TEXT


def embedding_pooling(description: ModelDescription, kind: str | None, normalize: bool | None) -> Pooling:
    """The pooling of `Engine.embed`: the caller's, or else the checkpoint's.

    Raises:
        InvalidRequest: the model gives no embeddings.
    """
    default = _default(description)
    if kind is None and default.kind == "classify":
        raise InvalidRequest(
            f"{description.architecture} classifies texts; use engine.score(...) or engine.classify(...), or give "
            "pooling='mean', 'cls' or 'last'"
        )
    if kind == "classify":
        raise InvalidRequest("pooling='classify' gives scores, not vectors; use engine.classify(...)")
    return Pooling(kind=kind or default.kind, normalize=(default.normalize if normalize is None else bool(normalize)))


def scoring_pooling(description: ModelDescription) -> Pooling:
    """The pooling of `Engine.score` and `Engine.classify`.

    Raises:
        InvalidRequest: the model has no classification head.
    """
    default = _default(description)
    if default.kind != "classify":
        raise InvalidRequest(
            f"{description.architecture} has no classification head; use engine.embed(...) and compare the vectors"
        )
    return default


def _default(description: ModelDescription) -> Pooling:
    if description.kind is not Kind.POOLING or description.default_pooling is None:
        raise InvalidRequest(f"{description.architecture} gives no vectors; use an embedding model or a classifier")
    return description.default_pooling


async def build_requests(
    description: ModelDescription,
    query: VectorQuery,
    config: EngineConfig,
    *,
    new_id: Callable[[], str],
    reading: trio.CapacityLimiter,
) -> list[Request]:
    """Returns one request for each text. A text that cannot be divided must fit a step. If there are many texts, they
    take several turns of ``reading``, and other callers get their turn in between.
    """
    query = evolve(query, priority=read_priority(query.priority))
    most_tokens, prefix_caching = config.max_step_tokens, config.prefix_caching
    limit = _limit(description, most_tokens)
    short = query.is_short

    def check() -> None:
        for text in query.texts:
            limit.check_length("a text", _parts(text))

    def build(texts: Sequence[str | tuple[str, str]], pause: Pause) -> list[Request]:
        requests = (_request(limit, text, query, most_tokens, new_id(), pause) for text in texts)
        return [keyed(request, description, prefix_caching=prefix_caching) for request in requests]

    await run_in_thread(check, short=short)
    await tokenizer_made(description.tokenizer, reading)
    found: list[Request] = []
    for texts in _turns(query.texts):
        found += await read_texts(partial(build, texts), short=short, reading=reading)
    return found


def _turns(texts: Sequence[str | tuple[str, str]]) -> Iterator[Sequence[str | tuple[str, str]]]:
    """Yields ``texts`` in order, in groups: one long text, or as many texts as are tokenized in some milliseconds."""
    turn: list[str | tuple[str, str]] = []
    length = 0
    for text in texts:
        more = _TEXT + sum(map(len, _parts(text)))
        if turn and length + more > PIECE:
            yield turn
            turn, length = [], 0
        turn.append(text)
        length += more
    if turn:
        yield turn


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _limit(description: ModelDescription, most_tokens: int) -> Limit:
    positions = description.max_positions
    most = min(positions, most_tokens) if description.whole_prompts else positions
    return Limit(
        description,
        positions,
        f"up to {most} (the model has {positions} positions, EngineConfig(max_step_tokens={most_tokens})); cut it into "
        "pieces",
    )


def _request(limit: Limit, text: Any, query: VectorQuery, most_tokens: int, name: str, pause: Pause) -> Request:
    description, pooling = limit.description, query.pooling
    preparer = description.preparer
    assert preparer is not None, "a pooling model prepares its prompts"
    pause()
    for part in _parts(text):
        limit.check_count("a text", part, pause)
    if isinstance(text, str):
        token_ids = preparer.prepare(text).token_ids
    else:
        token_ids, second = preparer.prepare_pair(*text)
        pooling = evolve(pooling, second=second)
    tokens = len(token_ids)
    if not token_ids:
        raise InvalidRequest("a text without tokens has no vector; allowed: 1 token or more")
    if tokens > description.max_positions:
        raise ContextLengthExceeded(f"a text of {tokens} tokens is too long; allowed: {limit.allowed}")
    if description.whole_prompts and tokens > most_tokens:
        raise RequestTooLarge(
            f"a text of {tokens} tokens is too long for one step; allowed: up to {most_tokens}. Cut it into pieces, "
            f"or give EngineConfig(max_step_tokens={tokens}) or more"
        )
    return Request(id=name, prompt_token_ids=token_ids, pooling=pooling, max_tokens=1, priority=query.priority)


def check_texts(name: str, texts: object) -> tuple[str, ...]:
    """Returns ``texts`` as a tuple; a single text becomes a tuple of one.

    Raises:
        InvalidRequest: ``texts`` is neither a text nor a list of texts.
    """
    found = (texts,) if isinstance(texts, str) else texts
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise InvalidRequest(f"{name}={reprlib.repr(texts)}; allowed: a text or a list of texts")
    return tuple(found)


def softmax(scores: Sequence[float]) -> tuple[float, ...]:
    """Returns the probabilities of ``scores``."""
    most = max(scores)
    parts = [math.exp(score - most) for score in scores]
    return tuple(part / sum(parts) for part in parts)
