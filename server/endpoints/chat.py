"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.lengths import tokenizer_made
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...api.outputs.results import Completion, Delta
from ...core.request import FinishReason
from ...core.tools import read_tools
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas import chat as bodies
from .common import answered, engine_of, exchange_of, new_id, now, server_of, tokens_of
from .conversations import decode_media, messages_of
from .sampling import chat_logprobs, sampling_of, structure_of, usage_of
from .together import streams_together
from .tool_calls import CallReader, Tools

_TURN = ("add_generation_prompt", "continue_final_message")


async def converse(request: Request) -> Response:
    """The answer to a conversation, whole or as it is written."""
    body = await read_json(request, bodies.ChatRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    async with asked(request, body) as (engine, tools, query):
        completion = await engine.generate(**query)
        more: dict[str, Any] = (
            {"prompt_token_ids": await tokens_of(engine, as_query(query))} if body.return_token_ids else {}
        )
        found = (completion, *completion.alternatives)
        choices = [_choice(engine, body, tools, index, one) for index, one in enumerate(found)]
    usage = usage_of([one.usage for one in found], len(found))
    exchange_of(request).ended(completion.timings, tokens=usage.completion_tokens)
    return answered(
        bodies.ChatAnswer(
            id=new_id("chatcmpl-"),
            object="chat.completion",
            created=now(),
            model=body.model,
            choices=choices,
            usage=usage,
            **more,
        )
    )


@asynccontextmanager
async def asked(
    request: Request, body: bodies.ChatRequest
) -> AsyncIterator[tuple[Engine, Tools | None, dict[str, Any]]]:
    """Opens the engine for the block, which gets the engine, the tools and the arguments of `Engine.generate`."""
    messages = await messages_of(request, body)
    async with engine_of(request, body.model) as engine:
        await decode_media(engine, body, messages, request)
        if body.tools:  # their form depends on the tokenizer
            await tokenizer_made(engine.model.tokenizer, server_of(request).reading)
        tools = Tools.of(body, engine.model, server_of(request).settings.tool_format, exchange_of(request).told)
        sampling = sampling_of(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            structure=structure_of(body, body.response_format)
            if tools is None
            else await run_in_thread(tools.structure),
        )
        turn = {name: getattr(body, name) for name in _TURN if getattr(body, name) is not None}
        query = {
            "messages": messages,
            "tools": () if tools is None else tools.given,
            "template_options": {**(body.chat_template_kwargs or {}), **turn},
            "sampling": sampling,
            "priority": body.priority or 0,
            "request_id": exchange_of(request).id,
            "adapter": server_of(request).engines.adapter_of(body.model),
        }
        yield engine, tools, query


def as_query(given: Mapping[str, Any]) -> Query:
    """Returns the query of the arguments that `asked` gives."""
    return Query(**{**given, "tools": read_tools(given["tools"])})


def _choice(
    engine: Engine, body: bodies.ChatRequest, tools: Tools | None, index: int, completion: Completion
) -> bodies.ChatChoice:
    if tools is None:
        message = bodies.AnswerMessage(role="assistant", content=completion.text, refusal=None)
    else:
        message = tools.message(completion.text)
    if completion.reasoning:
        message.reasoning_content = completion.reasoning
    return bodies.ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(engine.inside.token_bytes(), completion) if body.logprobs else None,
        finish_reason=_reason(body, completion.finish_reason, called=message.tool_calls is not None),
        **({"token_ids": list(completion.token_ids)} if body.return_token_ids else {}),
    )


def _reason(body: bodies.ChatRequest, reason: FinishReason, *, called: bool) -> Any:
    if reason is FinishReason.LENGTH:
        return "length"
    chose = called and not isinstance(body.tool_choice, bodies.NamedTool)  # OpenAI's words
    return "tool_calls" if chose else "stop"


async def _streamed(request: Request, body: bodies.ChatRequest, events: Events) -> None:
    async with asked(request, body) as (engine, tools, query):
        prompt = await tokens_of(engine, as_query(query)) if body.return_token_ids else None
        writer = _ChunkWriter(body, events, tools, prompt)
        add = partial(writer.add, engine)
        usages, timings = await streams_together(engine, [as_query(query)], add, counts=writer.counts)
    usage = usage_of(usages, body.n or 1)
    exchange_of(request).ended(timings, tokens=usage.completion_tokens)
    if writer.tells_usage:
        await events.write(writer.frame.model_copy(update={"usage": usage}))
    await events.write(DONE, last=True)


class _ChunkWriter:
    """Writes the events of one answer: copies of ``frame``, each with one choice."""

    def __init__(
        self, body: bodies.ChatRequest, events: Events, tools: Tools | None, prompt: list[int] | None = None
    ) -> None:
        self._prompt = prompt  # its tokens, until they are told
        self._body = body
        self._events = events
        self._tools = tools
        self._readers: dict[int, CallReader | None] = {}
        self.tells_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.counts = bool(self.tells_usage and body.stream_options and body.stream_options.continuous_usage_stats)
        self.frame = bodies.ChatChunk(
            id=new_id("chatcmpl-"), object="chat.completion.chunk", created=now(), model=body.model, choices=[]
        )
        if self.tells_usage:
            self.frame.usage = None  # in each event but the last

    async def add(self, engine: Engine, index: int, delta: Delta) -> None:
        """Sends the event for what ``delta`` adds to the answer ``index``."""
        if self.counts and delta.usage is not None:
            self.frame.usage = usage_of([delta.usage], 1)
        if index not in self._readers:
            self._readers[index] = None if self._tools is None else self._tools.reader()
            await self._tell(index, bodies.MessageDelta(role="assistant", content=""))
        reader = self._readers[index]
        wanted = self._body.logprobs and len(delta.token_ids) > delta.reasoning_tokens
        more: dict[str, Any] = {"logprobs": chat_logprobs(engine.inside.token_bytes(), delta)} if wanted else {}
        if self._body.return_token_ids and delta.token_ids:
            more["token_ids"] = list(delta.token_ids)
        parts = parts_of(reader, delta)
        for part in [part for part in parts if part.model_fields_set] or [bodies.MessageDelta()] * bool(more):
            await self._tell(index, part, **more)
            more = {}
        if delta.finish_reason is not None:
            reason = _reason(self._body, delta.finish_reason, called=reader is not None and reader.called)
            await self._tell(index, bodies.MessageDelta(), reason=reason)

    async def _tell(self, index: int, delta: bodies.MessageDelta, *, reason: Any = None, **more: Any) -> None:
        choice = bodies.ChunkChoice(index=index, delta=delta, finish_reason=reason, **{"logprobs": None, **more})
        first = {} if self._prompt is None else {"prompt_token_ids": self._prompt}
        self._prompt = None
        await self._events.write(self.frame.model_copy(update={"choices": [choice], **first}))


def parts_of(reader: CallReader | None, delta: Delta) -> list[bodies.MessageDelta]:
    """Returns the parts that ``delta`` adds to a message. A ``reader`` finds tool calls in the text."""
    thought = [bodies.MessageDelta(reasoning_content=delta.reasoning)] if delta.reasoning else []
    if reader is not None:
        return thought + reader.feed(delta.text, last=delta.finish_reason is not None)
    return thought + ([bodies.MessageDelta(content=delta.text)] if delta.text else [])
