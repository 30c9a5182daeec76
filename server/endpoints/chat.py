"""``/v1/chat/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.outputs.results import Completion, Delta, Usage
from ...core.request import FinishReason, SamplingParams
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas.chat import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChunkChoice,
    MessageDelta,
)
from .common import answered, engine_of, exchange_of, new_id, now
from .conversations import messages_of
from .sampling import chat_logprobs, sampling_of, siblings_of, structure_of, usage_of
from .together import streams_together


async def converse(request: Request) -> Response:
    """The answer to a conversation, whole or as it is written."""
    body = await read_json(request, ChatRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    async with engine_of(request, body.model) as engine:
        query = await _query(request, body)
        completion = await engine.generate(**query)
        exchange_of(request).ended(completion.timings, tokens=completion.usage.completion_tokens)
        choices = [
            _choice(engine, body, index, one) for index, one in enumerate((completion, *completion.alternatives))
        ]
    usage = usage_of([one.usage for one in (completion, *completion.alternatives)])
    return answered(
        ChatAnswer(
            id=new_id("chatcmpl"),
            object="chat.completion",
            created=now(),
            model=body.model,
            choices=choices,
            usage=usage,
        )
    )


async def _query(request: Request, body: ChatRequest) -> dict[str, Any]:
    """The arguments of `Engine.generate`."""
    return {
        "messages": await messages_of(request, body),
        "sampling": _sampling(body),
        "priority": body.priority or 0,
        "request_id": exchange_of(request).id,
    }


def _sampling(body: ChatRequest) -> SamplingParams:
    return sampling_of(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure_of(body.response_format),
    )


def _choice(engine: Engine, body: ChatRequest, index: int, completion: Completion) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AnswerMessage(role="assistant", content=completion.text, refusal=None),
        logprobs=chat_logprobs(engine.model.tokenizer, completion) if body.logprobs else None,
        finish_reason=_reason(completion.finish_reason),
    )


def _reason(reason: FinishReason) -> Any:
    return "length" if reason is FinishReason.LENGTH else "stop"


async def _streamed(request: Request, body: ChatRequest, events: Events) -> None:
    answer = _Answer(body, events)
    async with engine_of(request, body.model) as engine:
        query = await _query(request, body)
        queries = [{**query, "sampling": one} for one in siblings_of(query["sampling"])]
        usages, timings = await streams_together(engine, queries, partial(answer.add, engine))
    exchange_of(request).ended(timings, tokens=sum(usage.completion_tokens for usage in usages))
    await answer.end(usages)


class _Answer:
    """The events of one answer."""

    def __init__(self, body: ChatRequest, events: Events) -> None:
        self._body = body
        self._events = events
        self._id, self._created = new_id("chatcmpl"), now()
        self._begun: set[int] = set()
        self._tells_usage = bool(body.stream_options and body.stream_options.include_usage)

    async def add(self, engine: Engine, index: int, delta: Delta) -> None:
        """Tells what ``delta`` adds to the answer ``index``."""
        if index not in self._begun:
            self._begun.add(index)
            await self.tell(ChunkChoice(index=index, delta=MessageDelta(role="assistant", content="")))
        choice = ChunkChoice(index=index, delta=MessageDelta(content=delta.text) if delta.text else MessageDelta())
        if self._body.logprobs and delta.token_ids:
            choice.logprobs = chat_logprobs(engine.model.tokenizer, delta)
        if delta.finish_reason is not None:
            choice.finish_reason = _reason(delta.finish_reason)
        if delta.text or delta.finish_reason or choice.logprobs:
            await self.tell(choice)

    async def end(self, usages: list[Usage]) -> None:
        """Tells the usage, where it is wanted, and that the stream is over."""
        if self._tells_usage:
            chunk = self._chunk([])
            chunk.usage = usage_of(usages)
            await self._events.write(chunk)
        await self._events.write(DONE)

    async def tell(self, choice: ChunkChoice) -> None:
        """Tells one part of an answer."""
        chunk = self._chunk([choice])
        if self._tells_usage:
            chunk.usage = None
        await self._events.write(chunk)

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._body.model,
            choices=choices,
        )
