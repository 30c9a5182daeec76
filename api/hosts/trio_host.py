"""An engine for tasks of a trio loop: the engine runs in the same loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import TypeVar

import trio

from ...actors.process import Process
from ...core.errors import EngineStateError, Left
from ..speech.options import TranscribeOptions, reachable
from .state import State, foreign
from .trio_engine import TrioEngine

T = TypeVar("T")
Opened = TypeVar("Opened")


class TrioHost:
    """A host in the caller's own trio loop: every call is direct.

    As on the other hosts, every method raises `EngineStateError` outside of the event loop in which the engine was
    entered. If the block is left in another loop, the engine is only ordered to stop. Otherwise
    `triolet.actors.supervisor.leaving` decides which error leaves the block.
    """

    lasting = False

    def __init__(self, engine: TrioEngine) -> None:
        self._engine = engine
        self._token = trio.lowlevel.current_trio_token()
        self.process = Process()

    async def __aenter__(self) -> object:
        return await self._engine.__aenter__()

    async def __aexit__(self, *end: *Left) -> bool | None:
        try:
            self._check_loop()
        except EngineStateError:
            if self.process.is_forked:
                return None
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._stop)  # does not wait; the device is still released
            raise
        return await self._engine.__aexit__(*end)

    def _check(self) -> None:
        self.process.check()
        self._check_loop()

    def _check_loop(self) -> None:
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

    @trio.lowlevel.enable_ki_protection  # ^C comes at checkpoints, not between two lines of ours
    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Runs an operation of the engine. Cancelling the awaiting task cancels the operation and waits for its end."""
        self._check()
        return await operation()

    def read(self, function: Callable[[], T]) -> T:
        """Calls a quick function that reads the engine's state. Observers, which run in the engine's loop, may call
        this method too."""
        self._check()
        return function()

    def outward(self, options: TranscribeOptions) -> TranscribeOptions:
        """Returns ``options``, whose aligner and diarizer the engine's loop can call, as `reachable` says."""
        return reachable(options, awaits=True)

    def stream(
        self, _: object, open_block: Callable[[], AbstractAsyncContextManager[Opened]]
    ) -> AbstractAsyncContextManager[Opened]:
        """Returns the block of a stream that ``open_block`` opens."""
        self._check()
        return open_block()
