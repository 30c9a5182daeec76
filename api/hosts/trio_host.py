"""An engine for tasks of a trio loop: the engine runs in the same loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import TypeVar

import trio

from ...core.errors import EngineStateError
from .state import State, foreign
from .trio_engine import TrioEngine

T = TypeVar("T")
Opened = TypeVar("Opened")


class TrioHost:
    """The caller's own trio loop: every call is direct.

    As on the other hosts, every method raises `EngineStateError` outside of the event loop that the engine was entered
    in. Leaving the block there only has the engine stop; else `triolet.actors.supervisor.leaving` decides which error
    leaves the block.
    """

    lasting = False

    def __init__(self, engine: TrioEngine) -> None:
        self._engine = engine
        self._token = trio.lowlevel.current_trio_token()

    async def __aenter__(self) -> object:
        return await self._engine.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            self._check()
        except EngineStateError:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)  # without waiting; the device is given back
            raise
        try:
            return await self._engine.__aexit__(kind, error, traceback)
        finally:
            del error, traceback

    def _check(self) -> None:
        here: trio.lowlevel.TrioToken | None
        try:
            here = trio.lowlevel.current_trio_token()
        except RuntimeError:
            here = None
        if here is not self._token:
            raise foreign("trio.from_thread.run(...)", "trio.from_thread.run_sync(...)")

    def _stop(self) -> None:
        if self._engine.state is State.OPEN:
            trio.lowlevel.spawn_system_task(self._engine.aclose, 0.0)

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Runs an operation of the engine. Cancelling the awaiting task cancels the operation and waits for its end."""
        self._check()
        return operation()

    def read(self, function: Callable[[], T]) -> T:
        """Calls a quick function where the engine's state may be read. Observers, which run in the engine's own loop,
        may call this too."""
        self._check()
        return function()

    def stream(
        self, _: object, open_block: Callable[[], AbstractAsyncContextManager[Opened]]
    ) -> AbstractAsyncContextManager[Opened]:
        """Opens a block of the engine, which gives a stream."""
        self._check()
        return open_block()
