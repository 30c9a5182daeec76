"""What endpoints share."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse

from ...api.engine import Engine
from ..exchange import Exchange
from ..server import Server


def server_of(request: Request) -> Server:
    """The server that the request came to."""
    server: Server = request.app.state.server
    return server


def exchange_of(request: Request) -> Exchange:
    """The exchange that the request is a part of."""
    exchange: Exchange = request.scope["exchange"]
    return exchange


@asynccontextmanager
async def engine_of(request: Request, model: str) -> AsyncIterator[Engine]:
    """See `Server.use`."""
    exchange_of(request).told["model"] = model
    async with server_of(request).use(model) as engine:
        yield engine


def new_id(kind: str) -> str:
    """A name for an answer."""
    return f"{kind}-{secrets.token_hex(12)}"


def now() -> int:
    """Seconds of the calendar, as answers tell them."""
    return int(time.time())


def answered(body: BaseModel, *, unset: bool = False) -> JSONResponse:
    """``body`` as JSON, without members that were never set (with ``unset``: with them)."""
    return JSONResponse(body.model_dump(mode="json", by_alias=True, exclude_unset=not unset))
