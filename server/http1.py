"""`Connection`: one connection of hypercorn's, HTTP/1.1 and WebSockets, with bounds that hypercorn does not have.

hypercorn unpacks a compressed message before it looks at its size, goes on keeping a message that is too large, waits
for ever to tell an application that has ended of the client's end, and does not hear a client go that has sent more
than one request.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import replace
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Response
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState, Scope
from hypercorn.utils import parse_socket_addr

from .framing import Framing

_ESTABLISHED = 1
_LOOK_SECONDS = 0.25


class Shared(WorkerContext):
    """The state that the connections of one server share. ``refused`` is called with the fault of a client's bytes."""

    def __init__(self, refused: Callable[[str], None]) -> None:
        super().__init__(None)
        self.refused = refused
        self.ends = False  # each answer is the last of its connection


class Connection(TCPServer):
    """hypercorn's connection, with `_Protocol` in place of the choice of protocols."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tasks = _Tasks()

    async def run(self) -> None:
        """Serves the connection to its end."""
        stream: Any = self.stream
        tls = isinstance(stream, trio.SSLStream)
        connected = (stream.transport_stream if tls else stream).socket
        try:
            if tls:
                with trio.fail_after(self.config.ssl_handshake_timeout):
                    await stream.do_handshake()
            client, server = connected.getpeername(), connected.getsockname()
            async with self._tasks as tasks:
                self._task_group = tasks
                self.protocol: Any = _Protocol(
                    connected,
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    tls,
                    parse_socket_addr(connected.family, client),
                    parse_socket_addr(connected.family, server),
                    self.protocol_send,
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):  # the client is gone, or was never there
            return
        finally:
            await self._close()

    async def _read_data(self) -> None:
        """Reads from the client to its end. hypercorn's tasks that wait for a time would outlast it, and keep the
        connection counted."""
        try:
            await super()._read_data()
        except trio.BrokenResourceError:  # raised by `_Turn`
            await self.protocol.handle(Closed())
        self._tasks.beside.cancel()
        await self.idle_task.stop()


class _Tasks(TaskGroup):
    """The tasks of one connection: the application, and in ``beside`` those that last as long as the client.

    The messages of a WebSocket have no bound between hypercorn and the application: where hypercorn waits for room,
    it does not hear that the client has gone. The application takes each at once."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = trio.CancelScope()

    def spawn(self, func: Callable[..., Awaitable[object]], *args: Any) -> None:
        async def run() -> None:
            with self.beside:
                await func(*args)

        super().spawn(run)

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Scope, send: Callable[[ASGISendEvent | None], Awaitable[None]]
    ) -> Callable[[ASGIReceiveEvent], Awaitable[None]]:
        if scope["type"] == "websocket":
            without_bound: Any = copy(config)
            without_bound.max_app_queue_size = math.inf
            config = without_bound
        return await super().spawn_app(app, config, scope, send)


class _Protocol(H11Protocol):
    """HTTP/1.1 alone, and WebSockets whose messages are as large as they look. Whatever a client asks for, the
    connection stays what it is: in HTTP/2 one could hold any number of answers that it does not read."""

    context: Shared
    connection: Any

    def __init__(self, client: trio.socket.SocketType, *args: Any) -> None:
        super().__init__(*args)
        self.can_read = _Turn(client)
        self.connection = _Requests(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
        self._framing = Framing()
        self._answers = False  # the last request, or has answered it

    async def handle(self, event: Any) -> None:
        """Has requests read as far as `Framing` lets them pass; after a WebSocket's request come frames.

        After a message that is too large nothing is read any more. hypercorn has sent the reason (1009); the client has
        as long to close the connection as one that is idle."""
        if isinstance(event, RawData) and event.data and isinstance(self.connection, h11.Connection):
            event = RawData(data=self._passed(event.data))
            if not event.data:  # which would be the client's end
                return
        elif isinstance(event, RawData) and event.data and self._is_opening():
            await self._refuse_frames()
            return
        elif isinstance(event, RawData) and event.data and self._is_denied():
            return
        await super().handle(event)
        if isinstance(self.stream, WSStream) and self.stream.buffer.length > self.stream.buffer.max_length:
            await self._close_stream()
            await self.send(Updated(idle=True))

    def _passed(self, data: bytes) -> bytes:
        known = self._framing.fault
        passed = self._framing.passed(data)
        if self._framing.fault is not None and known is None:
            self.context.refused(self._framing.fault)
        return passed

    def _is_opening(self) -> bool:
        """True if a WebSocket was asked for, and the request is not answered yet."""
        return isinstance(self.stream, WSStream) and not self.stream.closed and not self._answers

    def _is_denied(self) -> bool:
        """True if the request for a WebSocket got another answer. hypercorn would answer frames once more."""
        return isinstance(self.stream, WSStream) and self._answers and not self.stream.handshake.accepted

    async def _refuse_frames(self) -> None:
        """A client may send frames when it is told that the WebSocket is open (RFC 6455, section 4.1). hypercorn sends
        its refusal and lets the application go on meanwhile, whose answer h11 then takes for a fault of ours."""
        stream: Any = self.stream
        stream.closed = True  # nothing of the application is sent any more
        stream.scope["refused"] = 400
        self.context.refused("frames before the WebSocket was open")
        await stream._send_error_response(400)
        await stream.app_put({"type": "websocket.disconnect", "code": 1002})
        await self.send(Closed())

    async def stream_send(self, event: Any) -> None:
        """Sends a part of an answer. A server that ends keeps no connection."""
        self._answers = self._answers or isinstance(event, Response)
        if self.context.ends and isinstance(event, Response) and event.status_code >= 200:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _check_protocol(self, event: Any) -> None:
        """Never another protocol."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Removes the extensions of a request for a WebSocket: permessage-deflate is one."""
        self._answers = False
        headers = [(name, value) for name, value in request.headers if name != b"sec-websocket-extensions"]
        plain = h11.Request(
            method=request.method, headers=headers, target=request.target, http_version=request.http_version
        )
        await super()._create_stream(plain)
        if self._is_opening() and self.connection.buffer:
            await self._refuse_frames()


class _Requests(h11.Connection):
    """h11 takes it for a fault that a client has sent another request before it was told that the answer to this one is
    the connection's last, and hypercorn would cut that answer off."""

    def next_event(self) -> Any:
        """Returns the next event, and pauses where h11 would find a fault."""
        if self.their_state is h11.MUST_CLOSE and self.trailing_data[0]:
            return h11.PAUSED
        return super().next_event()


class _Turn(EventWrapper):
    """hypercorn waits for it where a client has sent its next request before it has the answer to this one. Meanwhile
    nothing is read, and so nobody would hear the client go."""

    def __init__(self, client: trio.socket.SocketType) -> None:
        super().__init__()
        self._client = client

    async def wait(self) -> None:
        """Waits until the answer is complete.

        Raises:
            trio.BrokenResourceError: the client has gone.
        """
        while not self.is_set():
            with trio.move_on_after(_LOOK_SECONDS):
                await super().wait()
            if not _is_there(self._client):
                raise trio.BrokenResourceError("the client closed its side, and sent more than one request before")


def _is_there(client: trio.socket.SocketType) -> bool:
    """True if a client has not closed its side, as far as the system says, though what it has sent was not read yet
    (tcp(7): TCP_INFO begins with the state)."""
    if not hasattr(socket, "TCP_INFO"):
        return True
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False
