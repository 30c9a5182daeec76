"""``/v1/chat/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.prompts import Query
from ...api.outputs.results import Completion, Delta, Usage
from ...core.request import FinishReason
from ...core.tools import read_tools
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas.chat import (
    AnswerMessage,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatRequest,
    ChunkChoice,
    Logprobs,
    MessageDelta,
    NamedTool,
)
from .common import answered, engine_of, exchange_of, new_id, now, server_of
from .conversations import decode_media, messages_of
from .sampling import chat_logprobs, sampling_of, structure_of, usage_of
from .together import streams_together
from .tool_calls import CallReader, Tools


async def converse(request: Request) -> Response:
    """The answer to a conversation, whole or as it is written."""
    body = await read_json(request, ChatRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    messages = await messages_of(request, body)
    async with engine_of(request, body.model) as engine:
        await decode_media(engine, messages, server_of(request).settings)
        tools = Tools.of(body, engine.model, server_of(request).settings.tool_format)
        completion = await engine.generate(**_query(request, body, messages, tools))
        exchange_of(request).ended(completion.timings, tokens=completion.usage.completion_tokens)
        found = (completion, *completion.alternatives)
        choices = [_choice(engine, body, tools, index, one) for index, one in enumerate(found)]
    return answered(
        ChatAnswer(
            id=new_id("chatcmpl"),
            object="chat.completion",
            created=now(),
            model=body.model,
            choices=choices,
            usage=usage_of([one.usage for one in found]),
        )
    )


def _query(request: Request, body: ChatRequest, messages: list[dict[str, Any]], tools: Tools | None) -> dict[str, Any]:
    """Returns the arguments of `Engine.generate`."""
    sampling = sampling_of(
        body,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        structure=structure_of(body.response_format) if tools is None else tools.structure(),
    )
    return {
        "messages": messages,
        "tools": () if tools is None else tools.given,
        "template_options": body.chat_template_kwargs or {},
        "sampling": sampling,
        "priority": body.priority or 0,
        "request_id": exchange_of(request).id,
    }


def _choice(engine: Engine, body: ChatRequest, tools: Tools | None, index: int, completion: Completion) -> ChatChoice:
    message = AnswerMessage(role="assistant", content=completion.text, refusal=None)
    if tools is not None:
        message = tools.message(completion.text)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(engine.model.tokenizer, completion) if body.logprobs else None,
        finish_reason=_reason(body, completion.finish_reason, called=message.tool_calls is not None),
    )


def _reason(body: ChatRequest, reason: FinishReason, *, called: bool) -> Any:
    if reason is FinishReason.LENGTH:
        return "length"
    chose = called and not isinstance(body.tool_choice, NamedTool)  # OpenAI's words
    return "tool_calls" if chose else "stop"


async def _streamed(request: Request, body: ChatRequest, events: Events) -> None:
    messages = await messages_of(request, body)
    async with engine_of(request, body.model) as engine:
        await decode_media(engine, messages, server_of(request).settings)
        tools = Tools.of(body, engine.model, server_of(request).settings.tool_format)
        answer = _Answer(body, events, tools)
        query = _query(request, body, messages, tools)
        query["tools"] = read_tools(query["tools"])
        usages, timings = await streams_together(engine, [Query(**query)], partial(answer.add, engine))
    exchange_of(request).ended(timings, tokens=sum(usage.completion_tokens for usage in usages))
    await answer.end(usages)


class _Answer:
    """The events of one answer."""

    def __init__(self, body: ChatRequest, events: Events, tools: Tools | None) -> None:
        self._body = body
        self._events = events
        self._tools = tools
        self._readers: dict[int, CallReader | None] = {}
        self._id, self._created = new_id("chatcmpl"), now()
        self._tells_usage = bool(body.stream_options and body.stream_options.include_usage)

    async def add(self, engine: Engine, index: int, delta: Delta) -> None:
        """Sends what ``delta`` adds to the answer ``index``."""
        if index not in self._readers:
            self._readers[index] = None if self._tools is None else self._tools.reader()
            await self._tell(index, MessageDelta(role="assistant", content=""))
        last = delta.finish_reason is not None
        reader = self._readers[index]
        wanted = self._body.logprobs and delta.token_ids
        logprobs = chat_logprobs(engine.model.tokenizer, delta) if wanted else None
        for part in _parts(reader, delta.text, last=last) or [MessageDelta()] * bool(logprobs):
            await self._tell(index, part, logprobs=logprobs)
            logprobs = None
        if delta.finish_reason is not None:
            reason = _reason(self._body, delta.finish_reason, called=reader is not None and reader.called)
            await self._tell(index, MessageDelta(), reason=reason)

    async def end(self, usages: list[Usage]) -> None:
        """Sends the usage, if it is wanted, and the end of the stream."""
        if self._tells_usage:
            chunk = self._chunk([])
            chunk.usage = usage_of(usages)
            await self._events.write(chunk)
        await self._events.end(DONE)

    async def _tell(
        self, index: int, delta: MessageDelta, *, logprobs: Logprobs | None = None, reason: Any = None
    ) -> None:
        chunk = self._chunk([ChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=reason)])
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


def _parts(reader: CallReader | None, text: str, *, last: bool) -> list[MessageDelta]:
    if reader is not None:
        return reader.feed(text, last=last)
    return [MessageDelta(content=text)] if text else []
