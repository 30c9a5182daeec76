"""`Listener`: connections, by hypercorn's HTTP on trio.

hypercorn's own loop lets an error of one connection end the server, accepts any number of connections, and waits for
ever for a client that reads nothing. Here each connection has a guard, there is a most, and a client's patience is
bounded.
"""

from __future__ import annotations

import logging
import socket
import ssl
from contextlib import suppress
from typing import Any

import trio
from attrs import define, field
from hypercorn.config import Config
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app

from .exchange import Application
from .settings import ServerSettings
from .upgrades import SocketProtocol, SocketTasks

_log = logging.getLogger("triolet.server")
_CLOSE_SECONDS = 2.0
_GRACE_SECONDS = 0.2
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError, OSError)


class PatientStream(trio.abc.HalfCloseableStream):
    """A connection whose client must read: a send that takes more than ``seconds`` breaks it. ``socket`` is the
    connection's own."""

    def __init__(self, stream: trio.SocketStream, seconds: float) -> None:
        self.socket = stream.socket
        self._stream = stream
        self._seconds = seconds

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Raises `trio.BrokenResourceError` where the client reads nothing for ``seconds``."""
        view = memoryview(data)
        for start in range(0, len(view), 1 << 16):  # a piece is small: who reads at all is not too slow
            with trio.move_on_after(self._seconds) as patience:
                await self._stream.send_all(view[start : start + (1 << 16)])
            if patience.cancelled_caught:
                await trio.aclose_forcefully(self._stream)
                raise trio.BrokenResourceError(f"the client read nothing for {self._seconds:g} s")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


def hypercorn_config(settings: ServerSettings) -> Config:
    """hypercorn's settings for ``settings``."""
    config = Config()
    config.bind = [_address(settings)]
    config.certfile, config.keyfile = settings.certfile, settings.keyfile
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.errorlog = None
    config.accesslog = None
    config.backlog = 1_024
    config.websocket_max_message_size = 1 << 22
    config.websocket_ping_interval = 20.0
    return config


def _address(settings: ServerSettings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{host}:{settings.port}"


class _Http1(SocketProtocol):
    """HTTP/1.1 alone: whatever a client asks for, the connection stays what it is. In HTTP/2 one connection could hold
    any number of answers that it does not read."""

    async def _check_protocol(self, event: Any) -> None:
        """Never another protocol."""


class _Http1Server(TCPServer):
    """hypercorn's connection, with `_Http1` in place of the choice of protocols."""

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
            async with SocketTasks() as tasks:
                self._task_group = tasks
                self.protocol: Any = _Http1(
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


@define(eq=False)
class Listener:
    """Args:
    settings: where to listen, and how long to wait for clients.
    app: what answers.
    """

    settings: ServerSettings
    app: Application
    _config: Config = field(init=False)
    _context: WorkerContext = field(factory=lambda: WorkerContext(None), init=False)
    _open: set[PatientStream] = field(factory=set, init=False)
    _accepting: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    def __attrs_post_init__(self) -> None:
        self._config = hypercorn_config(self.settings)

    async def run(self, task_status: trio.TaskStatus[list[str]]) -> None:
        """Serves until `close`, and until every connection has ended. Started with the server's addresses.

        Raises:
            OSError: the address cannot be had.
        """
        context = self._config.create_ssl_context()
        sockets = self._sockets()
        async with trio.open_nursery() as connections:
            task_status.started([_url(one, tls=context is not None) for one in sockets])
            try:
                with self._accepting:
                    await self._accept_all(sockets, connections, context)
            finally:
                for one in sockets:
                    self._take_backlog(one, connections, context)
                    one.close()

    async def close(self) -> None:
        """Accepts no more connections, and closes those that wait for a request. Those that were just made have a
        moment, since their requests are on the way."""
        self._accepting.cancel()
        await trio.sleep(_GRACE_SECONDS)
        await self._context.terminated.set()

    async def cut_off(self) -> None:
        """Closes all connections, whatever they do."""
        for stream in list(self._open):
            await trio.aclose_forcefully(stream)

    def _sockets(self) -> list[socket.socket]:
        made = self._config.create_sockets()
        sockets = [*made.secure_sockets, *made.insecure_sockets]
        for one in sockets:
            one.listen(self._config.backlog)
        return sockets

    async def _accept_all(
        self, sockets: list[socket.socket], connections: trio.Nursery, context: ssl.SSLContext | None
    ) -> None:
        async def handle(stream: trio.SocketStream) -> None:
            await self._handle(stream, context)

        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]
        await trio.serve_listeners(handle, listeners, handler_nursery=connections)

    def _take_backlog(
        self, listening: socket.socket, connections: trio.Nursery, context: ssl.SSLContext | None
    ) -> None:
        """Takes the connections that clients have made and nobody has accepted yet: closing would reset them."""
        with suppress(OSError):  # there are no more
            while True:
                accepted, _ = listening.accept()
                stream = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
                connections.start_soon(self._handle, stream, context)

    async def _handle(self, stream: trio.SocketStream, context: ssl.SSLContext | None) -> None:
        if len(self._open) >= self.settings.max_connections:
            await _turn_away(stream)
            return
        patient = PatientStream(stream, self.settings.send_seconds)
        self._open.add(patient)
        try:
            await self._serve(patient, context)
        except Exception as error:  # noqa: BLE001  (no error of one connection ends the server)
            _log.warning("a connection was closed, since it broke the protocol or was lost: %r", error)
        finally:
            self._open.discard(patient)
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_SECONDS):
                await trio.aclose_forcefully(patient)

    async def _serve(self, stream: PatientStream, context: ssl.SSLContext | None) -> None:
        on_top: Any = stream
        if context is not None:
            on_top = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        plain: Any = self.app  # hypercorn types its messages more narrowly
        app = wrap_app(plain, self._config.wsgi_max_body_size, "asgi")
        await _Http1Server(app, self._config, self._context, ConnectionState({}), on_top)


def _url(listening: socket.socket, *, tls: bool) -> str:
    host, port, *_ = listening.getsockname()
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{named}:{port}"


async def _turn_away(stream: trio.SocketStream) -> None:
    with trio.move_on_after(_CLOSE_SECONDS):
        async with stream:
            with suppress(*_BROKEN):
                await stream.send_all(_FULL)
