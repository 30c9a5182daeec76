"""`EventStream`: an answer as server-sent events (WHATWG HTML, section 9.2), sent while the work goes on."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .problems import Problem, problem_answer

DONE = "[DONE]"


class Events:
    """The events of one answer, which the work writes. The answer begins with the first event: if the request fails
    before that, the answer has the status of the failure."""

    def __init__(self, send: Send, *, named: bool) -> None:
        self._send = send
        self._named = named
        self.begun = False

    async def write(self, event: BaseModel | Mapping[str, Any] | str, *, last: bool = False) -> None:
        """Sends one event; a text is sent unchanged. If events are named, the name of an event is its ``type``. With
        ``last`` the end of the answer is sent together with the event, since clients that know the last event leave at
        once."""
        if not self.begun:
            await self.begin()
        await self._send({"type": "http.response.body", "body": self.encode(event), "more_body": not last})

    async def begin(self) -> None:
        """Begins the answer: sends the status and the headers."""
        self.begun = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # otherwise nginx holds events back
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def encode(self, event: BaseModel | Mapping[str, Any] | str) -> bytes:
        """Returns the bytes of one event."""
        if isinstance(event, str):
            return f"data: {event}\n\n".encode()
        told = (
            event.model_dump(mode="json", by_alias=True, exclude_unset=True) if isinstance(event, BaseModel) else event
        )
        name = f"event: {told['type']}\n" if self._named else ""
        return f"{name}data: {json.dumps(told, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class EventStream(Response):
    """An answer whose events ``work`` writes, up to the last one, while the answer is sent. If the work fails after the
    first event, the last event says why. If the exchange is cut, its hooks send such an event."""

    def __init__(self, work: Callable[[Events], Awaitable[None]], *, named: bool = False) -> None:
        super().__init__()
        self._work = work
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events, exchange = Events(send, named=self._named), scope["exchange"]
        if scope["method"] == "HEAD":
            await events.begin()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return

        def last_words(problem: Problem) -> bytes:
            return events.encode({"type": "error", **problem.as_object()})

        exchange.last_words = last_words
        try:
            await self._work(events)
        except Exception as error:  # noqa: BLE001  (the client gets any error)
            problem = scope["app"].state.server.explain(error, exchange.id, exchange.told)
            if not events.begun:
                await problem_answer(problem)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": last_words(problem), "more_body": False})
