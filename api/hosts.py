"""Hosts: where an engine's trio loop runs, and how its callers reach it. `Engine` picks one when it is entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Protocol, TypeVar

import sniffio
import trio

from ..core.errors import EngineStateError
from .streams import DeltaStream, SegmentStream
from .trio_engine import State, TrioEngine

T = TypeVar("T")


class Host(Protocol):
    """Runs what callers ask of a `TrioEngine` where that lives.

    Every method raises `EngineStateError` outside of the event loop that the engine was entered in.
    """

    async def __aenter__(self) -> object:
        """Opens the engine. What it raises comes out unchanged."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Closes the engine in order; what leaves the block is decided by `triolet.actors.supervisor.leaving`. In
        another loop it only tells the engine to stop."""

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Runs an operation of the engine; it is cancelled with the awaiting task, and then has ended."""

    def read(self, function: Callable[[], T]) -> T:
        """Calls a quick function where the engine's state may be read. Observers may ask as well, whose calls come from
        the engine's own loop."""

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[DeltaStream]]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """A block of the engine that gives deltas."""

    def segments(
        self, open_block: Callable[[], AbstractAsyncContextManager[SegmentStream]]
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """A block of the engine that gives segments."""


class TrioHost:
    """The caller's own trio loop: everything is called directly."""

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
                self._token.run_sync_soon(self._stop)  # nobody waits for it, but the device goes back
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
        """See `Host.call`."""
        self._check()
        return operation()

    def read(self, function: Callable[[], T]) -> T:
        """See `Host.read`."""
        self._check()
        return function()

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[DeltaStream]]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """See `Host.deltas`."""
        self._check()
        return open_block()

    def segments(
        self, open_block: Callable[[], AbstractAsyncContextManager[SegmentStream]]
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """See `Host.segments`."""
        self._check()
        return open_block()


def foreign(way: str, plain: str) -> EngineStateError:
    """The error of a caller in another loop or thread. ``way`` leads to the engine's for what is awaited, ``plain`` for
    the rest."""
    return EngineStateError(
        f"the engine was used outside of the event loop that it was entered in; allowed: tasks of that loop. From "
        f"another thread ask it by {way}, and by {plain} for what is not awaited, as statistics(); in another loop "
        f"open an engine of its own"
    )


def current_host(engine: TrioEngine) -> Host:
    """A host for ``engine`` in the loop that runs here.

    Raises:
        EngineStateError: no loop runs here, or one of another library.
    """
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "no event loop"
    if library == "trio":
        return TrioHost(engine)
    if library == "asyncio":
        from .asyncio_host import AsyncioHost  # asyncio takes its time to be imported, and programs on trio need none

        return AsyncioHost(engine)
    raise EngineStateError(
        f"the engine was entered under {library}; allowed: a task of trio or asyncio, and anyio on either "
        f"(trio.run(...), asyncio.run(...), anyio.run(...))"
    )
