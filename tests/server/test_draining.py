"""A server that is told to stop, while a request runs: who comes is answered, and told to go elsewhere."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from attrs import define

from triolet.server.server import Server

from .connected import PATIENCE, Place, answer, said, serving_on
from .talking import PaperEngine, paper_server

pytestmark = pytest.mark.real_time

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
CHAT = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 2\r\n\r\n{"
)
OPENING = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds."""
    with trio.fail_after(PATIENCE):
        while not condition():
            await trio.lowlevel.checkpoint()


@define(eq=False)
class Drain:
    """A server that drains: ``running`` has sent half of a request, ``idle`` has had one answer before."""

    server: Server
    place: Place
    running: trio.SocketStream
    idle: trio.SocketStream
    over: trio.Event

    async def finish(self) -> bytes:
        """What the request that ran is answered."""
        with trio.fail_after(PATIENCE):
            found = await said(self.running, b"}")
            await self.over.wait()
        return found


@asynccontextmanager
async def draining(**settings: float) -> AsyncIterator[Drain]:
    """A server within its end, for the block, in which the request that holds it up is to end."""
    server = paper_server(PaperEngine(), port=0, **{"drain_seconds": 1_000.0, "body_seconds": 1_000.0, **settings})
    stop, over = trio.Event(), trio.Event()

    async def serve(task_status: trio.TaskStatus[Place] = trio.TASK_STATUS_IGNORED) -> None:
        async with serving_on(server) as place:
            task_status.started(place)
            await stop.wait()
        over.set()

    async with trio.open_nursery() as nursery:
        place = await nursery.start(serve)
        async with await place.connect() as running, await place.connect() as idle:
            with trio.fail_after(PATIENCE):
                assert (await answer(idle, HEALTH)).startswith(b"HTTP/1.1 200")
                await running.send_all(CHAT)
                await until(lambda: len(server.exchanges) == 1)
                stop.set()
                await server.stop_called.wait()
            yield Drain(server, place, running, idle, over)
        nursery.cancel_scope.cancel()


def head_of(answered: bytes) -> tuple[int, dict[str, str]]:
    """The status and the fields of the one answer."""
    assert answered.count(b"HTTP/1.1 ") == 1, answered
    first, *lines = answered.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    return int(first.split(" ")[1]), {name.lower(): value for name, value in (line.split(": ") for line in lines)}


async def test_who_connects_while_the_server_drains_gets_503_and_is_told_when_to_come_again() -> None:
    """A probe sees that the server drains. A connection that was kept has one more answer."""
    async with draining() as drain:
        for asked in (CHAT + b"}", OPENING):
            status, fields = head_of(await drain.place.told(asked))
            assert (status, fields["retry-after"], fields["connection"]) == (503, "5", "close")
        found = await drain.place.told(HEALTH)
        status, fields = head_of(found)
        told = json.loads(found.partition(b"\r\n\r\n")[2])
        assert (status, fields["connection"]) == (503, "close")
        assert (told["live"], told["ready"], told["draining"], told["running"]) == (True, False, True, 1)
        with trio.fail_after(PATIENCE):
            status, fields = head_of(await said(drain.idle, CHAT + b"}" + HEALTH))
        assert (status, fields["connection"]) == (503, "close")
        status, fields = head_of(await drain.finish())
        assert (status, fields["connection"]) == (400, "close"), "the request that ran had its answer"


async def test_nobody_is_accepted_when_the_last_request_has_ended() -> None:
    async with draining() as drain:
        async with await drain.place.connect() as silent:
            await drain.finish()
            with trio.fail_after(PATIENCE):
                assert await said(silent, b"") == b"", "who says nothing holds up nothing"
        with pytest.raises(OSError, match="all attempts to connect"):
            await drain.place.connect()
        assert not drain.place.listener.connections


async def test_a_drain_that_takes_too_long_ends_with_words() -> None:
    async with draining(drain_seconds=0.0) as drain:
        with trio.fail_after(PATIENCE):
            found = await said(drain.running, b"")
            await drain.over.wait()
        assert head_of(found)[0] == 503
        assert b"the server is stopping, and the time for running requests is over" in found


async def test_a_server_without_requests_ends_at_once() -> None:
    """And those that only keep connections do not hold it up."""
    server = paper_server(PaperEngine(), port=0, keep_alive_seconds=1_000.0)
    with trio.fail_after(PATIENCE):
        async with serving_on(server) as place:
            stream = await place.connect()
            assert (await answer(stream, HEALTH)).startswith(b"HTTP/1.1 200")
        assert await said(stream, b"") == b""
        await stream.aclose()
