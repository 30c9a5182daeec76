"""`PortalStream`: a block that is open in a `TrioThread`, and its stream, for its callers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import outcome
import trio

from .trio_thread import Answer, Call, TrioThread, captured, nothing, unwrapped

T = TypeVar("T")
View = TypeVar("View")
Presented = TypeVar("Presented")


class PortalStream(Generic[T, View]):
    """Async iterator over a source on the trio side. ``view`` returns what ``look`` saw of the source at the beginning
    and after each item, the end included. Items that are ``at_hand`` behind an item (``None``: there is none) cross
    together with it.

    An item that was taken when the waiting caller was cancelled is kept for the next turn. When the engine ends, the
    trio side hands the remaining items over, so that they can still be read.
    """

    def __init__(self, portal: TrioThread, look: Callable[[Any], View], at_hand: Callable[[Any], T | None]) -> None:
        self._portal = portal
        self._look = look
        self._at_hand = at_hand
        self._kept: deque[tuple[outcome.Outcome[T], View]] = deque()
        self._holder: Call[None] | None = None
        self._view: tuple[()] | tuple[View] = ()
        self._on_trio_source: AsyncIterator[T] | None = None
        self._on_trio_readers = 0
        self._on_trio_quiet = trio.Event()

    def view(self) -> View:
        """See the class."""
        assert self._view, "a stream is looked at before it is open"
        return self._view[0]

    # -- the callers' side -------------------------------------------------------------------------------------------

    async def open(self, open_block: Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]]) -> None:
        """Enters the block that ``open_block`` makes; a task of the trio side stays in the block."""
        opened = self._portal.new_answer()
        self._holder = holder = self._portal.submit(partial(self._on_trio_hold, open_block, opened))
        cancelled = await self._portal.outlast(partial(self._portal.cancel, holder), opened, holder.answer)
        try:
            if cancelled is not None:
                await self._portal.outlast(nothing, holder.answer)
                raise cancelled
            if opened.done():
                self._view = (opened.result(),)
                return
            answer, self._holder = holder.answer.result(), None
            del holder
            if answer is None:
                raise self._portal.refuse()
            try:
                unwrapped(answer)
            finally:
                del answer
        finally:
            del cancelled

    async def close(self, error: BaseException | None) -> None:
        """Leaves the block, which ended with ``error``."""
        assert self._holder is not None, "left before entered"
        self._portal.cancel(self._holder)
        if not self._portal.may_wait(error):
            return
        self._portal.check()
        cancelled = await self._portal.outlast(nothing, self._holder.answer)
        try:
            if cancelled is not None:
                raise cancelled
        finally:
            del cancelled, error

    async def tell(self, operation: Callable[[Any], Awaitable[None]]) -> None:
        """Runs ``operation`` on the source, on the trio side."""
        await self._portal.call(partial(self._on_trio_tell, operation))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        self._portal.check()
        while not self._kept:
            await self._fetch()
        item, view = self._kept.popleft()
        self._view = (view,)
        try:
            return unwrapped(item)
        finally:
            del item  # a frame in its own error's traceback would be a reference cycle

    async def _fetch(self) -> None:
        """Waits until the trio side has put an item into ``_kept``."""
        call = self._portal.submit(self._on_trio_next)
        cancelled = await self._portal.outlast(partial(self._portal.cancel, call), call.answer)
        answer = call.answer.result()
        try:
            if answer is None and cancelled is None and self._holder is not None:
                cancelled = await self._portal.outlast(
                    nothing, self._holder.answer
                )  # the engine has ended: the rest is on its way
            if cancelled is not None:
                raise cancelled
            if isinstance(answer, outcome.Error):
                unwrapped(answer)
            if answer is None and not self._kept:
                raise self._portal.refuse()
        finally:
            del call, cancelled, answer

    # -- the trio side -----------------------------------------------------------------------------------------------

    async def _on_trio_hold(
        self, open_block: Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]], opened: Answer[View]
    ) -> None:
        async with open_block() as self._on_trio_source:
            self._portal.tell(opened, self._look(self._on_trio_source))
            await self._portal.on_trio_ending.wait()
            while self._on_trio_readers:
                self._on_trio_quiet = trio.Event()
                await self._on_trio_quiet.wait()
            await self._on_trio_hand_over()

    async def _on_trio_tell(self, operation: Callable[[Any], Awaitable[None]]) -> None:
        assert self._on_trio_source is not None, "told before it is open"
        await operation(self._on_trio_source)

    async def _on_trio_hand_over(self) -> None:
        while await self._on_trio_next():
            pass

    async def _on_trio_next(self) -> bool:
        """Takes the next outcome and sends it. True if there may be more."""
        source = self._on_trio_source
        assert source is not None, "read before it is open"
        self._on_trio_readers += 1
        try:
            return self._on_trio_send(source, await captured(partial(anext, source)))
        finally:
            self._on_trio_readers -= 1
            self._on_trio_quiet.set()

    def _on_trio_send(self, source: AsyncIterator[T], answer: outcome.Outcome[T] | None) -> bool:
        """Sends ``answer`` and those at hand behind it in one step, so that none overtakes another. True if there may
        be more."""
        batch: list[tuple[outcome.Outcome[T], View]] = []
        more = False
        try:
            while answer is not None:
                more = isinstance(answer, outcome.Value)
                batch.append((answer, self._look(source)))
                answer = self._on_trio_at_hand(source) if more else None
            self._portal.call_back(partial(self._kept.extend, batch))
            return more
        finally:
            del answer, batch  # the frame of `_on_trio_at_hand`, in its error's traceback, refers to this one

    def _on_trio_at_hand(self, source: AsyncIterator[T]) -> outcome.Outcome[T] | None:
        try:
            found = self._at_hand(source)
        except Exception as error:  # noqa: BLE001  (raised on the other side)
            return outcome.Error(error)
        return None if found is None else outcome.Value(found)


class PortalBlock(AbstractAsyncContextManager[Presented], Generic[T, View, Presented]):
    """The block of a `PortalStream`; ``present`` makes of the stream what users get."""

    def __init__(
        self,
        stream: PortalStream[T, View],
        open_block: Callable[[], AbstractAsyncContextManager[AsyncIterator[T]]],
        present: Callable[[PortalStream[T, View]], Presented],
    ) -> None:
        self._stream = stream
        self._open_block = open_block
        self._present = present

    async def __aenter__(self) -> Presented:
        await self._stream.open(self._open_block)
        return self._present(self._stream)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._stream.close(error)
        finally:
            del error, traceback
