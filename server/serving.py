"""`serving`: runs a server, from its start to the end of its last request."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from ..api.hosts.alternatives import background
from .app import make_app
from .listening import Listener
from .server import Server

_log = logging.getLogger("triolet.server")
_TELL_SECONDS = 3.0  # for sending the last events to clients that are cut off


@asynccontextmanager
async def serving(server: Server, listener: Listener) -> AsyncIterator[str]:
    """Serves within the block, which gets the server's address. At the end of the block the server still accepts
    connections but refuses new requests. Running requests have ``drain_seconds`` to end; after that they get an error
    and are cut off. When no request is left, all connections are closed.

    Raises:
        CannotListen: another process listens at the address.
    """
    app = make_app(server)
    address = listener.listen()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listener.run, app, server.budget)
        nursery.start_soon(server.leavings.give_back)
        try:
            yield address
            await _drain(server, listener)
        finally:
            server.stop()
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await listener.cut_off()  # otherwise clients that read nothing would delay the end


async def _drain(server: Server, listener: Listener) -> None:
    server.stop()
    listener.keep_none()
    with trio.move_on_after(server.settings.drain_seconds) as drain:
        await server.all_ended()
    if drain.cancelled_caught:
        running, sockets = len(server.exchanges), len(server.sockets)
        _log.warning("%d requests and %d WebSockets still run and are cut off", running, sockets)
        server.cut_off()
        with trio.move_on_after(_TELL_SECONDS):
            await server.all_ended()
    await listener.close()
    await listener.cut_off()


async def until_told(server: Server, listener: Listener, *, preload: bool) -> int:
    """Loads all models if ``preload`` is true, and serves until SIGTERM or SIGINT. Returns the exit status: 0 after a
    complete drain; 128 plus the number of the signal if it came while models were loaded, or if it was a second signal,
    which cuts the drain short.

    Raises:
        TrioletError: a model cannot be loaded.
    """

    async def load(listen: Callable[[], None]) -> None:
        listen()
        for name in server.engines.models:
            await server.engines.load(name)

    async def serve(listen: Callable[[], None]) -> None:
        async with serving(server, listener) as address:
            _log.info("serving %s at %s", ", ".join(server.engines.models), address)
            _tell_manager("READY=1")
            first = signal.Signals(await anext(signals)).name
            _tell_manager("STOPPING=1")
            _log.info("%s: stopping; running requests have %g s", first, server.settings.drain_seconds)
            listen()

    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        number = await _cut_short(signals, load, "stopping before all models are loaded") if preload else 0
        number = number or await _cut_short(signals, serve, "stopping at once")
    return 128 + number if number else 0


def _tell_manager(state: str) -> None:
    """Tells the service manager that has started the process, if it wants to know: sd_notify(3) of systemd."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if not place:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.sendto(state.encode(), f"\0{place[1:]}" if place.startswith("@") else place)
    except OSError as error:
        _log.warning("the service manager at NOTIFY_SOCKET=%s cannot be told %s: %s", place, state, error)


async def _cut_short(
    signals: AsyncIterator[int], work: Callable[[Callable[[], None]], Awaitable[None]], told: str
) -> int:
    """Runs ``work``. Returns the number of the signal that has cut it short, or 0. A signal cuts it short from when
    ``work`` calls the function that it gets. The log says so with ``told``."""
    number = 0

    async def abort() -> None:
        nonlocal number
        number = await anext(signals)
        _log.info("%s: %s", signal.Signals(number).name, told)
        scope.cancel()

    with trio.CancelScope() as scope:
        async with background() as start:
            await work(lambda: start(abort))
    return number
