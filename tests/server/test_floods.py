"""What any client can bring about as often as it likes: a line in the log, with a number, and no traceback."""

from __future__ import annotations

import errno
import logging
from itertools import pairwise
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from triolet.server.listening import Listener
from triolet.server.manners.limits import Flood
from triolet.server.settings import ServerSettings

from .connected import PATIENCE, listening, said, serving_on
from .talking import PaperEngine, paper_server
from .test_draining import OPENING, until

pytestmark = pytest.mark.real_time

FRAME = b"\x81\x85\0\0\0\0hello"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the server told. No line has a traceback, or is more than one."""
    records = [record for record in caplog.records if record.name != "triolet.access"]
    assert not any(record.exc_info for record in records)
    told = [record.getMessage() for record in records]
    assert not any("\n" in line for line in told)
    return told


# -- counting --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_flood_is_told_once_in_a_while_and_nothing_is_lost(pauses: list[float]) -> None:
    flood, now, told = Flood(60.0), 0.0, []
    for pause in pauses:
        now += pause
        count = flood.came(now)
        if count:
            told.append((now, count))
    assert len(pauses) - sum(count for _, count in told) == flood._unreported
    times = [time for time, _ in told]
    assert all(later >= earlier + 60.0 for earlier, later in pairwise(times))
    assert [count for _, count in told[:1]] == [1] * bool(pauses), "the first is told at once"


# -- descriptors -----------------------------------------------------------------------------------------------------


@define(eq=False)
class Short(trio.abc.Listener[Any]):
    """A system that has no room for a connection ``times``, then has one, and then nobody comes."""

    times: int
    number: int = errno.EMFILE
    tries: list[float] = field(factory=list)

    async def accept(self) -> Any:
        await trio.lowlevel.checkpoint()
        self.tries.append(trio.current_time())
        if len(self.tries) <= self.times:
            raise OSError(self.number, "Too many open files")
        if len(self.tries) > self.times + 1:
            await trio.sleep_forever()
        return "a connection"

    async def aclose(self) -> None:
        """Nothing to close."""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
async def test_where_descriptors_are_out_the_server_waits_and_goes_on(
    number: int, caplog: pytest.LogCaptureFixture, autojump_clock: Any
) -> None:
    system, taken = Short(700, number), list[Any]()
    with Listener(ServerSettings(port=0)) as listener:
        listener.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listener._accept, system, taken.append)
            await trio.sleep(1_000)
            nursery.cancel_scope.cancel()
    assert taken == ["a connection"]
    pauses = {round(later - earlier, 3) for earlier, later in pairwise(system.tries[:701])}
    assert pauses == {0.1}, "no busy loop"
    assert lines(caplog) == [
        "no connection can be accepted: Too many open files; 0 are open; raise the limit of open files (ulimit -n), "
        "or lower max_connections",
        "no connection can be accepted: Too many open files; 0 are open; raise the limit of open files (ulimit -n), "
        "or lower max_connections (600 times since the last such line)",
    ]


async def test_another_error_of_the_system_is_not_waited_for(autojump_clock: Any) -> None:
    with Listener(ServerSettings(port=0)) as listener, pytest.raises(OSError, match="Too many"):
        await listener._accept(Short(1, errno.EBADF), [].append)


# -- frames before the WebSocket is open -----------------------------------------------------------------------------


async def test_frames_before_the_101_are_refused_and_the_log_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = paper_server(PaperEngine(), port=0)
    with caplog.at_level(logging.INFO):
        async with serving_on(server) as place:
            for _ in range(50):
                found = await place.told(OPENING + FRAME)
                assert found.startswith(b"HTTP/1.1 400 ")
                assert found.endswith(b"\r\n\r\n"), "and nothing is behind it"
            await until(lambda: not server.sockets and not place.listener.connections)
    assert lines(caplog) == ["a connection was answered 400 and closed: bytes that cannot begin a request"]
    access = [record.getMessage() for record in caplog.records if record.name == "triolet.access"]
    assert len(access) == 50
    assert all('"status": 400' in line for line in access)


@define(eq=False)
class Slow:
    """An application that accepts a WebSocket when it is told to."""

    asked: trio.Event = field(factory=trio.Event)
    may: trio.Event = field(factory=trio.Event)
    heard: list[Any] = field(factory=list)
    ended: trio.Event = field(factory=trio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.heard.append(await receive())
        self.asked.set()
        await self.may.wait()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "hello"})
        self.heard.append(await receive())
        self.ended.set()


async def test_who_sends_frames_while_the_server_thinks_is_refused_too(caplog: pytest.LogCaptureFixture) -> None:
    """The application hears that the client has gone, and what it says later goes nowhere."""
    app = Slow()
    async with listening(app) as place, await place.connect() as stream:
        with trio.fail_after(PATIENCE):
            await stream.send_all(OPENING)
            await app.asked.wait()
            found = await said(stream, FRAME)
            app.may.set()
            await app.ended.wait()
    assert found.startswith(b"HTTP/1.1 400 ")
    assert b"101" not in found
    assert [one["type"] for one in app.heard] == ["websocket.connect", "websocket.disconnect"]
    assert lines(caplog) == ["a connection was answered 400 and closed: frames before the WebSocket was open"]


@define(eq=False)
class Denying:
    """An application that answers a WebSocket with a response of HTTP, whose end comes when it is told to."""

    begun: trio.Event = field(factory=trio.Event)
    may: trio.Event = field(factory=trio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.http.response.start", "status": 403, "headers": [(b"content-length", b"6")]})
        await send({"type": "websocket.http.response.body", "body": b"den", "more_body": True})
        self.begun.set()
        await self.may.wait()
        await send({"type": "websocket.http.response.body", "body": b"ied"})


async def test_frames_behind_a_denial_are_not_answered(caplog: pytest.LogCaptureFixture) -> None:
    """The client has its answer, or a part of it: a second one would break it."""
    app = Denying()
    async with listening(app) as place, await place.connect() as stream:
        with trio.fail_after(PATIENCE):
            await stream.send_all(OPENING)
            await app.begun.wait()
            for _ in range(3):
                await stream.send_all(FRAME)
                await trio.testing.wait_all_tasks_blocked()
            app.may.set()
            found = await said(stream, b"")
    assert found.startswith(b"HTTP/1.1 403 ")
    assert found.count(b"HTTP/1.1") == 1
    assert found.endswith(b"\r\n\r\ndenied")
    assert lines(caplog) == []
