"""The streams of `triolet.SyncEngine`: plain ``with`` blocks, and plain iterators in them.

One thread at a time may read a stream. The thread sleeps while it waits for the next item.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Protocol, Self, TypeVar

from ..core.errors import EngineStateError
from ..core.timings import Timings
from .outputs.results import Delta, LiveText, Segment
from .outputs.streams import unopened
from .speech.segments import ReadSoFar, SegmentStream

T = TypeVar("T")
Opened = TypeVar("Opened")
Presented_co = TypeVar("Presented_co", covariant=True)


class Runner(Protocol):
    """A function that runs a coroutine in a thread, as `triolet.api.hosts.thread_host.run` does."""

    def __call__(
        self,
        begin: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[BaseException], Coroutine[Any, Any, object]] | None = None,
    ) -> T: ...


class SyncBlock(AbstractContextManager[Presented_co]):
    """The block of a stream. ``present`` turns the opened stream into the one for users. Iterating over the block
    itself raises an error that says how to open it.
    """

    def __init__(
        self,
        run: Runner,
        block: AbstractAsyncContextManager[Opened],
        present: Callable[[Runner, Opened], Presented_co],
        method: str,
    ) -> None:
        self._run = run
        self._open = partial(_open, run, block, present)
        self._close = block.__aexit__
        self._method = method

    def __enter__(self) -> Presented_co:
        return self._run(self._open, self._undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            return self._run(partial(self._close, kind, error, traceback))
        finally:
            del error, traceback

    def _undo(self, error: BaseException) -> Coroutine[Any, Any, object]:
        return self._close(type(error), error, error.__traceback__)

    def __iter__(self) -> NoReturn:
        raise self._unopened()

    def __next__(self) -> NoReturn:
        raise self._unopened()

    def _unopened(self) -> EngineStateError:
        return unopened(self._method, "")


async def _open(
    run: Runner, block: AbstractAsyncContextManager[Opened], present: Callable[[Runner, Opened], Presented_co]
) -> Presented_co:
    return present(run, await block.__aenter__())


class SyncStream(Generic[T]):
    """An iterator over an open stream."""

    def __init__(self, run: Runner, stream: Any) -> None:
        self._run = run
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        try:
            item: T = self._run(self._stream.__anext__)
        except StopAsyncIteration:
            raise StopIteration from None
        return item


class SyncDeltaStream(SyncStream[Delta]):
    """The iterator over `Delta` of ``with engine.stream(...) as deltas``."""

    @property
    def timings(self) -> Timings | None:
        """The time that each stage of the request took; ``None``: the request has not ended, or has failed."""
        timings: Timings | None = self._stream.timings
        return timings


class SyncSegmentStream(SyncStream[Segment], ReadSoFar):
    """The iterator over `Segment` of ``with engine.stream_transcription(...) as segments``."""

    def __init__(self, run: Runner, stream: SegmentStream) -> None:
        SyncStream.__init__(self, run, stream)
        ReadSoFar.__init__(self, lambda whole: stream.progress(whole=whole))

    def __next__(self) -> Segment:
        segment = super().__next__()
        self._found.append(segment)
        return segment


class SyncLiveSession(SyncStream[LiveText]):
    """A live session for threads, like `triolet.LiveSession`: one thread feeds audio, another one iterates."""

    def feed(self, chunk: Any) -> None:
        """Feeds the next chunk, as `LiveSession.feed` does."""
        self._run(partial(self._stream.feed, chunk))

    def finish(self) -> None:
        """Ends the audio, as `LiveSession.finish` does."""
        self._run(self._stream.finish)
