"""``/v1/completions``."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from attrs import evolve
from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.hosts.alternatives import run_together
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...api.outputs.results import Completion, Delta
from ...core.request import FinishReason
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas.completions import CompletionAnswer, CompletionChoice, CompletionRequest
from .common import answered, engine_of, exchange_of, new_id, now, tokens_of
from .sampling import Places, completion_logprobs, sampling_of, structure_of, usage_of
from .together import streams_together

_DEFAULT_TOKENS = 16  # OpenAI's default
Some = TypeVar("Some", Completion, Delta)


async def complete(request: Request) -> Response:
    """The text that follows each prompt, whole or as it is written."""
    body = await read_json(request, CompletionRequest)
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    n = body.n or 1
    async with engine_of(request, body.model) as engine:
        found = await run_together([partial(engine.generate, **query) for query in _queries(request, body)])
        echoes, prompts = await _echoes(engine, body), await _prompts(request, engine, body)
        answers = [answer for first in found for answer in (first, *first.alternatives)]
        answers = [_cut(body, one) for one in answers]
        choices = [
            _choice(
                engine,
                body,
                index,
                one,
                _places(engine, body, echoes[index // n]),
                echoes[index // n],
                prompts[index // n],
            )
            for index, one in enumerate(answers)
        ]
    usage = usage_of([one.usage for one in answers], n)
    exchange_of(request).ended(found[0].timings, tokens=usage.completion_tokens)
    return answered(_frame(body).model_copy(update={"choices": choices, "usage": usage}))


def _queries(request: Request, body: CompletionRequest) -> list[dict[str, Any]]:
    """Returns the arguments of `Engine.generate`, for each prompt."""
    sampling = sampling_of(
        body,
        max_tokens=_DEFAULT_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        prompt_logprobs=body.logprobs if body.scores else None,
        logprobs=body.logprobs,
        structure=structure_of(body, body.response_format),
    )
    shared = {"sampling": sampling, "priority": body.priority or 0, "request_id": exchange_of(request).id}
    prompts = ({"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in body.prompts())
    return [{**prompt, **shared} for prompt in prompts]


async def _prompts(request: Request, engine: Engine, body: CompletionRequest) -> list[list[int] | None]:
    """Returns the tokens of each prompt, if the client wants them."""
    if not (body.return_token_ids or body.scores):
        return [None] * len(body.prompts())
    return [await tokens_of(engine, Query(**query)) for query in _queries(request, body)]


async def _echoes(engine: Engine, body: CompletionRequest) -> list[str]:
    """Returns the text before the answers to each prompt: the prompt itself, if the client wants it."""
    prompts = body.prompts()
    if not body.echo:
        return [""] * len(prompts)
    tokenizer = engine.model.tokenizer
    return await run_in_thread(
        lambda: [prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt)) for prompt in prompts]
    )


def _cut(body: CompletionRequest, part: Some) -> Some:
    """Returns ``part``; without its token if the client wants none, since the engine writes at least one."""
    if body.max_tokens != 0:
        return part
    ends = None if part.finish_reason is None else FinishReason.LENGTH
    usage = None if part.usage is None else evolve(part.usage, completion_tokens=0)
    tops = None if part.top_logprobs is None else ()
    return evolve(part, text="", token_ids=(), logprobs=(), top_logprobs=tops, finish_reason=ends, usage=usage)


def _places(engine: Engine, body: CompletionRequest, echo: str) -> Places:
    return Places(engine.inside.texts(body.skip_special_tokens is not False), len(echo))


def _choice(
    engine: Engine,
    body: CompletionRequest,
    index: int,
    part: Completion | Delta,
    places: Places,
    echo: str,
    prompt: list[int] | None,
) -> CompletionChoice:
    known, before = engine.inside.token_bytes(), list[tuple[int, int]]()
    if prompt is not None and body.scores:
        is_text = isinstance(body.prompts()[index // (body.n or 1)], str)  # tokens are spelled with special ones
        own = Places(engine.inside.texts(is_text))
        before = [(token, own.of(token)) for token in prompt]
    reason: Any = None
    if part.finish_reason is not None:
        reason = "length" if part.finish_reason is FinishReason.LENGTH else "stop"
    more: dict[str, Any] = {"token_ids": list(part.token_ids)} if body.return_token_ids else {}
    return CompletionChoice(
        **{**more, "prompt_token_ids": prompt} if more and prompt is not None else more,
        index=index,
        text=echo + part.text,
        logprobs=None if body.logprobs is None else completion_logprobs(known, part, places, before),
        finish_reason=reason,
    )


def _frame(body: CompletionRequest) -> CompletionAnswer:
    return CompletionAnswer(id=new_id("cmpl-"), object="text_completion", created=now(), model=body.model, choices=[])


async def _streamed(request: Request, body: CompletionRequest, events: Events) -> None:
    n, frame, echoes, prompts = body.n or 1, _frame(body), list[str](), list[list[int] | None]()
    places: dict[int, Places] = {}  # of the next token of each choice
    tells_usage = body.stream_options is not None and body.stream_options.include_usage
    counts = bool(tells_usage and body.stream_options and body.stream_options.continuous_usage_stats)
    if tells_usage:
        frame.usage = None  # in each event but the last

    async def add(index: int, delta: Delta) -> None:
        if not echoes:  # the first delta: all prompts are valid
            echoes.extend(await _echoes(engine, body))
            prompts.extend(await _prompts(request, engine, body))
        delta = _cut(body, delta)
        echo, prompt = ("", None) if index in places else (echoes[index // n], prompts[index // n])
        if counts and delta.usage is not None:
            frame.usage = usage_of([delta.usage], 1)
        if index not in places:
            places[index] = _places(engine, body, echo)
        wanted = body.return_token_ids or body.logprobs is not None
        if delta.text or echo or delta.finish_reason or (wanted and delta.token_ids):
            choice = _choice(engine, body, index, delta, places[index], echo, prompt)
            await events.write(frame.model_copy(update={"choices": [choice]}))

    async with engine_of(request, body.model) as engine:
        queries = [Query(**query) for query in _queries(request, body)]
        usages, timings = await streams_together(engine, queries, add, counts=counts)
    usage = usage_of([usage if body.max_tokens != 0 else evolve(usage, completion_tokens=0) for usage in usages], n)
    exchange_of(request).ended(timings, tokens=usage.completion_tokens)
    if tells_usage:
        await events.write(frame.model_copy(update={"usage": usage}))
    await events.write(DONE, last=True)
