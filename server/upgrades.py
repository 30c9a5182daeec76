"""WebSockets on hypercorn's HTTP/1.1, with bounds that hypercorn does not have.

hypercorn unpacks a compressed message before it looks at its size, goes on keeping a message that is too large, and
waits for ever to tell an application that has ended of the client's end.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any

import h11
from hypercorn.config import Config
from hypercorn.events import Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, Scope


class SocketTasks(TaskGroup):
    """The messages of a WebSocket have no bound between hypercorn and the application: where hypercorn waits for room,
    it does not hear that the client has gone. The application takes each at once."""

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        if scope["type"] == "websocket":
            without_bound: Any = copy(config)
            without_bound.max_app_queue_size = math.inf
            config = without_bound
        return await super().spawn_app(app, config, scope, send)


class SocketProtocol(H11Protocol):
    """HTTP/1.1, and WebSockets whose messages are as large as they look."""

    async def handle(self, event: Any) -> None:
        """Behind a message that is too large nothing is read any more. hypercorn has told so (1009); the client has as
        long to close the connection as one that is idle."""
        await super().handle(event)
        if isinstance(self.stream, WSStream) and self.stream.buffer.length > self.stream.buffer.max_length:
            await self._close_stream()
            await self.send(Updated(idle=True))

    async def _create_stream(self, request: h11.Request) -> None:
        """Without extensions: permessage-deflate is one."""
        headers = [(name, value) for name, value in request.headers if name != b"sec-websocket-extensions"]
        plain = h11.Request(
            method=request.method, headers=headers, target=request.target, http_version=request.http_version
        )
        await super()._create_stream(plain)
