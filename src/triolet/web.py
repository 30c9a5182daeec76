"""The help for web services with an engine, on Starlette, FastAPI and other ASGI frameworks, over asyncio and trio.

::

    app = FastAPI(lifespan=lifespan(partial(Engine, "openai/whisper-base")))
    app.add_middleware(EngineMiddleware, seconds=60)

    @app.post("/transcribe")
    async def transcribe(request: Request) -> dict[str, str]:
        transcript = await request.state.engine.transcribe(await request.body(), wait=False)
        return {"text": transcript.text}

The module imports no framework.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
from attrs import define, field, frozen

from .core.checks import checked, integer, number, settle
from .core.errors import RequestTooLarge, TrioletError
from .server.manners.paths import without_paths

__all__ = ["EngineMiddleware", "lifespan"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

_log = logging.getLogger("triolet.web")
_AHEAD = 16  # parts of a request that may wait for the application: a hang-up is noticed only after them
_SEND_SECONDS = 30.0  # for a client to take one part of an answer, the wait below included
_LINGER_SECONDS = 10.0  # for the rest of a request that is answered: many clients listen only when they have sent all
_GONE = (499, "ClientDisconnect", "a client hung up; its request is withdrawn")
_STOPS = (503, "ServerStops", "the server stops; ask again later")


def lifespan(
    make: Callable[[], AbstractAsyncContextManager[Any]],
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """Returns the ``lifespan=`` of an application. What ``make`` returns (an `Engine`, `Engines`, a cluster) is entered
    when the application starts, is ``request.state.engine``, and is left when the server has drained its requests."""

    @asynccontextmanager
    async def entered(_: object) -> AsyncIterator[dict[str, Any]]:
        async with make() as engine:
            yield {"engine": engine}

    return entered


@frozen
class EngineMiddleware:
    """An ASGI middleware that withdraws requests that nobody waits for, and answers Triolet's errors.

    If a client hangs up, or takes more than 30 seconds for one part of an answer, the application is cancelled in this
    request, whether it waits, streams or runs a group of tasks; so its requests to the engine are aborted. Behind 16
    parts of a request that the application has not read, a hang-up is noticed only when it reads on. Errors of Triolet
    that leave the application, alone or in a group, are answered as JSON with their ``http_status`` (the highest one of
    a group), as long as no part of the answer has been sent. WebSockets are passed on as they are.

    Args:
        app: the application.
        max_body_bytes: a request with more is cancelled and answered 413.
        seconds: the time until the answer must begin. Later the request is cancelled and answered 504, or 408 if it has
            not arrived. ``None``: no limit.
    """

    app: Application
    max_body_bytes: int = checked(64 * 2**20, integer(1, 2**50), kw_only=True)
    seconds: float | None = checked(None, number(0, math.inf, above=True).or_none("no limit"), kw_only=True)

    def __attrs_post_init__(self) -> None:
        settle(self)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serves a request, as ASGI has it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await _Exchange(self, receive, send).run(scope)


@define(eq=False)
class _Exchange:
    """One request and its answer. One task hears the client all the time, the other one is the application's."""

    _limits: EngineMiddleware
    _hear: Receive
    _say: Send
    _cut: tuple[int, str, str] | None = None  # why the application was cancelled: status, name, message
    _head: Message | None = None  # of the answer; waits for the first part, or gives way to an error
    _begun: bool = False
    _answered: bool = False
    _work: anyio.CancelScope = field(factory=anyio.CancelScope)
    _arrived: anyio.Event = field(factory=anyio.Event)  # the request, or as much of it as is heard
    _pipe: Any = field(factory=lambda: anyio.create_memory_object_stream[Message](_AHEAD))

    async def run(self, scope: MutableMapping[str, Any]) -> None:
        failure: Exception | None = None
        self._work.deadline = anyio.current_time() + (self._limits.seconds or math.inf)
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen)
            try:
                with self._pipe[0], self._pipe[1], self._work:
                    await self._limits.app(scope, self._receive, self._send)
            except Exception as error:  # noqa: BLE001  (raised below, in no group)
                failure = error
            except (anyio.get_cancelled_exc_class(), BaseExceptionGroup):  # a server that is forced to stop cancels all
                self._arrived.set()
                with anyio.CancelScope(shield=True):  # `_send` bounds it
                    await self._refuse(*_STOPS)
                raise
            failure = await self._end(failure)
            group.cancel_scope.cancel()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback has this frame

    async def _listen(self) -> None:
        most, size = self._limits.max_body_bytes, 0
        while (message := await self._hear())["type"] == "http.request":
            size += len(message.get("body", b""))
            if size > most:
                self._cut_off(413, RequestTooLarge.__name__, f"more than {most:,} bytes; send a smaller request")
            if not message.get("more_body", False) or size > 2 * most:
                self._arrived.set()
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody reads on
                await self._pipe[0].send(message)
        self._cut_off(*_GONE)
        self._arrived.set()

    async def _receive(self) -> Message:
        if not self._answered:
            with suppress(anyio.ClosedResourceError):  # the answer ended meanwhile
                message: Message = await self._pipe[1].receive()
                return message
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        """Sends a part whole, so that a cancellation meets the code that makes the next one, and unwinds it."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if message["type"] == "http.response.start":
            self._head = message
            return
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + _SEND_SECONDS) as patience:
            if self._head is not None:
                head, self._head, self._begun = self._head, None, True
                self._work.deadline = math.inf
                await self._say(head)
            if self._begun and not message.get("more_body", False):
                self._answered = True  # servers report the end of an answer like a hang-up
                message = await self._linger(message)
            await self._say(message)
        if patience.cancelled_caught:
            self._cut_off(*_GONE)

    async def _linger(self, last: Message) -> Message:
        self._pipe[1].close()
        if self._arrived.is_set():
            return last
        await self._say({**last, "more_body": True})
        with anyio.move_on_after(_LINGER_SECONDS):
            await self._arrived.wait()
        return {"type": "http.response.body", "body": b""}

    def _cut_off(self, *why: Any) -> None:
        if self._cut is None and not self._answered:
            self._cut = why
            self._work.cancel()

    async def _end(self, failure: Exception | None) -> Exception | None:
        """Answers in place of the application. Returns an error that the server has to report: one that is not
        Triolet's, or that came after the answer had begun."""
        found = [] if failure is None else _leaves(failure)
        if any(not isinstance(error, TrioletError) for error in found):
            return failure
        if self._cut is None and self._work.cancelled_caught:
            status = 504 if self._arrived.is_set() else 408
            self._arrived.set()
            self._cut = (status, "TimeLimit", f"no answer within {self._limits.seconds:g} seconds")
        why = self._cut
        if why is None and found and not self._begun:
            worst = max(found, key=lambda error: error.http_status)
            why = (worst.http_status, type(worst).__name__, without_paths(str(worst)))
        if why is None:
            return failure
        is_ours = why[0] == 500
        _log.log(logging.ERROR if is_ours else logging.INFO, "%s", why[2], exc_info=failure if is_ours else None)
        await self._refuse(*why)
        return None

    async def _refuse(self, status: int, name: str, message: str) -> None:
        if self._begun:
            return
        body = json.dumps({"error": name, "message": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"retry-after", b"1")] if status in (429, 503) else []
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _leaves(error: Exception) -> list[Any]:
    if not isinstance(error, ExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
