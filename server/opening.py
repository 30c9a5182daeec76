"""`Opening`: answers a client that asks for a WebSocket, before the WebSocket is open."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from attrs import define, field

from .exchange import Message, Receive, Send
from .problems import Problem, problem_answer

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
