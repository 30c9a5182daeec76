"""A server on the loopback in the test's own trio loop, and clients that say bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from attrs import define, field

from triolet.server.listening import Listener
from triolet.server.server import Server
from triolet.server.serving import serving
from triolet.server.settings import ServerSettings

PATIENCE = 60  # seconds: so that a hang fails
GONE = (trio.BrokenResourceError, ConnectionError)  # a reset is as good an end as a closed side


@define(eq=False)
class Place:
    """Where a server listens."""

    listener: Listener
    port: int

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port)

    async def told(self, data: bytes) -> bytes:
        """All that is answered to ``data``, until the server closes the connection. The client's side stays open."""
        async with await self.connect() as stream:
            with trio.fail_after(PATIENCE):
                return await said(stream, data)


async def said(stream: trio.SocketStream, data: bytes) -> bytes:
    """All that comes back, to the end of the connection."""
    found = b""
    try:
        await stream.send_all(data)
        async for part in stream:
            found += part
    except GONE:
        pass
    return found


async def answer(stream: trio.SocketStream, data: bytes) -> bytes:
    """The answer with a length to ``data``, where the connection is kept."""
    await stream.send_all(data)
    found = b""
    while not is_whole(found):
        part = await stream.receive_some()
        assert part, f"the connection ended behind {found!r}"
        found += part
    return found


def is_whole(answered: bytes) -> bool:
    head, blank, body = answered.partition(b"\r\n\r\n")
    lengths = [
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
    ]
    return bool(blank) and len(body) == sum(lengths)


@define(eq=False)
class Requests:
    """An application that notes what it is asked, and answers each request with 200 when its body is there."""

    heard: list[tuple[str, str, bytes]] = field(factory=list)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.heard.append((scope["method"], scope["path"], body))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def listening(app: Any, **settings: Any) -> AsyncIterator[Place]:
    """``app`` on a free port, for the block."""
    with Listener(ServerSettings(**{"port": 0, **settings})) as listener:
        port = int(listener.listen().rpartition(":")[2])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener.run, app)
            yield Place(listener, port)
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def serving_on(server: Server) -> AsyncIterator[Place]:
    """``server`` on its port, for the block, at whose end it drains."""
    with Listener(server.settings) as listener:
        async with serving(server, listener) as address:
            yield Place(listener, int(address.rpartition(":")[2]))
