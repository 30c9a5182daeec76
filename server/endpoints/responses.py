"""``/v1/responses``: the conversations of OpenAI's newer API, built on those of `chat`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, Literal

from attrs import define, field
from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.outputs.results import Delta
from ...core.errors import ContextLengthExceeded
from ...core.request import FinishReason
from ..body import read_json
from ..event_stream import Events, EventStream
from ..schemas import responses as bodies
from ..schemas.base import OutputDetails, Usage
from ..schemas.chat import CallDelta, Logprobs, TokenLogprob
from .chat import as_query, asked, parts_of
from .common import answered, exchange_of, new_id, now, tokens_of
from .sampling import chat_logprobs, usage_of
from .together import streams_together
from .tool_calls import CallReader


async def respond(request: Request) -> Response:
    """The answer to a conversation of items, whole or as it is written."""
    body = await read_json(request, bodies.ResponsesRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body), named=True)

    async def drop(event: bodies.ResponseEvent) -> None:
        """Drops an event: the client gets the whole answer instead."""

    return answered((await _written(request, body, drop)).answer)


async def count(request: Request) -> Response:
    """The number of tokens that the model would read."""
    body = await read_json(request, bodies.ResponsesRequest)
    async with asked(request, body.as_chat) as (engine, _, query):
        tokens = await tokens_of(engine, as_query(query))
    return answered(bodies.InputTokens(object="response.input_tokens", input_tokens=len(tokens)))


async def _streamed(request: Request, body: bodies.ResponsesRequest, events: Events) -> None:
    writer = await _written(request, body, events.write)
    await events.write(writer.event(f"response.{writer.answer.status}", response=writer.answer), last=True)


async def _written(
    request: Request, body: bodies.ResponsesRequest, send: Callable[[bodies.ResponseEvent], Awaitable[None]]
) -> _ItemWriter:
    """Lets the engine write the answer, and sends each event except the last. Returns the writer of the answer."""
    async with asked(request, body.as_chat) as (engine, tools, query):
        writer = _ItemWriter(body, None if tools is None else tools.reader())

        async def add(_: int, delta: Delta) -> None:
            for event in writer.add(engine, delta):
                await send(event)

        try:
            usages, timings = await streams_together(engine, [as_query(query)], add)
        except ContextLengthExceeded as error:
            raise ContextLengthExceeded(str(error).replace("max_tokens", "max_output_tokens")) from None
    tokens = usage_of(usages, 1)
    exchange_of(request).ended(timings, tokens=tokens.completion_tokens)
    writer.finish(tokens)
    return writer


@define(eq=False)
class _ItemWriter:
    """The items of one answer, and the events that build them up. An event is valid until the next one is made."""

    _body: bodies.ResponsesRequest
    _reader: CallReader | None
    answer: bodies.ResponseAnswer = field(init=False)
    _open: bodies.OutputItem | None = None  # the item that is being written
    _pieces: list[str] = field(factory=list)  # the pieces of its text or arguments
    _held: list[tuple[str, list[TokenLogprob]]] = field(factory=list)  # texts that are held back, and their tokens
    _events: int = 0

    def __attrs_post_init__(self) -> None:
        body = self._body
        self.answer = bodies.ResponseAnswer(
            id=new_id("resp_"),
            object="response",
            created_at=now(),
            status="in_progress",
            error=None,
            incomplete_details=None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata={},
            model=body.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=None,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text or bodies.TextOptions(),
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            truncation="disabled",
            usage=None,
        )

    def add(self, engine: Engine, delta: Delta) -> Iterator[bodies.ResponseEvent]:
        """Yields the events of ``delta``."""
        if not self._events:
            yield self.event("response.created", response=self.answer)
            yield self.event("response.in_progress", response=self.answer)
        if self._body.wants_logprobs:
            self._held.append((delta.text, _with_bytes(chat_logprobs(engine.inside.token_bytes(), delta))))
        ends = delta.finish_reason is not None
        called, parts = False, parts_of(self._reader, delta)
        for part in parts:
            if part.reasoning_content is not None:
                yield from self._add_reasoning(part.reasoning_content)
                continue
            if part.content is not None:
                yield from self._add_text(part.content, self._logprobs_of(part.content if called else None))
            called = called or part.content is None
            for call in part.tool_calls or ():
                yield from self._add_call(call)
        if parts:
            self._held.clear()
        if ends:
            is_cut = delta.finish_reason is FinishReason.LENGTH
            self.answer.status = "incomplete" if is_cut else "completed"
            self.answer.incomplete_details = bodies.Incomplete(reason="max_output_tokens") if is_cut else None
            yield from self._close(self.answer.status)

    def _logprobs_of(self, text: str | None) -> list[TokenLogprob]:
        """Returns the log-probabilities of the tokens that are held back, or of the last ones, which wrote ``text``: a
        long call is read late, together with the text behind it, and nobody asks for those of the call."""
        held, tail = self._held, ""
        start = 0 if text is None else len(held)
        while start and text is not None and text.strip() not in tail:
            start -= 1
            tail = held[start][0] + tail
        return [one for _, tokens in held[start:] for one in tokens]

    def finish(self, tokens: Usage) -> None:
        """Adds the numbers of tokens to the answer."""
        self.answer.usage = bodies.ResponseUsage(
            input_tokens=tokens.prompt_tokens,
            input_tokens_details=bodies.InputDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=tokens.completion_tokens,
            output_tokens_details=tokens.completion_tokens_details or OutputDetails(reasoning_tokens=0),
            total_tokens=tokens.total_tokens,
        )

    def event(self, kind: str, **members: Any) -> bodies.ResponseEvent:
        """Makes the next event."""
        self._events += 1
        return bodies.ResponseEvent(type=kind, sequence_number=self._events - 1, **members)

    def _event_of(self, item: bodies.OutputItem, kind: str, **members: Any) -> bodies.ResponseEvent:
        return self.event(f"response.{kind}", item_id=item.id, output_index=len(self.answer.output) - 1, **members)

    def _begin(self, item: bodies.OutputItem) -> Iterator[bodies.ResponseEvent]:
        yield from self._close("completed")
        self._open = item
        self.answer.output.append(item)
        yield self.event("response.output_item.added", output_index=len(self.answer.output) - 1, item=item)

    def _add_reasoning(self, text: str) -> Iterator[bodies.ResponseEvent]:
        item = self._open
        if not isinstance(item, bodies.OutputReasoning):
            item = bodies.OutputReasoning(
                type="reasoning", id=new_id("rs_"), status="in_progress", summary=[], content=[]
            )
            yield from self._begin(item)
            part = bodies.ReasoningText(type="reasoning_text", text="")
            yield self._event_of(item, "content_part.added", content_index=0, part=part)
            item.content.append(part)
        self._pieces.append(text)
        yield self._event_of(item, "reasoning_text.delta", content_index=0, delta=text)

    def _add_text(self, text: str, logprobs: list[TokenLogprob]) -> Iterator[bodies.ResponseEvent]:
        item = self._open
        if not isinstance(item, bodies.OutputMessage):
            item = bodies.OutputMessage(
                type="message", id=new_id("msg_"), status="in_progress", role="assistant", content=[]
            )
            yield from self._begin(item)
            part = bodies.OutputText(type="output_text", text="", annotations=[], logprobs=[])
            yield self._event_of(item, "content_part.added", content_index=0, part=part)
            item.content.append(part)
        self._pieces.append(text)
        item.content[0].logprobs += logprobs
        yield self._event_of(item, "output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _add_call(self, call: CallDelta) -> Iterator[bodies.ResponseEvent]:
        function = call.function
        assert function is not None, "a delta of a call has more of its function"
        if call.id is not None:
            item = bodies.OutputCall(
                type="function_call",
                id=new_id("fc_"),
                call_id=call.id,
                name=function.name or "",
                arguments="",
                status="in_progress",
            )
            yield from self._begin(item)
        if function.arguments and self._open is not None:
            self._pieces.append(function.arguments)
            yield self._event_of(self._open, "function_call_arguments.delta", delta=function.arguments)

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[bodies.ResponseEvent]:
        """Ends the item that is being written, if there is one."""
        item, written = self._open, "".join(self._pieces)
        if item is None:
            return
        self._open = None
        self._pieces.clear()
        item.status = status
        if isinstance(item, bodies.OutputCall):
            item.arguments = written
            yield self._event_of(item, "function_call_arguments.done", arguments=written, name=item.name)
        else:
            [part] = item.content
            part.text = written
            if isinstance(part, bodies.OutputText):
                yield self._event_of(item, "output_text.done", content_index=0, text=written, logprobs=part.logprobs)
            else:
                yield self._event_of(item, "reasoning_text.done", content_index=0, text=written)
            yield self._event_of(item, "content_part.done", content_index=0, part=part)
        yield self.event("response.output_item.done", output_index=len(self.answer.output) - 1, item=item)


def _with_bytes(logprobs: Logprobs) -> list[TokenLogprob]:
    """Returns the tokens, each with a list of bytes. The list is empty for a token whose bytes are ``null`` in
    conversations."""
    tokens = logprobs.content or []
    for one in tokens:
        for told in (one, *one.top_logprobs):
            told.bytes = told.bytes or []
    return tokens
