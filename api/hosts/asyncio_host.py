"""An engine for tasks of an asyncio loop: its trio loop runs in a thread behind a `Portal`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio.lowlevel

from ...actors.supervisor import is_cancellation, leaving
from ...core.errors import EngineClosed, EngineStateError
from ...core.timings import Timings
from ..live.session import LiveSession
from ..outputs.results import Delta, LiveText, Progress, Segment
from ..outputs.streams import Deltas, DeltaStream
from ..speech.segments import SegmentStream
from .host import foreign
from .portal import Portal, may_wait
from .portal_stream import PortalBlock, PortalStream
from .trio_engine import TrioEngine

T = TypeVar("T")


class AsyncioHost:
    """Implements `triolet.api.hosts.host.Host`.

    asyncio has no nurseries: where the engine fails while the body runs, the host cancels the task that entered it.
    When that task leaves the block, the host takes the cancellation back, as `asyncio.timeout` does. Where another task
    leaves the block, as in fixtures of test frameworks, nothing takes the cancellation back.
    """

    def __init__(self, engine: TrioEngine) -> None:
        task = asyncio.current_task()
        assert task is not None, "an engine is entered by a task"
        self._task = weakref.ref(task)  # weak: a kept engine must not keep the task of a loop that is gone
        self._cancelling = task.cancelling()  # cancellations by others, before
        self._leaving = False
        self._failed = False  # the engine failed, and the host cancelled ``_task`` for it
        seconds = engine.config.stage_seconds
        self._portal = Portal(
            resource=engine,
            refuse=engine.not_open,
            foreign=_foreign,
            cut_off=_cut_off,
            failed=_weakly(self._engine_failed),
            end_seconds=seconds,
            exit_seconds=4 * seconds,  # three actors and the calls
        )
        self._thrown_away = weakref.finalize(self, self._portal.stop)  # no one is left to leave the block
        self._thrown_away.atexit = False  # at exit the portal itself waits

    # -- the block ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> object:
        await anyio.lowlevel.checkpoint()  # a caller that is cancelled already loads nothing
        is_open, cancelled = await self._portal.open()
        if is_open:
            return self
        error = await self._close(cancelled, drain=False)
        try:
            assert error is not None, "an engine that does not open says why"
            raise error
        finally:
            del error, cancelled

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not may_wait(error):
            self._portal.stop()
            return
        try:
            self._portal.check()
        except EngineStateError:
            self._portal.stop()  # without waiting; the device is given back
            raise
        left = await self._close(error, drain=error is None and not self._failed)
        try:
            if left is not None and left is not error:
                raise left
        finally:
            del error, traceback, left

    async def _close(self, body_error: BaseException | None, *, drain: bool) -> BaseException | None:
        """Ends the thread. Returns the error that leaves the block."""
        self._leaving = True
        ours, cancelled = await self._portal.close(drain=drain)
        self._thrown_away.detach()
        others = self._take_back()
        try:
            if cancelled is not None and (body_error is None or isinstance(body_error, (Exception, GeneratorExit))):
                body_error = cancelled
            if others and body_error is not None and is_cancellation(body_error, asyncio.CancelledError):
                try:
                    await anyio.lowlevel.checkpoint_if_cancelled()
                except asyncio.CancelledError as anyios:  # anyio must see its own cancellation, not the host's
                    body_error = anyios
                if ours is not None:
                    body_error.add_note(f"the engine failed too: {type(ours).__name__}: {ours}")
                return body_error
            return leaving(body_error, ours, asyncio.CancelledError)
        finally:
            del body_error, ours, cancelled

    def _engine_failed(self) -> None:
        """The portal calls it in the asyncio loop while the body runs. Cancels the task once: once is taken back."""
        task = self._task()
        if task is not None and not (self._leaving or self._failed):
            self._failed = task.cancel("the engine failed")

    def _take_back(self) -> bool:
        """Takes the host's cancellation back. True if there was one, and others have cancelled the task as well."""
        task = asyncio.current_task()
        if not self._failed or task is None or task is not self._task():
            return False
        return task.uncancel() > self._cancelling

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


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """``method`` while its object lives; does not keep it alive."""
    reference: weakref.WeakMethod[Callable[[], None]] = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _foreign() -> EngineStateError:
    return foreign("asyncio.run_coroutine_threadsafe(...)", "loop.call_soon_threadsafe(...)")


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
