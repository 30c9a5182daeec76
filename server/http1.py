"""`Connection`: one connection of hypercorn, for HTTP/1.1 and WebSockets, with bounds that hypercorn lacks.

hypercorn unpacks a compressed message before it checks the size, and goes on storing a message that is too large. It
waits for ever to report the client's end to an application that has ended. And it does not notice that a client has
gone if the client has sent more than one request.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Response, StreamClosed
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.protocol.ws_stream import FrameTooLargeError, WSStream
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import AppWrapper, ASGIReceiveEvent, ASGISendEvent, ConnectionState, Scope
from hypercorn.utils import parse_socket_addr
from wsproto.connection import ConnectionState as WebSocketState
from wsproto.events import CloseConnection, Message
from wsproto.events import Ping as SocketPing

from ..core.budget import Budget
from ..core.errors import CallerError
from .framing import Framing
from .manners.limits import RateLimit

_ESTABLISHED = 1
_HEALTH = b"GET /health "  # waits for no turn
_LOOK_SECONDS = 0.25
_MOST_FRAMES = 60_000  # of a WebSocket at once, and in each later minute
_MOST_FRAGMENTS = 1_024  # of one message
_AT_ONCE = 16  # frames of a WebSocket that are handled before others get a turn
_TOO_BIG, _POLICY, _LATER = 1009, 1008, 1013  # RFC 6455, section 7.4.1, and IANA's registry


class Shared(WorkerContext):
    """The state that all connections of one server share. ``refused`` is called with a text if a client sends bytes
    that are refused. ``budget``: of the messages that have not wholly come."""

    def __init__(self, refused: Callable[[str], None], budget: Budget) -> None:
        super().__init__(None)
        self.refused = refused
        self.budget = budget
        self.ends = False  # true: each answer is the last of its connection
        self._first, self._turns = trio.Lock(), trio.Lock()

    async def turn(self, *, first: bool = False) -> None:
        """Waits for a turn. In each round of the event loop one connection gets one for its first request, and one
        gets one for a later piece of what it sends, or for its end. So many that come, send or leave at once, or send
        much that is tiny, share what two alone would take of a round, and ``/health`` is answered in between."""
        async with self._first if first else self._turns:
            pass


class Connection(TCPServer):
    """hypercorn's connection. It always uses `_Protocol`, where hypercorn chooses among protocols."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tasks = _Tasks()
        self.protocol: Any = None
        self._begun = trio.current_time()

    @property
    def waits_since(self) -> tuple[bool, float] | None:
        """The time since which the server waits for the client: for a whole head (``False``), or for the rest of a body
        (``True``). ``None``: the client waits for the server, or has a WebSocket."""
        state = h11.IDLE if self.protocol is None else self.protocol.connection.their_state
        since = self._begun if self.protocol is None else self.protocol.changed
        return (state is h11.SEND_BODY, since) if state in (h11.IDLE, h11.SEND_BODY) else None

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
                self.protocol = _Protocol(
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
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):  # the client has gone, or was never connected
            return
        finally:
            if self.protocol is not None:
                self.protocol.account.close()
            await self._close()

    async def _read_data(self) -> None:
        """Reads from the client until it has gone. Then it cancels hypercorn's tasks that wait for a timeout: the
        connection would count as open until they end."""
        try:
            await super()._read_data()
        except trio.BrokenResourceError:  # raised by `_NextRequest`
            await self.protocol.handle(Closed())
        self._tasks.beside.cancel()
        await self.idle_task.stop()


class _Tasks(TaskGroup):
    """The tasks of one connection: the application, and within the scope ``beside`` the tasks that end when the client
    has gone.

    The queue of a WebSocket's messages between hypercorn and the application has no bound: if hypercorn waited for
    room, it would not notice that the client has gone. The application takes each message at once."""

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
    """The protocol: only HTTP/1.1 and WebSockets without compression. A client cannot change to HTTP/2, where it could
    leave any number of answers unread."""

    context: Shared
    connection: Any

    def __init__(self, client: trio.socket.SocketType, *args: Any) -> None:
        super().__init__(*args)
        self.can_read = _NextRequest(client)
        self.connection = _Requests(h11.SERVER, max_incomplete_event_size=self.config.h11_max_incomplete_size)
        self.account = self.context.budget.account()
        self._framing = Framing()
        self._frames = RateLimit(_MOST_FRAMES)
        self._fragments = 0  # of the message that has not wholly come
        self._gave_up = False  # on the WebSocket
        self._answers = False  # the answer to the last request has begun
        self.changed = trio.current_time()  # when the last request began or ended

    async def handle(self, event: Any) -> None:
        """Passes an event on to hypercorn. Of a client's bytes h11 reads only those that `Framing` passes; after the
        request for a WebSocket, bytes are frames.

        After a message that is too large nothing more is read. hypercorn has sent the reason (1009), and the client has
        the time of an idle connection to close."""
        if isinstance(event, RawData) and event.data:
            if isinstance(self.connection, h11.Connection):
                await self._read(event.data)
                return
            if self._is_opening():
                await self._refuse_frames()
                return
            if self._is_denied():
                return
        else:
            await self.context.turn()
        await super().handle(event)
        if isinstance(self.stream, WSStream) and self._gave_up:
            await self._close_stream()
            await self.send(Updated(idle=True))

    async def _read(self, data: bytes) -> None:
        """Passes ``data`` on in pieces of few lines, between which others get a turn."""
        while isinstance(self.connection, h11.Connection):
            if self.keep_alive_requests or not data.startswith(_HEALTH):
                await self.context.turn(first=not self.keep_alive_requests)
            known = self._framing.fault
            passed = self._framing.passed(data)
            if self._framing.fault is not None and known is None:
                self.context.refused(self._framing.fault)
            if passed:  # no bytes would mean the end of the client
                await super().handle(RawData(data=passed))
            data = b""
            if not self._framing.has_more:
                return
        await self._refuse_frames()

    async def _handle_frames(self, stream: Any) -> None:
        """Handles the frames that have come, in place of `WSStream._handle_events`: a few at a time, and no more than a
        client needs. The memory for a message that has not wholly come is taken from the budget."""
        for number, event in enumerate(stream.connection.events()):
            if number % _AT_ONCE == 0:
                await self.context.turn()
            if self._frames.seconds_to_wait("", trio.current_time()):
                await self._give_up(stream, _POLICY, f"more than {_MOST_FRAMES:,} frames came within a minute")
            elif isinstance(event, Message):
                await self._add(stream, event)
            elif isinstance(event, SocketPing):
                await stream._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                if stream.connection.state is WebSocketState.REMOTE_CLOSING:
                    await stream._send_wsproto_event(event.response())
                elif stream.connection.state is WebSocketState.OPEN:  # the client broke the protocol: it is told how
                    await stream._send_wsproto_event(event)
                await stream.send(StreamClosed(stream_id=stream.stream_id))
            if self._gave_up:
                return

    async def _add(self, stream: Any, event: Any) -> None:
        """Adds a piece of a message."""
        self._fragments += event.frame_finished
        try:
            self.account.take(0 if event.message_finished else len(event.data))
            stream.buffer.extend(event)
        except FrameTooLargeError:
            await self._give_up(stream, _TOO_BIG)
        except CallerError:
            await self._give_up(stream, _LATER, "the server has no memory for the message; try again later")
        if self._fragments > _MOST_FRAGMENTS and not self._gave_up:
            await self._give_up(stream, _POLICY, f"a message has more than {_MOST_FRAGMENTS:,} fragments")
        if event.message_finished and not self._gave_up:
            await stream.app_put(stream.buffer.to_message())
            stream.buffer.clear()
            self._fragments = 0
            self.account.give(self.account.held)

    async def _give_up(self, stream: Any, code: int, why: str | None = None) -> None:
        self._gave_up = True
        self.account.give(self.account.held)
        await stream._send_wsproto_event(CloseConnection(code=code, reason=why))

    def _is_opening(self) -> bool:
        """True if the client has asked for a WebSocket and has no answer yet."""
        return isinstance(self.stream, WSStream) and not self.stream.closed and not self._answers

    def _is_denied(self) -> bool:
        """True if the request for a WebSocket was refused. hypercorn would answer frames with a second refusal."""
        return isinstance(self.stream, WSStream) and self._answers and not self.stream.handshake.accepted

    async def _refuse_frames(self) -> None:
        """Refuses a client that sends frames before the WebSocket is open (RFC 6455, section 4.1). hypercorn itself
        would send a refusal, but let the application go on; h11 would then treat the application's answer as an error
        of the server."""
        stream: Any = self.stream
        stream.closed = True  # no message of the application is sent any more
        stream.scope["refused"] = 400
        self.context.refused("frames before the WebSocket was open")
        await stream._send_error_response(400)
        await stream.app_put({"type": "websocket.disconnect", "code": 1002})
        await self.send(Closed())

    async def stream_send(self, event: Any) -> None:
        """Sends a part of an answer. While the server ends, each answer closes its connection."""
        self._answers = self._answers or isinstance(event, Response)
        if self.context.ends and isinstance(event, Response) and event.status_code >= 200:
            event = replace(event, headers=[*event.headers, (b"connection", b"close")])
        await super().stream_send(event)

    async def _maybe_recycle(self) -> None:
        self.changed = trio.current_time()
        await super()._maybe_recycle()

    async def _check_protocol(self, event: Any) -> None:
        """Does nothing: the protocol never changes."""

    async def _create_stream(self, request: h11.Request) -> None:
        """Begins to answer a request, without the extensions that a request for a WebSocket asks for, such as
        permessage-deflate."""
        self._answers = False
        headers = [(name, value) for name, value in request.headers if name != b"sec-websocket-extensions"]
        plain = h11.Request(
            method=request.method, headers=headers, target=request.target, http_version=request.http_version
        )
        self.changed = trio.current_time()
        await super()._create_stream(plain)
        if isinstance(self.stream, WSStream):
            opened: Any = self.stream
            opened._handle_events = partial(self._handle_frames, opened)
        if self._is_opening() and self.connection.buffer:
            await self._refuse_frames()


class _Requests(h11.Connection):
    """A parser of requests that ignores a further request after the connection's last one. The client may have sent it
    before it knew that the connection ends; h11 would report a fault, and hypercorn would cut the last answer off. Tiny
    chunks that come together are one piece of the body."""

    _later: Any = None  # an event that came behind the chunks

    def next_event(self) -> Any:
        """Returns the next event; pauses if there is a further request."""
        if self._later is not None:
            event, self._later = self._later, None
            return event
        if self.their_state is h11.MUST_CLOSE and self.trailing_data[0]:
            return h11.PAUSED
        event, chunks = super().next_event(), []
        while isinstance(event, h11.Data):
            chunks.append(event.data)
            event = super().next_event()
        if not chunks:
            return event
        self._later = event if isinstance(event, h11.EndOfMessage) else None
        return h11.Data(data=b"".join(map(bytes, chunks)))


class _NextRequest(EventWrapper):
    """The event for which hypercorn waits if a client sends its next request before the present answer is complete. The
    connection is not read meanwhile, so the event itself checks whether the client has gone.
    """

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
                raise trio.BrokenResourceError("the client closed its side after it had sent more than one request")


def _is_there(client: trio.socket.SocketType) -> bool:
    """True if the client has not closed its side, as far as the system says. This works even while sent bytes are
    unread (tcp(7): TCP_INFO begins with the state)."""
    if not hasattr(socket, "TCP_INFO"):
        return True
    try:
        return client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
    except OSError:
        return False
