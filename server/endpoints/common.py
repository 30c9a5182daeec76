"""The functions that endpoints share."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ...api.engine import Engine
from ...api.inputs.prompts import Query
from ..exchange import Exchange
from ..server import Server

_LONGEST_IN_HEADER, _MOST_IN_HEADER = 500, 4_096  # characters of one sentence, and of a header
_OF_LAST = 32  # characters, for the number of sentences that are left out


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
    exchange = exchange_of(request)
    exchange.told["model"] = model
    return server_of(request).use(model, exchange)


def new_id(prefix: str) -> str:
    """Returns a new id for an answer, or a part of one, with the prefix that OpenAI's ids have."""
    return prefix + secrets.token_hex(12)


def now() -> int:
    """Returns the present time for answers, in seconds since 1970."""
    return int(time.time())


def in_header(sentences: Sequence[str]) -> str:
    """Returns sentences as the value of a header: a list in JSON, in printable ASCII alone, of up to `_MOST_IN_HEADER`
    characters. If not all fit, the last item says how many are left out."""
    items, size = list[str](), 0
    for each in sentences:
        told = each if len(each) <= _LONGEST_IN_HEADER else f"{each[:_LONGEST_IN_HEADER]}..."
        item = json.dumps(told).replace("\x7f", "\\u007f")
        size += len(item) + 2
        if size > _MOST_IN_HEADER - _OF_LAST:
            items.append(f'"and {len(sentences) - len(items)} more"')
            break
        items.append(item)
    return f"[{', '.join(items)}]"


async def tokens_of(engine: Engine, query: Query) -> list[int]:
    """Returns the prompt of ``query`` in tokens, as the model would read it."""
    first, *_ = await engine.inside.requests_of(query)  # one for each of `n` answers, all of the same prompt
    return list(first.prompt_token_ids)


def answered(body: BaseModel) -> Response:
    """Returns ``body`` as JSON, without members that were never set."""
    return Response(body.model_dump_json(by_alias=True, exclude_unset=True), media_type="application/json")
