"""What hosts have in common whose engine lives in a `TrioThread`: the block, and the way of calls and streams."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from ...core.errors import EngineClosed, EngineStateError
from ...core.timings import Timings
from ..live.session import LiveSession
from ..outputs.results import Delta, LiveText, Progress, Segment
from ..outputs.streams import Deltas, DeltaStream
from ..speech.segments import SegmentStream
from .portal_stream import PortalBlock, PortalStream
from .trio_engine import TrioEngine
from .trio_thread import TrioThread

T = TypeVar("T")


class PortalHost(ABC):
    """Implements `triolet.api.hosts.host.Host`. Subclasses say which error leaves the block.

    Args:
        make_portal: makes the portal that holds ``engine``.
        foreign: makes the error of callers that the portal cannot serve.
        failed: called by the portal where the engine fails. It must not keep the host alive.
    """

    lasting = True
    """No block ends the engine, but `Engine.aclose`."""

    def __init__(
        self,
        engine: TrioEngine,
        make_portal: type[TrioThread],
        foreign: Callable[[], EngineStateError],
        failed: Callable[[], None],
    ) -> None:
        seconds = engine.config.stage_seconds
        self._portal = make_portal(
            resource=engine,
            refuse=engine.not_open,
            foreign=foreign,
            cut_off=_cut_off,
            failed=failed,
            end_seconds=seconds,
            exit_seconds=4 * seconds,  # three actors and the calls
        )
        self._thrown_away = weakref.finalize(self, self._portal.forsake)  # no one is left to leave the block
        self._thrown_away.atexit = False  # at exit the portal itself waits

    # -- the block ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> object:
        is_open, cancelled = await self._portal.open()
        if is_open:
            return self
        error = await self._close(cancelled, drain=False)
        try:
            if error is not None:
                raise error
        finally:
            del error, cancelled
        return self  # it was open, and another caller has closed it already

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._thrown_away.alive:
            return  # left before
        if not self._portal.may_wait(error):
            self._portal.stop()
            return
        try:
            self._portal.check()
        except EngineStateError:
            self._portal.stop()  # without waiting; the device is given back
            raise
        left = await self._close(error, drain=error is None)
        try:
            if left is not None and left is not error:
                raise left
        finally:
            del error, traceback, left

    @abstractmethod
    async def _close(self, body_error: BaseException | None, *, drain: bool) -> BaseException | None:
        """Ends the thread. Returns the error that leaves the block."""

    async def _end(self, *, drain: bool) -> tuple[BaseException | None, BaseException | None]:
        """`TrioThread.close`, but the engine's error is told once."""
        ours, cancelled = await self._portal.close(drain=drain)
        if self._thrown_away.detach() is None:
            ours = None
        return ours, cancelled

    # -- calls -------------------------------------------------------------------------------------------------------

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """See `triolet.api.hosts.host.Host.call`."""
        return self._portal.call(operation)

    def read(self, function: Callable[[], T]) -> T:
        """See `triolet.api.hosts.host.Host.read`."""
        return self._portal.read(function)

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[DeltaStream]]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """See `triolet.api.hosts.host.Host.deltas`."""
        self._portal.check()
        stream: PortalStream[Delta, Timings | None] = PortalStream(self._portal, _timings, _next_ready)
        return PortalBlock(stream, open_block, _PortalDeltas)

    def segments(
        self, open_block: Callable[[], AbstractAsyncContextManager[SegmentStream]]
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """See `triolet.api.hosts.host.Host.segments`."""
        self._portal.check()
        stream: PortalStream[Segment, Progress] = PortalStream(self._portal, _progress, _windows_are_asked_for)
        return PortalBlock(stream, open_block, _segments)

    def live(
        self, open_block: Callable[[], AbstractAsyncContextManager[LiveSession]]
    ) -> AbstractAsyncContextManager[LiveSession]:
        """See `triolet.api.hosts.host.Host.live`."""
        self._portal.check()
        stream: PortalStream[LiveText, None] = PortalStream(self._portal, _nothing, _nothing)
        return PortalBlock(stream, open_block, _PortalLive)


def _cut_off() -> EngineClosed:
    return EngineClosed("the engine's block ended before the call did; leave it later")


class _PortalDeltas:
    """Implements `triolet.api.outputs.streams.DeltaStream`."""

    def __init__(self, stream: PortalStream[Delta, Timings | None]) -> None:
        self._stream = stream

    @property
    def timings(self) -> Timings | None:
        """See `DeltaStream.timings`."""
        return self._stream.view()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await anext(self._stream)


class _PortalLive:
    """Implements `triolet.api.live.session.LiveSession`."""

    def __init__(self, stream: PortalStream[LiveText, None]) -> None:
        self._stream = stream

    async def feed(self, chunk: Any) -> None:
        """See `LiveSession.feed`."""
        await self._stream.tell(partial(_feed, chunk=chunk))

    async def finish(self) -> None:
        """See `LiveSession.finish`."""
        await self._stream.tell(_finish)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LiveText:
        return await anext(self._stream)


async def _feed(session: LiveSession, chunk: Any) -> None:
    await session.feed(chunk)


async def _finish(session: LiveSession) -> None:
    await session.finish()


def _nothing(_: LiveSession) -> None:
    """Updates cross one by one: those that a late reader has left are one already."""


def _timings(source: DeltaStream) -> Timings | None:
    return source.timings


def _next_ready(source: Deltas) -> Delta | None:
    return source.next_ready()


def _progress(source: SegmentStream) -> Progress:
    return source.progress()


def _windows_are_asked_for(_: SegmentStream) -> Segment | None:
    """No segment is at hand before the reader asks for it: it might cost a window."""
    return None


def _segments(stream: PortalStream[Segment, Progress]) -> SegmentStream:
    return SegmentStream(stream, stream.view)
