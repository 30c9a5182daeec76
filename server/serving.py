"""`serving`: runs a server, from its start to the end of its last request."""

from __future__ import annotations

import logging
import signal
from collections.abc import AsyncIterator
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
    which cuts the drain short."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        if preload and (number := await _loads(server, signals)):
            return 128 + number
        second = await _serves(server, listener, signals)
    return 128 + second if second else 0


async def _loads(server: Server, signals: AsyncIterator[int]) -> int:
    """Loads all models. Returns the number of a signal that came before the end, or 0.

    Raises:
        TrioletError: a model cannot be loaded.
    """
    number = 0

    async def abort() -> None:
        nonlocal number
        number = await anext(signals)
        _log.info("%s: stopping before all models are loaded", signal.Signals(number).name)
        scope.cancel()

    with trio.CancelScope() as scope:
        async with background() as start:
            start(abort)
            for name in server.engines.models:
                await server.engines.load(name)
    return number


async def _serves(server: Server, listener: Listener, signals: AsyncIterator[int]) -> int:
    """Serves until the first signal, and drains. Returns the number of a second signal, or 0."""
    second = 0

    async def abort() -> None:
        nonlocal second
        second = await anext(signals)
        scope.cancel()

    with trio.CancelScope() as scope:
        async with background() as start, serving(server, listener) as address:
            _log.info("serving %s at %s", ", ".join(server.engines.models), address)
            first = signal.Signals(await anext(signals)).name
            _log.info("%s: stopping; running requests have %g s", first, server.settings.drain_seconds)
            start(abort)
    return second
