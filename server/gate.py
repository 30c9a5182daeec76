"""`Gate`: makes an `Exchange` of each request, and admits the clients that the settings allow.

`Opening` answers a client that asks for a WebSocket, before the WebSocket is open.
"""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import trio
from attrs import define, field
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match

from .exchange import GONE, Application, Exchange, Message, Receive, Send
from .manners.keys import Keys, presented_key
from .manners.limits import RateLimit
from .manners.origins import host_fault, origin_fault
from .problems import Problem, problem_answer, problem_of
from .server import Server

_access = logging.getLogger("triolet.access")
_log = logging.getLogger("triolet.server")
_OPEN = frozenset({"/", "/docs", "/health", "/favicon.ico"})  # open without a key: they show nothing about requests
_ALWAYS = frozenset({"/health", "/metrics"})  # answered in the reserved places
_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_INTERNAL_ERROR = 1011  # RFC 6455, section 7.4.1


@define(eq=False)
class Opening:
    """Stands between hypercorn and the application, as an `Exchange` does. Once the WebSocket is open, messages pass
    unchanged."""

    scope: MutableMapping[str, Any]
    id: str
    _hear: Receive
    _say: Send
    status: int | None = field(default=None, init=False)  # of HTTP; None: the answer has not begun

    async def send(self, message: Message) -> None:
        """Sends a message of the application. If the application closes a WebSocket that it has not accepted, there is
        none at this path, and the client gets 404."""
        if message["type"] == "websocket.close" and self.status is None:
            await self.refuse(Problem(404, f"{self.scope['path']} is not a WebSocket; allowed: /v1/realtime"))
            return
        if message["type"] in ("websocket.accept", "websocket.http.response.start"):
            self.status = message.get("status", 101)
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        await self._say(message)

    async def refuse(self, problem: Problem) -> None:
        """Answers with ``problem``, as to any HTTP request."""
        await problem_answer(problem)(self.scope, self._hear, self.send)

    async def fail(self, problem: Problem) -> None:
        """Tells the client, if it is still there, that the application has failed."""
        if self.status is None:
            await self.refuse(problem)
        else:
            await self._say({"type": "websocket.close", "code": _INTERNAL_ERROR, "reason": problem.message})


class Gate:
    """The outermost ASGI application."""

    def __init__(self, server: Server, inner: Application, routes: Sequence[BaseRoute] = ()) -> None:
        settings = server.settings
        self._server = server
        self._inner = inner
        self._routes = routes
        self._keys = Keys(settings.api_keys)
        self._rate = None if settings.requests_per_minute is None else RateLimit(settings.requests_per_minute)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] == "websocket":
            await self._open_socket(scope, headers, receive, send)
            return
        account = self._server.budget.account()
        exchange = Exchange(scope, self._server.settings, _request_id(headers), receive, send, account)
        scope["exchange"] = exchange
        begun = trio.current_time()
        try:
            problem = self._refusal(scope, headers, exchange.told)
            if problem is None:
                if not _is_open(scope):  # otherwise callers without a key could use up the places and delay the end
                    self._server.exchanges.add(exchange)
                    if _is_counted(scope):
                        self._server.counted.add(exchange)
                await exchange.run(self._pass, unheard=_is_open(scope) and _has_body(headers))
            else:
                exchange.told["error"] = problem.word
                await exchange.run(problem_answer(problem), unheard=True)
        finally:
            account.close()
            self._server.exchange_over(exchange)
            self._over(exchange, headers, trio.current_time() - begun)

    async def _pass(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["exchange"]
        try:
            await self._inner(scope, receive, send)
        except Exception as error:  # noqa: BLE001  (no error of one request ends the server)
            if "error" not in exchange.told:
                _log.exception("%s failed", exchange.id)
            if exchange.status is None:
                await problem_answer(problem_of(error))(scope, receive, send)

    async def _open_socket(
        self, scope: MutableMapping[str, Any], headers: Headers, receive: Receive, send: Send
    ) -> None:
        opening, told = Opening(scope, _request_id(headers), receive, send), dict[str, object]()
        begun = trio.current_time()
        try:
            problem = self._refusal(scope, headers, told)
            if problem is None:
                scope["request_id"] = opening.id
                await self._inner(scope, receive, opening.send)
            else:
                told["error"] = problem.word
                await opening.refuse(problem)
        except Exception as error:  # noqa: BLE001  (no error of one WebSocket ends the server)
            _log.exception("%s failed", opening.id)
            await opening.fail(problem_of(error))
        finally:
            seconds, status = trio.current_time() - begun, scope.get("refused", opening.status)
            self._server.metrics.answered(self._endpoint(scope), "GET", status or GONE, seconds)
            self._tell(scope, headers, seconds, {"id": opening.id, "status": status, **told})

    # -- who may enter ---------------------------------------------------------------------------------------------

    def _refusal(self, scope: MutableMapping[str, Any], headers: Headers, told: dict[str, object]) -> Problem | None:
        settings = self._server.settings
        fault = origin_fault(headers.get("origin"), headers.get("host"), settings.cors_origins)
        if fault is None and settings.is_local and not self._keys:
            fault = host_fault(headers.get("host"))
        if fault is not None:
            return Problem(403, fault)
        if scope.get("state", {}).get("reserved") and scope["path"] not in _ALWAYS:
            most = f"all {settings.max_connections} connections are in use; try again later"
            return Problem(503, most, "overloaded", retry_after=1)
        address = str((scope.get("client") or ("somebody",))[0])
        who, wait = self._judged(presented_key(headers.get("authorization"), scope.get("subprotocols", ())), address)
        scope["knows_key"] = who is not None or not self._keys
        if _is_open(scope):
            return None
        if wait:
            why = f"{address} has sent too many wrong API keys; wait {wait:.1f} s"
            return Problem(429, why, retry_after=math.ceil(wait))
        if self._keys and who is None:
            return Problem(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        told["who"] = who or address
        return self._busy(scope, who or address)

    def _judged(self, key: str | None, address: str) -> tuple[str | None, float]:
        """Returns the owner of ``key``, and the seconds until the key may be judged: 0 unless there were too many wrong
        keys."""
        who = self._keys.who(key)
        if key is None or not self._keys:
            return who, 0.0
        wait = self._server.wrong_keys.seconds_to_wait(address, who, trio.current_time())
        return (None if wait else who), wait

    def _busy(self, scope: MutableMapping[str, Any], who: str) -> Problem | None:
        if self._server.stopping:
            return Problem(503, "the server is stopping; try again later, or another server", "stopping", retry_after=5)
        if not _is_counted(scope):
            return None
        most = self._server.settings.max_requests
        if len(self._server.counted) + len(self._server.sockets) >= most:
            wait = self._server.pace.seconds_to_wait(trio.current_time())
            return Problem(
                429,
                f"{most} requests already run or wait, the most that are allowed; try again later",
                "overloaded",
                retry_after=wait,
            )
        seconds = self._rate.seconds_to_wait(who, trio.current_time()) if self._rate is not None else 0.0
        if seconds:
            told = (
                f"more than {self._rate.per_minute if self._rate else 0} requests came within a minute; wait "
                f"{seconds:.1f} s"
            )
            return Problem(429, told, retry_after=math.ceil(seconds))
        return None

    def _over(self, exchange: Exchange, headers: Headers, seconds: float) -> None:
        """Reports the end of an exchange to the metrics, the spans and the access log."""
        scope, cut = exchange.scope, exchange.cut
        told = {
            "id": exchange.id,
            "status": exchange.outcome,
            "bytes_in": exchange.bytes_in,
            "bytes_out": exchange.bytes_out,
            **exchange.told,
            **({"cut": cut.value} if cut else {}),
        }
        path = self._endpoint(scope)
        self._server.metrics.answered(path, scope["method"], exchange.outcome, seconds)
        self._server.metrics.timed(str(exchange.told.get("model")), exchange.timings)
        self._server.spans.tell(f"{scope['method']} {path or scope['path']}", headers, seconds, exchange.timings, told)
        self._tell(scope, headers, seconds, told)

    def _endpoint(self, scope: MutableMapping[str, Any]) -> str | None:
        """Returns the path of the endpoint, also of a request that was refused before it reached one."""
        found = (route for route in self._routes if route.matches(scope)[0] is not Match.NONE)
        return getattr(scope.get("route") or next(found, None), "path", None)

    # -- the access log --------------------------------------------------------------------------------------------

    def _tell(
        self, scope: MutableMapping[str, Any], headers: Headers, seconds: float, told: Mapping[str, object]
    ) -> None:
        if not self._server.settings.access_log:
            return
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": (scope.get("client") or (None,))[0],
            "method": scope.get("method", "GET"),
            "path": scope["path"],
            "seconds": round(seconds, 4),
            "agent": headers.get("user-agent"),
            **told,
        }
        _access.info("%s", json.dumps(line, ensure_ascii=True, default=str))


def _is_open(scope: MutableMapping[str, Any]) -> bool:
    return scope["path"] in _OPEN or scope.get("method") == "OPTIONS"


def _is_counted(scope: MutableMapping[str, Any]) -> bool:
    """True if the request counts against the limits."""
    return scope.get("method") != "GET"


def _has_body(headers: Headers) -> bool:
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else f"req-{secrets.token_hex(8)}"
