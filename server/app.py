"""The application: Starlette with the endpoints, inside the `Gate`."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from ..core.errors import TrioletError
from .endpoints.page import page_answer
from .endpoints.realtime import listen
from .endpoints.table import ENDPOINTS
from .exchange import Application, Exchange
from .gate import Gate
from .openapi import openapi
from .problems import Problem, Refusal, problem_answer
from .server import Server
from .view.docs import docs_page
from .view.page import HtmlPage

_LISTED = "GET /openapi.json lists the endpoints"


def make_app(server: Server) -> Application:
    """Returns the application that answers all requests of ``server``."""
    routes: list[BaseRoute] = [Route(one.path, one.handle, methods=[one.method]) for one in ENDPOINTS]
    routes.append(WebSocketRoute("/v1/realtime", listen))

    @cache  # it takes a third of a second
    def told() -> bytes:
        document = openapi(ENDPOINTS, version("triolet"), server.engines.names, keys=bool(server.settings.api_keys))
        return bytes(JSONResponse(document).body)

    async def document(_: Request) -> Response:
        return Response(await trio.to_thread.run_sync(told, limiter=server.reading), media_type="application/json")

    @cache
    def docs() -> HtmlPage:
        return docs_page(openapi(ENDPOINTS, version("triolet"), (), keys=bool(server.settings.api_keys)))

    async def read(_: Request) -> Response:
        return page_answer(await trio.to_thread.run_sync(docs, limiter=server.reading))

    routes += [Route("/openapi.json", document), Route("/docs", read)]
    handlers = dict.fromkeys((TrioletError, Refusal, HTTPException, ExceptionGroup, Exception), _explain)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.state.server = server
    gate: Any = Gate(server, app, routes)  # Starlette has other types for messages
    if server.settings.cors_origins:  # outside the gate, so that a page can read why it was refused
        gate = CORSMiddleware(
            gate,
            allow_origins=server.settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    whole: Application = gate
    return whole


async def _explain(connection: Request, error: Exception) -> Response:
    """Answers an error of a request. An error of a WebSocket, for which Starlette calls this function, too, is left to
    the gate."""
    if connection.scope["type"] != "http":
        try:
            raise error
        finally:
            del error  # a frame in its own error's traceback would be a reference cycle
    server: Server = connection.app.state.server
    exchange: Exchange = connection.scope["exchange"]
    if not isinstance(error, HTTPException):
        return problem_answer(server.explain(error, exchange.id, exchange.told))
    methods = Headers(error.headers).get("allow")  # the methods of a path that lacks this one
    hint = f"allowed: {', '.join(sorted(methods.split(', ')))}" if methods else _LISTED
    problem = Problem(error.status_code, f"{connection.method} {connection.url.path} is not an endpoint; {hint}")
    exchange.told["error"] = problem.word
    answer = problem_answer(problem)
    answer.headers.update(error.headers or {})
    return answer
