"""`PortalStream`: the callers' side of a stream that a block holds open in a `TrioThread`. Each kind of stream has a
class.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast

import outcome
import trio
from attrs import evolve

from ...core.errors import EngineStateError, Left
from ...core.timings import Timings
from ..live.session import LiveSession
from ..outputs.results import Delta, LiveText, Progress, Segment
from ..outputs.streams import DeltaStream
from ..speech.transcription import SegmentStream
from .trio_thread import Answer, Call, TrioThread, captured, nothing

Opened = TypeVar("Opened")
T = TypeVar("T")
View = TypeVar("View")


class PortalStream(AbstractAsyncContextManager[Opened], Generic[Opened, T, View]):
    """A block, and an async iterator over the source that the block opens on the trio side.

    If a waiting caller is cancelled after the trio side has taken an item, the item is kept for the next read. When the
    engine ends, the trio side sends all remaining items, so that they can still be read.
    """

    def __init__(self, portal: TrioThread, open_block: Callable[[], AbstractAsyncContextManager[Opened]]) -> None:
        self._portal = portal
        self._open_block = open_block
        self._kept: deque[tuple[outcome.Outcome[T], View]] = deque()
        self._holder: Call[None] | None = None
        self._view: tuple[()] | tuple[View] = ()
        self._on_trio_source: Any = None
        self._on_trio_readers = 0
        self._on_trio_quiet = trio.lowlevel.ParkingLot()

    # -- the kind ----------------------------------------------------------------------------------------------------

    def _presented(self) -> Opened:
        """Returns the stream for its users."""
        return cast("Opened", self)

    def _on_trio_look(self) -> View | None:
        """Returns the facts that `view` returns. They cross at the beginning, and together with each item and the
        end.
        """
        return None

    def _on_trio_ready(self) -> T | None:
        """Returns the next item if that needs no waiting, else ``None``. It crosses together with the item before."""
        return None

    def _on_trio_left(self) -> None:
        """Called when a reader was cancelled or got an error, and when the block ends."""

    # -- the callers' side -------------------------------------------------------------------------------------------

    def view(self) -> View:
        """Returns the facts that `_on_trio_look` returned with the latest item that was read."""
        assert self._view, "a stream is looked at before it is open"
        return self._view[0]

    async def __aenter__(self) -> Opened:
        """Enters the block. On the trio side, a task holds the block open until it is left here."""
        opened = self._portal.new_answer()
        self._holder = self._portal.submit(partial(self._on_trio_hold, opened))
        await self._portal.outlast(partial(self._portal.cancel, self._holder), opened, self._holder.answer)
        if opened.done():
            self._view = (opened.result(),)
            return self._presented()
        try:
            self._portal.taken(self._holder.answer.result())
        finally:
            self._holder = None
        raise AssertionError("a block ended well before it was left")

    async def __aexit__(self, *end: *Left) -> None:
        assert self._holder is not None, "left before entered"
        if self._portal.process.is_forked:
            return
        self._portal.cancel(self._holder)
        if self._portal.may_wait(end[1]):
            self._portal.check()
            await self._portal.outlast(nothing, self._holder.answer)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._portal.check()
        while not self._kept:
            try:
                await self._portal.call(self._on_trio_next)
            except EngineStateError:  # the engine has ended, and the trio side sends the remaining items
                if self._holder is not None:
                    await self._portal.outlast(nothing, self._holder.answer)
                if not self._kept:
                    raise
        return self._portal.taken(self._next())

    def _next(self) -> outcome.Outcome[T]:
        item, view = self._kept.popleft()
        self._view = (view,)
        return item

    def _keep(self, batch: list[tuple[outcome.Outcome[T], View]]) -> None:
        """Keeps items that have crossed until they are read."""
        self._kept.extend(batch)

    # -- the trio side -----------------------------------------------------------------------------------------------

    async def _on_trio_hold(self, opened: Answer[View | None]) -> None:
        async with self._open_block() as self._on_trio_source:
            self._portal.tell(opened, self._on_trio_look())
            try:
                await self._portal.on_trio_ending.wait()
                while self._on_trio_readers:
                    await self._on_trio_quiet.park()
                while await self._on_trio_next():
                    pass
            finally:
                self._on_trio_left()

    async def _on_trio_next(self) -> bool:
        """Takes the next outcome of the source and sends it. True if there may be further items."""
        self._on_trio_readers += 1
        more = False
        try:
            more = self._on_trio_send(await captured(partial(anext, self._on_trio_source)))
            return more
        finally:
            if not more:
                self._on_trio_left()
            self._on_trio_readers -= 1
            self._on_trio_quiet.unpark_all()

    def _on_trio_send(self, answer: outcome.Outcome[T] | None) -> bool:
        """Sends ``answer`` and the items that are ready after it in one step, so that none overtakes another. True if
        there may be further items."""
        batch: list[tuple[outcome.Outcome[T], Any]] = []
        ready: outcome.Outcome[Any] | None = None
        more = False
        try:
            while answer is not None:
                more = isinstance(answer, outcome.Value)
                batch.append((answer, self._on_trio_look()))
                ready = outcome.capture(self._on_trio_ready) if more else None
                answer = None if ready == outcome.Value(None) else ready
            self._portal.call_back(partial(self._keep, batch))
            return more
        finally:
            del answer, batch, ready  # the frame of `_on_trio_ready`, in its error's traceback, refers to this one


class PortalDeltas(PortalStream[DeltaStream, Delta, Timings | None]):
    """Implements `triolet.api.outputs.streams.DeltaStream`."""

    @property
    def timings(self) -> Timings | None:
        """Implements `DeltaStream.timings`."""
        return self.view()

    def _on_trio_look(self) -> Timings | None:
        timings: Timings | None = self._on_trio_source.timings
        return timings

    def _on_trio_ready(self) -> Delta | None:
        delta: Delta | None = self._on_trio_source.next_ready()
        return delta


class PortalSegments(PortalStream[SegmentStream, Segment, Progress]):
    """The segments of a transcription. No segment is sent before it is read, since finding it may cost a window's
    requests.
    """

    _left: Progress | None = None  # the whole state, if it crossed after the latest item

    def _keep(self, batch: list[tuple[outcome.Outcome[Segment], Progress]]) -> None:
        self._left = None
        super()._keep(batch)

    def _presented(self) -> SegmentStream:
        return SegmentStream(self, self._progress)

    def _progress(self, whole: bool) -> Progress:
        """Returns the state that crossed last. With ``whole``, adds the segments that crossed but that nobody has taken
        yet.
        """
        if not whole:
            return self.view()
        kept = tuple(self._kept)
        last = self._left or (kept[-1][1] if kept else self.view())
        segments = (item.value for item, _ in kept if isinstance(item, outcome.Value))
        return evolve(last, ahead=(*segments, *last.ahead))

    def _on_trio_look(self) -> Progress:
        progress: Progress = self._on_trio_source.progress()
        return progress

    def _on_trio_left(self) -> None:
        """Sends the whole state to the callers' side."""
        self._portal.call_back(partial(setattr, self, "_left", self._on_trio_source.progress(whole=True)))


class PortalLive(PortalStream[LiveSession, LiveText, None]):
    """Implements `triolet.api.live.session.LiveSession`. Updates cross one by one: the source merges updates that were
    not read in time."""

    async def feed(self, chunk: Any) -> None:
        """Implements `LiveSession.feed`."""
        await self._portal.call(lambda: self._on_trio_source.feed(chunk))

    async def finish(self) -> None:
        """Implements `LiveSession.finish`."""
        await self._portal.call(lambda: self._on_trio_source.finish())  # noqa: PLW0108  (the trio side looks it up)
