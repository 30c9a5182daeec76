"""``/tokenize``, ``/detokenize`` and ``/version``."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.lengths import IN_THREAD, Limit
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...core.errors import ContextLengthExceeded, InvalidRequest
from ...core.model import ModelDescription
from ..body import read_json
from ..problems import BadBody
from ..schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest, Version
from .chat import as_query, asked
from .common import answered, engine_of, server_of, tokens_of


async def tokenize(request: Request) -> Response:
    """The tokens of a prompt or a conversation, as the model would read them."""
    body = await read_json(request, TokenizeRequest)
    model = _model_of(request, body.model)
    if body.messages is not None:
        async with asked(request, body.as_chat(model=model)) as (engine, _, query):
            return await _answer(engine, await tokens_of(engine, as_query(query)), body)
    assert body.prompt is not None, "a body has a prompt or messages"
    async with engine_of(request, model) as engine:
        if body.add_special_tokens is False:
            work = partial(_plain, engine.model, body.prompt)
            return await _answer(engine, await run_in_thread(work, limiter=server_of(request).reading), body)
        return await _answer(engine, await tokens_of(engine, Query(prompt=body.prompt)), body)


def _model_of(request: Request, given: str | None) -> str:
    """Returns the name of the model that the client gave, or of the only one that is served."""
    served = list(server_of(request).engines.models)
    if given is None and len(served) > 1:
        raise BadBody(f"model is missing; allowed: {', '.join(served)}", "model")
    return given or served[0]


def _plain(model: ModelDescription, text: str) -> list[int]:
    """Returns the tokens of ``text`` without those that the tokenizer puts around it. Runs in a thread."""
    limit = Limit.of_prompts(model)
    limit.check_count("a prompt", text, IN_THREAD)
    tokens = list(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(tokens) > limit.most:
        raise ContextLengthExceeded(f"a prompt of {len(tokens):,} tokens is too long; allowed: {limit.allowed}")
    return tokens


async def _answer(engine: Engine, tokens: list[int], body: TokenizeRequest) -> Response:
    answer = TokenizeAnswer(count=len(tokens), max_model_len=engine.model.max_positions, tokens=tokens)
    if body.return_token_strs:
        answer.token_strs = await run_in_thread(partial(engine.model.tokenizer.convert_ids_to_tokens, tokens))
    return answered(answer)


async def detokenize(request: Request) -> Response:
    """The text of tokens, with special ones."""
    body = await read_json(request, DetokenizeRequest)
    async with engine_of(request, _model_of(request, body.model)) as engine:
        size, tokenizer = engine.model.vocabulary_size, engine.model.tokenizer
        wrong = next((token for token in body.tokens if token >= size), None)
        if wrong is not None:
            raise InvalidRequest(f"the token {wrong} is not in the vocabulary; allowed: 0 to {size - 1:,}")
        text = await run_in_thread(lambda: str(tokenizer.decode(body.tokens)))
    return answered(DetokenizeAnswer(prompt=text))


async def show_version(_: Request) -> Response:
    """The version of the server."""
    return answered(Version(version=version("triolet")))
