"""Hosts: where an engine's trio loop runs, and how its callers reach it. `Engine` picks one when it is entered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, TypeVar

import sniffio
import trio

from ..core.errors import EngineStateError
from .results import Delta
from .streams import SegmentStream
from .trio_engine import TrioEngine

T = TypeVar("T")


class Host(Protocol):
    """Runs what callers ask of a `TrioEngine` where that lives."""

    async def __aenter__(self) -> object:
        """Opens the engine. What it raises comes out unchanged."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Closes the engine in order; what leaves the block is decided by `triolet.actors.supervisor.leaving`."""

    def check(self) -> None:
        """Raises `EngineStateError` outside of the event loop that the engine was entered in."""

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Runs an operation of the engine; it is cancelled with the awaiting task, and then has ended."""

    def read(self, function: Callable[[], T]) -> T:
        """Calls a quick function where the engine's state may be read."""

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[AsyncIterator[Delta]]]
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
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
            return await self._engine.__aexit__(kind, error, traceback)
        finally:
            del error, traceback

    def check(self) -> None:
        """See `Host.check`."""
        try:
            here = trio.lowlevel.current_trio_token()
        except RuntimeError:
            raise foreign("trio.from_thread.run(...)") from None
        if here is not self._token:
            raise foreign("trio.from_thread.run(...)")

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """See `Host.call`."""
        return operation()

    def read(self, function: Callable[[], T]) -> T:
        """See `Host.read`."""
        return function()

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[AsyncIterator[Delta]]]
    ) -> AbstractAsyncContextManager[AsyncIterator[Delta]]:
        """See `Host.deltas`."""
        return open_block()

    def segments(
        self, open_block: Callable[[], AbstractAsyncContextManager[SegmentStream]]
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """See `Host.segments`."""
        return open_block()


def foreign(way: str) -> EngineStateError:
    """The error of a caller in another loop or thread; ``way`` leads to the engine's."""
    return EngineStateError(
        f"the engine was used outside of the event loop that it was entered in; allowed: tasks of that loop. From "
        f"another thread call it by {way}, in another loop open an engine of its own"
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
