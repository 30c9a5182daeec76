"""The functions that endpoints share."""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractAsyncContextManager

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.prompts import Query
from ..exchange import Exchange
from ..server import Server


def server_of(request: Request) -> Server:
    """Returns the server that has received the request."""
    server: Server = request.app.state.server
    return server


def exchange_of(request: Request) -> Exchange:
    """Returns the exchange to which the request belongs."""
    exchange: Exchange = request.scope["exchange"]
    return exchange


def engine_of(request: Request, model: str) -> AbstractAsyncContextManager[Engine]:
    """Returns `Server.use` of ``model``, and notes the name of the model for the access log."""
    exchange_of(request).told["model"] = model
    return server_of(request).use(model)


def new_id(prefix: str) -> str:
    """Returns a new id for an answer, or a part of one, with the prefix that OpenAI's ids have."""
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Returns the present time for answers, in seconds since 1970."""
    return int(time.time())


async def tokens_of(engine: Engine, query: Query) -> list[int]:
    """Returns the prompt of ``query`` in tokens, as the model would read it."""
    [request] = await engine.inside.requests_of(query)
    return list(request.prompt_token_ids)


def answered(body: BaseModel) -> Response:
    """Returns ``body`` as JSON, without members that were never set."""
    return Response(body.model_dump_json(by_alias=True, exclude_unset=True), media_type="application/json")
