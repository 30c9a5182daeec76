"""The application: the endpoints on Starlette, within the `Gate`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from ..core.errors import TrioletError
from .endpoints.realtime import listen
from .endpoints.table import ENDPOINTS
from .exchange import Application
from .gate import Gate
from .openapi import openapi
from .problems import Refusal, explain
from .server import Server


def make_app(server: Server) -> Application:
    """Returns the application that answers all requests of ``server``."""
    routes: list[BaseRoute] = [Route(one.path, one.handle, methods=[one.method]) for one in ENDPOINTS]
    routes.append(WebSocketRoute("/v1/realtime", listen))
    routes.append(Route("/openapi.json", _document(server)))
    handlers = dict.fromkeys((TrioletError, Refusal, HTTPException, ExceptionGroup, Exception), _explain)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.server = server
    return _with_cors(Gate(server, app), server.settings.cors_origins)


async def _explain(connection: Request, error: Exception) -> Response:
    """Answers errors of requests. Those of WebSockets, which Starlette brings here too, are left to the gate."""
    if connection.scope["type"] == "http":
        return await explain(connection, error)
    try:
        raise error
    finally:
        del error  # a frame in its own error's traceback would be a reference cycle


def _document(server: Server) -> Callable[[Request], Awaitable[Response]]:
    told = openapi(ENDPOINTS, version("triolet"), server.engines.names, keys=bool(server.settings.api_keys))

    async def document(_: Request) -> Response:
        return JSONResponse(told)

    return document


def _with_cors(gate: Application, origins: tuple[str, ...]) -> Application:
    """Puts CORS around the gate: else a page could not read why it was refused."""
    if not origins:
        return gate
    exposed = ["x-request-id", "retry-after"]
    inner: Any = gate  # Starlette types its messages otherwise
    made: Any = CORSMiddleware(
        inner, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
    )
    app: Application = made
    return app
