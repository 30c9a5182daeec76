"""``/v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...api.outputs.results import Completion, Delta
from ...api.outputs.results import Usage as Counted
from ...core.request import FinishReason
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas.base import Usage
from ..schemas.completions import CompletionAnswer, CompletionChoice, CompletionRequest
from .common import answered, engine_of, exchange_of, new_id, now
from .sampling import completion_logprobs, sampling_of, usage_of
from .together import run_all, streams_together

_DEFAULT_TOKENS = 16  # OpenAI's


async def complete(request: Request) -> Response:
    """The text that follows each prompt, whole or as it is written."""
    body = await read_json(request, CompletionRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    async with engine_of(request, body.model) as engine:
        queries = _queries(request, body)
        found = await run_all([partial(engine.generate, **query) for query in queries])
        echoes = await _echoes(engine, body)
        answers = [[one, *one.alternatives] for one in found]
        exchange_of(request).ended(found[0].timings, tokens=sum(one.usage.completion_tokens for one in _flat(answers)))
        choices = [
            _choice(engine, body, place * (body.n or 1) + index, one, echoes[place])
            for place, several in enumerate(answers)
            for index, one in enumerate(several)
        ]
    usage = _total([usage_of([one.usage for one in several]) for several in answers])
    return answered(_answer(body, choices, usage))


def _flat(answers: list[list[Completion]]) -> list[Completion]:
    return [one for several in answers for one in several]


def _queries(request: Request, body: CompletionRequest) -> list[dict[str, Any]]:
    """The arguments of `Engine.generate`, for each prompt."""
    sampling = sampling_of(body, max_tokens=body.max_tokens or _DEFAULT_TOKENS, logprobs=body.logprobs)
    shared = {"sampling": sampling, "priority": body.priority or 0, "request_id": exchange_of(request).id}
    prompts = ({"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in body.prompts())
    return [{**prompt, **shared} for prompt in prompts]


async def _echoes(engine: Engine, body: CompletionRequest) -> list[str]:
    """Returns the beginnings of the answers to each prompt: the prompt, if that is wanted."""
    prompts = body.prompts()
    if not body.echo:
        return [""] * len(prompts)
    tokenizer = engine.model.tokenizer
    return await run_in_thread(
        lambda: [prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt)) for prompt in prompts]
    )


def _choice(engine: Engine, body: CompletionRequest, index: int, completion: Completion, echo: str) -> CompletionChoice:
    told = None if body.logprobs is None else completion_logprobs(engine.model.tokenizer, completion)
    reason = _reason(completion.finish_reason)
    return CompletionChoice(index=index, text=echo + completion.text, logprobs=told, finish_reason=reason)


def _reason(reason: FinishReason) -> Any:
    return "length" if reason is FinishReason.LENGTH else "stop"


def _total(usages: list[Usage]) -> Usage:
    prompt = sum(one.prompt_tokens for one in usages)
    written = sum(one.completion_tokens for one in usages)
    return Usage(prompt_tokens=prompt, completion_tokens=written, total_tokens=prompt + written)


def _answer(body: CompletionRequest, choices: list[CompletionChoice], usage: Usage | None) -> CompletionAnswer:
    told = {} if usage is None else {"usage": usage}
    return CompletionAnswer(
        id=new_id("cmpl"), object="text_completion", created=now(), model=body.model, choices=choices, **told
    )


async def _streamed(request: Request, body: CompletionRequest, events: Events) -> None:
    writer = _Writer(body, events)
    async with engine_of(request, body.model) as engine:
        queries = [Query(**query) for query in _queries(request, body)]
        usages, timings = await streams_together(engine, queries, partial(writer.add, engine))
    exchange_of(request).ended(timings, tokens=sum(one.completion_tokens for one in usages))
    await writer.end(usages)


class _Writer:
    """The events of one answer."""

    def __init__(self, body: CompletionRequest, events: Events) -> None:
        self._body = body
        self._events = events
        self._count = body.n or 1
        self._echoes: list[str] | None = None  # of each prompt, once it was found good
        self._tells_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._frame = _answer(body, [], None)
        if self._tells_usage:
            self._frame.usage = None  # in each event but the last
        self._offsets: dict[int, int] = {}  # characters that were sent of each choice

    async def add(self, engine: Engine, index: int, delta: Delta) -> None:
        """Sends what ``delta`` adds to the choice ``index``."""
        tells_tokens = self._body.logprobs is not None
        if self._echoes is None:
            self._echoes = await _echoes(engine, self._body)
        echo = "" if index in self._offsets else self._echoes[index // self._count]
        offset = self._offsets.setdefault(index, len(echo))
        self._offsets[index] += len(delta.text)
        if not (delta.text or echo or delta.finish_reason or (tells_tokens and delta.token_ids)):
            return
        told = completion_logprobs(engine.model.tokenizer, delta, offset=offset) if tells_tokens else None
        reason = None if delta.finish_reason is None else _reason(delta.finish_reason)
        choice = CompletionChoice(index=index, text=echo + delta.text, logprobs=told, finish_reason=reason)
        await self._events.write(self._frame.model_copy(update={"choices": [choice]}))

    async def end(self, usages: list[Counted]) -> None:
        """Ends the events: all choices are whole."""
        count = self._count
        if self._tells_usage:
            starts = range(0, len(usages), count)
            usage = _total([usage_of(usages[start : start + count]) for start in starts])
            await self._events.write(self._frame.model_copy(update={"usage": usage}))
        await self._events.end(DONE)
