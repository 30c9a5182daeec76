"""``/tokenize``, ``/detokenize`` and ``/version``."""

from __future__ import annotations

from importlib.metadata import version

from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.prompts import Query
from ...api.inputs.threads import run_in_thread
from ...core.errors import InvalidRequest
from ...core.tools import read_tools
from ..body import read_json
from ..schemas.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest, Version
from .chat import asked
from .common import answered, engine_of


async def tokenize(request: Request) -> Response:
    """The tokens of a prompt or a conversation, as the model would read them."""
    body = await read_json(request, TokenizeRequest)
    if body.messages is None:
        async with engine_of(request, body.model) as engine:
            return await _counted(engine, Query(prompt=body.prompt))
    async with asked(request, body.as_chat()) as (engine, _, query):
        return await _counted(engine, Query(**{**query, "tools": read_tools(query["tools"])}))


async def _counted(engine: Engine, query: Query) -> Response:
    [read] = await engine.inside.requests_of(query)
    tokens = list(read.prompt_token_ids)
    return answered(TokenizeAnswer(count=len(tokens), max_model_len=engine.model.max_positions, tokens=tokens))


async def detokenize(request: Request) -> Response:
    """The text of tokens, with special ones."""
    body = await read_json(request, DetokenizeRequest)
    async with engine_of(request, body.model) as engine:
        size, tokenizer = engine.model.vocabulary_size, engine.model.tokenizer
        wrong = next((token for token in body.tokens if token >= size), None)
        if wrong is not None:
            raise InvalidRequest(f"token {wrong}; allowed: 0 to {size - 1:,}")
        text = await run_in_thread(lambda: str(tokenizer.decode(body.tokens)))
    return answered(DetokenizeAnswer(prompt=text))


async def show_version(_: Request) -> Response:
    """The version of the server."""
    return answered(Version(version=version("triolet")))
