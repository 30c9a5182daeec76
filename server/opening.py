"""`Opening`: the answers to a client that asks for a WebSocket, before it is open."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from attrs import define, field

from .exchange import Message, Receive, Send
from .problems import Problem, problem_answer

_INTERNAL_ERROR = 1011  # RFC 6455, section 7.4.1


@define(eq=False)
class Opening:
    """Stands between hypercorn and the application, as an `Exchange` does. Once it is open, messages pass."""

    scope: MutableMapping[str, Any]
    id: str
    _hear: Receive
    _say: Send
    status: int | None = field(default=None, init=False)  # of HTTP; None: no answer has begun

    async def send(self, message: Message) -> None:
        """Sends what the application says. An application that closes what it has not accepted has no WebSocket at the
        path."""
        if message["type"] == "websocket.close" and self.status is None:
            await self.refuse(Problem(404, f"{self.scope['path']} is no WebSocket; allowed: /v1/realtime"))
            return
        if message["type"] in ("websocket.accept", "websocket.http.response.start"):
            self.status = message.get("status", 101)
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", self.id.encode())]}
        await self._say(message)

    async def refuse(self, problem: Problem) -> None:
        """Answers ``problem``, as to any request."""
        await problem_answer(problem)(self.scope, self._hear, self.send)

    async def fail(self, problem: Problem) -> None:
        """Sends that the application has failed, if anybody is there."""
        if self.status is None:
            await self.refuse(problem)
        else:
            await self._say({"type": "websocket.close", "code": _INTERNAL_ERROR, "reason": problem.message})
