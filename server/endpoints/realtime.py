"""``/v1/realtime``: live audio over a WebSocket, in the shape of OpenAI's realtime transcription.

::

    client -> `Reader` -> `Backlog` -> `Turns` -> engine -> events -> `Client.write` -> client
              checks      bounded      one turn after another  bounded

A session begins with the first audio. Where the session changes, or the client ends a turn itself, the text of what was
heard is told to its end, and the next audio begins anew. When the server stops, it hears no more, tells what it has
heard, and closes. Nothing keeps the reader from hearing that the client has gone.
"""

from __future__ import annotations

import trio
from attrs import define, field
from starlette.websockets import WebSocket

from ..problems import Problem
from ..server import Server
from .live_backlog import Backlog, TooMuch
from .live_client import Client
from .live_hearing import Turns
from .live_reader import Reader
from .live_settings import Settings

_GOING_AWAY, _POLICY = 1001, 1008  # RFC 6455, section 7.4.1
_CLOSE_SECONDS = 5.0  # for the client's answer: to close at once may take from it what was told last
_TIME_IS_OVER = Problem(503, "the server stops, and the time for open sessions is over; connect again later")


async def listen(socket: WebSocket) -> None:
    """Serves one WebSocket to its end."""
    server: Server = socket.app.state.server
    settings = Settings(model=socket.query_params.get("model") or _only(server))
    client, backlog = Client(socket, socket.scope["request_id"]), Backlog()
    session = _Session(client, Reader(client, settings, backlog), Turns(server, client, settings, backlog))
    with server.socket_open(session.cut_off):
        await socket.accept("realtime" if "realtime" in socket.scope.get("subprotocols", ()) else None)
        await client.tell("session.created", session=settings.told(client.name))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.read, nursery.cancel_scope)
            nursery.start_soon(session.hear)
            nursery.start_soon(_stop_hearing, server, backlog)
            await client.write()
            await trio.sleep(_CLOSE_SECONDS)
            nursery.cancel_scope.cancel()


def _only(server: Server) -> str | None:
    """The model of a server that has one."""
    return next(iter(server.engines.models)) if len(server.engines.models) == 1 else None


async def _stop_hearing(server: Server, backlog: Backlog) -> None:
    """No more is heard when the server stops."""
    await server.stop_called.wait()
    backlog.close()


@define(eq=False)
class _Session:
    """The tasks of a session, and its ends."""

    client: Client
    reader: Reader
    hearing: Turns
    _hears: trio.CancelScope = field(factory=trio.CancelScope, init=False)

    async def read(self, all_of_it: trio.CancelScope) -> None:
        """Reads until the client has gone, and with it ``all_of_it``."""
        try:
            await self.reader.run()
        except TooMuch as error:
            self._give_up(_POLICY, Problem(429, str(error)))
            await self.reader.run()
        all_of_it.cancel()

    async def hear(self) -> None:
        """Hears until the server stops."""
        with self._hears:
            await self.hearing.run()
        self.client.end(_GOING_AWAY, "the server stops")

    def cut_off(self) -> None:
        """The server waits no longer."""
        self._give_up(_GOING_AWAY, _TIME_IS_OVER)

    def _give_up(self, code: int, why: Problem) -> None:
        self.client.end(code, why.message, why)
        self.reader.backlog.close()
        self._hears.cancel()
