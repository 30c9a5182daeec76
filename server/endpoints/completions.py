"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from attrs import define, evolve, field
from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.hosts.alternatives import run_together
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...api.outputs.results import Completion, Delta, Usage
from ...core.request import FinishReason
from ..body import read_json
from ..event_stream import DONE, Events, EventStream
from ..schemas.base import Usage as UsageObject
from ..schemas.completions import CompletionAnswer, CompletionChoice, CompletionRequest
from .common import answered, engine_of, exchange_of, new_id, now, server_of, tokens_of
from .sampling import Places, completion_logprobs, places_of, sampling_of, structure_of, usage_of
from .together import streams_together

_DEFAULT_TOKENS = 16  # OpenAI's default
_OF_SCORE, _OF_TOP = 128, 120  # bytes that a token of a scored prompt takes, and each likely token at its place


async def complete(request: Request) -> Response:
    """The text that follows each prompt, whole or as it is written."""
    body = await read_json(request, CompletionRequest)
    if body.scores:  # a text has no more tokens than bytes
        most = sum(len(one.encode() if isinstance(one, str) else one) for one in body.prompts()) * (body.n or 1)
        exchange_of(request).account.take(most * (_OF_SCORE + _OF_TOP * (body.logprobs or 0)))
    if body.stream:
        return EventStream(partial(_streamed, request, body))
    async with engine_of(request, body.model) as engine:
        found = await run_together([partial(engine.generate, **query) for query in _queries(request, body)])
        answers = [answer for first in found for answer in (first, *first.alternatives)]
        choices = await _Choices.of(request, engine, body)
        told = [choices.next(index, one) for index, one in enumerate(answers)]
    usage = _usage(body, [one.usage for one in answers])
    exchange_of(request).ended(found[0].timings, tokens=usage.completion_tokens)
    return answered(_frame(body).model_copy(update={"choices": told, "usage": usage}))


def _queries(request: Request, body: CompletionRequest) -> list[dict[str, Any]]:
    """Returns the arguments of `Engine.generate`, for each prompt."""
    sampling = sampling_of(
        body,
        max_tokens=_DEFAULT_TOKENS if body.max_tokens is None else max(1, body.max_tokens),
        prompt_logprobs=body.logprobs if body.scores else None,
        logprobs=body.logprobs,
        structure=structure_of(body, body.response_format),
    )
    shared: dict[str, Any] = {
        "sampling": sampling,
        "priority": body.priority or 0,
        "request_id": exchange_of(request).id,
    }
    shared["adapter"] = server_of(request).engines.adapter_of(body.model)
    prompts = ({"prompt": one} if isinstance(one, str) else {"prompt_token_ids": one} for one in body.prompts())
    return [{**prompt, **shared} for prompt in prompts]


@define(eq=False)
class _Choices:
    """Turns answers, or one delta after another, into choices. A choice begins with its prompt if that is wanted."""

    _engine: Engine
    _body: CompletionRequest
    _echoes: list[str]  # of each prompt
    _prompts: list[list[int]]  # the tokens of each prompt, if they are wanted
    _places: dict[int, Places] = field(factory=dict, init=False)  # of the next token of each choice

    @classmethod
    async def of(cls, request: Request, engine: Engine, body: CompletionRequest) -> _Choices:
        """Returns the choices of ``body``, whose prompts are valid."""
        echoes, tokenizer = [""] * len(body.prompts()), engine.model.tokenizer
        if body.echo:
            spell = [
                partial(str, one) if isinstance(one, str) else partial(tokenizer.decode, one) for one in body.prompts()
            ]
            echoes = await run_in_thread(lambda: [str(spelled()) for spelled in spell])
        wanted = _queries(request, body) if body.return_token_ids or body.scores else []
        return cls(engine, body, echoes, [await tokens_of(engine, Query(**query)) for query in wanted])

    def next(self, index: int, part: Completion | Delta) -> CompletionChoice:
        """Returns what ``part`` adds to the choice ``index``."""
        body, texts, prompt = self._body, self._engine.inside.texts, index // (self._body.n or 1)
        told, before, echo = dict[str, Any](), list[tuple[int, int]](), ""
        if body.max_tokens == 0:  # the engine writes at least one token
            cut: dict[str, Any] = {
                "text": "",
                "token_ids": (),
                "logprobs": (),
                "top_logprobs": part.top_logprobs and (),
            }
            ends: Any = part.finish_reason and FinishReason.LENGTH
            part = evolve(part, finish_reason=ends, **cut)
        if body.return_token_ids:
            told["token_ids"] = list(part.token_ids)
        if index not in self._places:
            echo = self._echoes[prompt]
            self._places[index] = Places(texts(body.skip_special_tokens is not False), len(echo))
            if body.return_token_ids:
                told["prompt_token_ids"] = self._prompts[prompt]
            if body.scores:
                is_tokens = not isinstance(body.prompts()[prompt], str)
                before = places_of(self._prompts[prompt], echo, texts, is_tokens=is_tokens)
        if body.logprobs is not None:
            told["logprobs"] = completion_logprobs(self._engine.inside.token_bytes(), part, self._places[index], before)
        reason: Any = (
            None if part.finish_reason is None else "length" if part.finish_reason is FinishReason.LENGTH else "stop"
        )
        return CompletionChoice(**{"logprobs": None, **told}, index=index, text=echo + part.text, finish_reason=reason)


def _usage(body: CompletionRequest, usages: Sequence[Usage]) -> UsageObject:
    cut = body.max_tokens == 0
    return usage_of([evolve(one, completion_tokens=0) if cut else one for one in usages], body.n or 1)


def _frame(body: CompletionRequest) -> CompletionAnswer:
    return CompletionAnswer(id=new_id("cmpl-"), object="text_completion", created=now(), model=body.model, choices=[])


async def _streamed(request: Request, body: CompletionRequest, events: Events) -> None:
    frame, choices = _frame(body), list[_Choices]()
    tells_usage = body.stream_options is not None and body.stream_options.include_usage
    counts = bool(tells_usage and body.stream_options and body.stream_options.continuous_usage_stats)
    if tells_usage:
        frame.usage = None  # in each event but the last

    async def add(index: int, delta: Delta) -> None:
        if not choices:  # the first delta: all prompts are valid
            choices.append(await _Choices.of(request, engine, body))
        if counts and delta.usage is not None:
            frame.usage = _usage(body, [delta.usage])
        told = choices[0].next(index, delta)
        tokens = told.token_ids or told.prompt_token_ids or (told.logprobs and told.logprobs.tokens)
        if told.text or told.finish_reason or tokens:
            await events.write(frame.model_copy(update={"choices": [told]}))

    async with engine_of(request, body.model) as engine:
        queries = [Query(**query) for query in _queries(request, body)]
        usages, timings = await streams_together(engine, queries, add, counts=counts)
    usage = _usage(body, usages)
    exchange_of(request).ended(timings, tokens=usage.completion_tokens)
    if tells_usage:
        await events.write(frame.model_copy(update={"usage": usage}))
    await events.write(DONE, last=True)
