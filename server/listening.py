"""`Listener`: accepts connections, and serves them with hypercorn's HTTP on trio.

hypercorn's own loop lets an error of one connection end the server, accepts any number of connections, and waits for
ever for a client that reads nothing. Here an error ends only its connection, the number of connections is bounded, and
so is the time to wait for a client. Events that any client can cause are logged at most once a minute.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import itemgetter
from typing import Any, Self

import trio
from attrs import define, field
from hypercorn.config import Config
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import wrap_app

from ..core.budget import Budget
from ..core.errors import TrioletError
from ..core.log_lines import one_line
from .exchange import Application
from .http1 import Connection, Shared
from .manners.limits import Flood
from .settings import ServerSettings

_log = logging.getLogger("triolet.server")
_BACKLOG = 4_096
_AT_ONCE = 32  # connections that are accepted in a round of the event loop
_RESERVED = 16  # places beyond `max_connections` for those who ask how the server is
_CLOSE_SECONDS = 2.0
_GRACE_SECONDS = 0.2
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_ROOM_SECONDS = 0.1  # until a connection has perhaps ended
_TOO_MANY = "no connection can be accepted: %s; raise the limit of open files (ulimit -n), or lower max_connections"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class CannotListen(TrioletError):
    """The address, the certificate or its key cannot be used."""


class PatientStream(trio.abc.HalfCloseableStream):
    """A connection that breaks if the client reads nothing for ``seconds`` during a send. ``socket`` is the socket of
    the connection."""

    def __init__(self, stream: trio.SocketStream, seconds: float) -> None:
        self.socket = stream.socket
        self._stream = stream
        self._seconds = seconds

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Sends ``data``. Raises `trio.BrokenResourceError` if the client reads nothing for ``seconds``."""
        view = memoryview(data)
        for start in range(0, len(view), 1 << 16):  # in small pieces: any client that reads at all is fast enough
            with trio.move_on_after(self._seconds) as patience:
                try:
                    await self._stream.send_all(view[start : start + (1 << 16)])
                except trio.BusyResourceError:  # hypercorn never sends twice at once, but may close meanwhile
                    raise trio.BrokenResourceError("the connection is being closed") from None
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


def _config_of(settings: ServerSettings) -> Config:
    """Returns the settings of hypercorn that follow from ``settings``."""
    config = Config()
    config.certfile, config.keyfile = settings.certfile, settings.keyfile
    config.alpn_protocols = ["http/1.1"]
    config.include_server_header = False
    config.errorlog = None
    config.accesslog = None
    config.keep_alive_timeout = settings.keep_alive_seconds
    config.websocket_max_message_size = 1 << 22
    config.websocket_ping_interval = 20.0
    config.max_app_queue_size = 1  # parts of a body that nobody has counted yet
    return config


@define(eq=False)
class Listener:
    """The socket of a server, and its connections.

    Args:
        settings: where to listen, and how long to wait for clients.
        connections: the open connections.

    Raises:
        CannotListen: the address, the certificate or its key cannot be used.
    """

    settings: ServerSettings
    connections: dict[PatientStream, Connection] = field(factory=dict, init=False)
    _floods: defaultdict[str, Flood] = field(factory=lambda: defaultdict(Flood), init=False)  # by the line of the log
    _config: Config = field(init=False)
    _tls: ssl.SSLContext | None = field(init=False)
    _socket: socket.socket = field(init=False)  # bound at once, so that nobody else gets the address
    _shared: Shared = field(init=False)
    _accepting: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    _over: trio.Event = field(factory=trio.Event, init=False)  # set when no connection is accepted any more
    _one_left: trio.lowlevel.ParkingLot = field(factory=trio.lowlevel.ParkingLot, init=False)

    def __attrs_post_init__(self) -> None:
        self._config = _config_of(self.settings)
        self._shared = Shared(partial(self._tell, "a connection was answered 400 and closed: %s"), Budget(2**62))
        self._tls = _tls(self._config)
        self._socket = _bound(self.settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def listen(self) -> str:
        """Lets clients connect from now on. Returns the server's address.

        Raises:
            CannotListen: another process listens at the address.
        """
        try:
            self._socket.listen(_BACKLOG)
        except OSError as error:
            raise _not_there(self.settings, error) from error
        return _url(self._socket, tls=self._tls is not None)

    async def run(self, app: Application, budget: Budget | None = None) -> None:
        """Serves until `close` is called and every connection has ended. Messages take their memory from ``budget``."""
        self._shared.budget = budget or self._shared.budget
        plain: Any = app  # hypercorn has narrower types for messages
        async with trio.open_nursery() as nursery:
            take = partial(self._take, nursery, wrap_app(plain, self._config.wsgi_max_body_size, "asgi"))
            try:
                with self._accepting:
                    await self._accept(trio.SocketListener(trio.socket.from_stdlib_socket(self._socket)), take)
            finally:
                with suppress(OSError):  # closing the socket would reset the connections that are not accepted yet
                    _take_waiting(self._socket, take, _BACKLOG)
                self._socket.close()
                self._over.set()

    def keep_none(self) -> None:
        """Makes each further answer the last of its connection. New connections are still accepted and answered."""
        self._shared.ends = True

    async def close(self) -> None:
        """Accepts no more connections, and closes idle ones. First it waits a moment, since some connections are still
        being answered, and requests of new ones are on the way.
        """
        self._accepting.cancel()
        with trio.move_on_after(_GRACE_SECONDS):
            await self._over.wait()
            while self.connections:
                await self._one_left.park()
        await self._shared.terminated.set()

    async def cut_off(self) -> None:
        """Closes all connections, even busy ones."""
        for stream in list(self.connections):
            await trio.aclose_forcefully(stream)

    async def _accept(
        self, listener: trio.abc.Listener[trio.SocketStream], take: Callable[[trio.SocketStream], None]
    ) -> None:
        """Accepts connections until cancelled, several in a round of the event loop, so that whoever comes with many
        others need not wait for all their rounds. While the system has no descriptor or memory for one more, new
        clients wait."""
        while True:
            try:
                take(await listener.accept())
                _take_waiting(self._socket, take, _AT_ONCE)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._tell(_TOO_MANY, f"{error.strerror}; {len(self.connections)} are open")
                self._give_way()
                await trio.sleep(_ROOM_SECONDS)

    def _take(self, nursery: trio.Nursery, app: AppWrapper, stream: trio.SocketStream) -> None:
        is_full = len(self.connections) >= self.settings.max_connections and not self._give_way()
        if is_full and len(self.connections) >= self.settings.max_connections + _RESERVED:
            nursery.start_soon(_turn_away, stream, b"" if self._tls else _FULL)
            return
        patient = PatientStream(stream, self.settings.send_seconds)
        on_top: Any = patient
        if self._tls is not None:
            on_top = trio.SSLStream(patient, self._tls, server_side=True, https_compatible=True)
        connection = Connection(app, self._config, self._shared, ConnectionState({"reserved": is_full}), on_top)
        self.connections[patient] = connection
        nursery.start_soon(self._handle, patient, connection)

    def _give_way(self) -> bool:
        """Closes the connection for whose client the server has waited longest, first of all one without a request.
        False: there is none; all clients wait for the server."""
        waiting = ((one.waits_since, stream) for stream, one in self.connections.items())
        slow = [(since, stream) for since, stream in waiting if since is not None]
        if not slow:
            return False
        self._tell("a connection gave way to a new one: %s", "its client sent nothing, or too slowly")
        _, longest = min(slow, key=itemgetter(0))
        with suppress(OSError):  # the client is told if it can be told at once
            os.write(longest.socket.fileno(), b"" if self._tls else _FULL)
        del self.connections[longest]
        longest.socket.close()
        return True

    async def _handle(self, stream: PatientStream, connection: Connection) -> None:
        try:
            await connection
        except Exception as error:  # noqa: BLE001  (no error of one connection ends the server)
            self._tell("a connection was closed, since the client broke the protocol or was lost: %s", repr(error))
        finally:
            self.connections.pop(stream, None)
            self._one_left.unpark_all()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _CLOSE_SECONDS):
                await trio.aclose_forcefully(stream)

    def _tell(self, what: str, why: str) -> None:
        """Logs a warning that any client can cause as often as it likes: at most one line a minute, with the number of
        times."""
        count = self._floods[what].came(trio.current_time())
        if count:
            more = f" ({count:,} times since the last such line)" if count > 1 else ""
            _log.warning(what + "%s", one_line(why), more)


def _tls(config: Config) -> ssl.SSLContext | None:
    try:
        return config.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one, too
        raise CannotListen(
            f"the certificate {config.certfile} and the key {config.keyfile} cannot be used ({error}); allowed: a "
            "PEM file of the certificate and of those that signed it, and a PEM file of its key"
        ) from error


def _bound(settings: ServerSettings) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setblocking(False)
        made.bind((settings.host, settings.port))
    except OSError as error:
        made.close()
        raise _not_there(settings, error) from error
    return made


def _not_there(settings: ServerSettings, error: OSError) -> CannotListen:
    where = f"{settings.host}:{settings.port}"
    return CannotListen(f"cannot listen on {where} ({error.strerror or error}); choose another port or host")


def _take_waiting(listening: socket.socket, take: Callable[[trio.SocketStream], None], most: int) -> None:
    """Takes up to ``most`` connections that wait.

    Raises:
        OSError: the system has no room for one more.
    """
    with suppress(BlockingIOError):  # there are no more
        for _ in range(most):
            try:
                accepted, _ = listening.accept()
            except ConnectionError:  # of a client that has gone
                continue
            take(trio.SocketStream(trio.socket.from_stdlib_socket(accepted)))


def _url(listening: socket.socket, *, tls: bool) -> str:
    host, port, *_ = listening.getsockname()
    named = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{named}:{port}"


async def _turn_away(stream: trio.SocketStream, words: bytes) -> None:
    with trio.move_on_after(_CLOSE_SECONDS):
        async with stream:
            with suppress(trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError, OSError):
                await stream.send_all(words)
