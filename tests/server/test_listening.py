"""Connections to clients that do not read, or go."""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from triolet.server.listening import PatientStream

MUCH = bytes(1 << 24)  # more than sockets hold


def connected(seconds: float) -> tuple[PatientStream, trio.SocketStream]:
    here, there = trio.socket.socketpair()
    return PatientStream(trio.SocketStream(here), seconds), trio.SocketStream(there)


async def test_a_client_that_reads_nothing_loses_its_connection(autojump_clock) -> None:
    ours, theirs = connected(30.0)
    async with theirs:
        with pytest.raises(trio.BrokenResourceError, match="the client read nothing for 30 s"):
            await ours.send_all(MUCH)
    assert trio.current_time() >= 30.0


async def test_a_connection_that_is_busy_otherwise_is_as_good_as_closed() -> None:
    """hypercorn closes while it sends."""
    ours, theirs = connected(30.0)
    async with ours, theirs, trio.open_nursery() as nursery:
        nursery.start_soon(ours.send_all, MUCH)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BrokenResourceError, match="is being closed"):
            await ours.send_all(b"more")
        nursery.cancel_scope.cancel()
