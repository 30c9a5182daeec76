"""Hosts whose engine runs in a `TrioThread`: its block, its calls and its streams."""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import trio

from ...actors.supervisor import leaving
from ...core.errors import EngineStateError, Left
from ..speech.options import TranscribeOptions, reachable
from .trio_engine import TrioEngine
from .trio_thread import TrioThread

T = TypeVar("T")
Opened = TypeVar("Opened")


class PortalHost:
    """A host for callers outside of the engine's loop, with the methods of `triolet.api.hosts.trio_host.TrioHost`.

    Args:
        make_portal: the class of the portal that holds ``engine``.
    """

    lasting = True
    """True if the engine may be without a block. `Engine.aclose` then leaves this host."""
    _failed = False  # the engine failed, and the host has cancelled the block's body

    def __init__(self, engine: TrioEngine, make_portal: type[TrioThread]) -> None:
        reference = weakref.ref(self)  # the running thread must not keep the host alive

        def failed() -> None:
            host = reference()
            if host is not None:
                host._engine_failed()

        seconds = engine.config.stage_seconds
        self._portal = make_portal(resource=engine, refuse=engine.not_open, failed=failed, seconds=seconds)
        self._thrown_away = weakref.finalize(self, self._portal.forsake)  # without the host nobody can leave the block
        self._thrown_away.atexit = False  # at the interpreter's exit the portal itself waits
        self.process = self._portal.process

    # -- the block ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> object:
        await self._outlive(None, self._portal.open())
        return self

    async def __aexit__(self, *end: *Left) -> None:
        if self.process.is_forked or not self._thrown_away.alive:
            return  # the block is the parent's, or was already left
        _, error, _ = end
        if not self._portal.may_wait(error):
            self._portal.stop()
            return
        try:
            self._portal.check()
        except EngineStateError:
            self._portal.stop()  # does not wait; the device is still released
            raise
        await self._outlive(error, self._portal.close(drain=error is None and not self._failed))

    async def _outlive(self, error: BaseException | None, wait: Coroutine[Any, Any, None]) -> None:
        """Waits for the engine to open or to end. If it has ended, raises the error that leaves the block, unless this
        is ``error``, with which the body has ended. A second call does not raise the engine's own error again."""
        body_error, ours, left = error, None, None
        try:
            try:
                await wait
            except BaseException as cancelled:
                if not self._portal.has_ended:  # the coroutine is thrown away
                    raise
                if body_error is None or isinstance(body_error, (Exception, GeneratorExit)):
                    body_error = cancelled
            if self._portal.has_ended:
                ours = self._portal.joined()
                left = await self._leaving(body_error, None if self._thrown_away.detach() is None else ours)
            if left is not None and left is not error:
                raise left
        finally:
            del error, body_error, ours, left  # a frame in its own error's traceback would be a reference cycle

    async def _leaving(self, body_error: BaseException | None, ours: BaseException | None) -> BaseException | None:
        """Returns the error that leaves the block, if its body ended with ``body_error`` and the engine with
        ``ours``."""
        return leaving(body_error, ours, trio.Cancelled)

    def _engine_failed(self) -> None:
        """Reacts to a failure of the engine while the body runs. Called on the callers' side."""

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Runs ``operation`` in the engine's loop."""
        return self._portal.call(operation)

    def read(self, function: Callable[[], T]) -> T:
        """Calls ``function`` in the engine's loop."""
        return self._portal.read(function)

    def outward(self, options: TranscribeOptions) -> TranscribeOptions:
        """Returns ``options``, whose aligner and diarizer the engine's loop can call, as `reachable` says."""
        return reachable(options, awaits=self._portal.awaits, ask=self._portal.ask)

    def stream(
        self,
        across: Callable[[Any, Callable[[], AbstractAsyncContextManager[Opened]]], AbstractAsyncContextManager[Opened]],
        open_block: Callable[[], AbstractAsyncContextManager[Opened]],
    ) -> AbstractAsyncContextManager[Opened]:
        """Returns a block that is opened in the engine's loop. ``across`` makes the `PortalStream` for the block."""
        self._portal.check()
        return across(self._portal, open_block)
