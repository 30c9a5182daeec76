"""`SyncEngine`: the class for users whose programs have no event loop, and its streams: plain ``with`` blocks, and
plain iterators in them.

One thread at a time may read a stream. The thread sleeps while it waits for the next item.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Generic, Never, NoReturn, ParamSpec, Protocol, Self, TypeVar

from ..actors.statistics import EngineStatistics
from ..actors.worker import Worker
from ..core.config import EngineConfig
from ..core.errors import EngineClosed, EngineStateError, Left, RunnerCrashed
from ..core.executor import Executor
from ..core.log_lines import one_line
from ..core.model import ModelDescription
from ..core.timings import Timings
from .engine import Engine
from .hosts.state import Spelling, State
from .hosts.thread_host import ThreadHost, run
from .hosts.trio_engine import TrioEngine
from .making import shown, unknown_keyword
from .outputs.results import Delta, LiveText, Segment
from .outputs.streams import unopened
from .speech.transcription import ReadSoFar, SegmentStream

P = ParamSpec("P")
T = TypeVar("T")
Opened = TypeVar("Opened")
Presented = TypeVar("Presented")
Presented_co = TypeVar("Presented_co", covariant=True)

# -- streams -----------------------------------------------------------------------------------------------------------


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

    def __exit__(self, *end: *Left) -> bool | None:
        return self._run(partial(self._close, *end))

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


# -- the engine --------------------------------------------------------------------------------------------------------


def _plain(method: Callable[Concatenate[Engine, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[SyncEngine, P], T]:
    """Returns ``method`` as a plain method. The calling thread sleeps until the method is done."""

    @wraps(method)
    def call(self: SyncEngine, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(partial(method, self._engine, *args, **kwargs))

    return _named(call, method)


def _block(
    method: Callable[Concatenate[Engine, P], AbstractAsyncContextManager[Opened]],
    present: Callable[[Runner, Opened], Presented],
) -> Callable[Concatenate[SyncEngine, P], AbstractContextManager[Presented]]:
    """Returns ``method`` with a plain ``with`` block in place of its ``async with`` block."""

    @wraps(method)
    def call(self: SyncEngine, /, *args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Presented]:
        return SyncBlock(self._run, method(self._engine, *args, **kwargs), present, method.__name__)

    return _named(call, method)


def _named(call: Callable[P, T], method: Callable[..., object]) -> Callable[P, T]:
    """Gives ``call`` the name and docstring that ``method`` has in `Engine`, and returns it."""
    call.__qualname__ = f"SyncEngine.{method.__name__}"
    call.__doc__ = (method.__doc__ or "").replace("async ", "").replace("await ", "")
    return call


class SyncEngine:
    """An `Engine` for programs without an event loop: scripts, notebooks, thread pools.

    ::

        with SyncEngine("path-or-hub-id") as engine:
            transcript = engine.transcribe("speech.wav")

    Methods, arguments and errors are those of `Engine`. A method that is awaited in `Engine` returns here when it is
    done, and each ``async with`` or ``async for`` is a plain ``with`` or ``for``. The differences are:

    - Any thread may call, many at once. Each thread sleeps until its own call is done; their requests are batched. The
      engine runs in its own thread, which ends with the block.
    - ^C while the main thread waits in a call cancels this call. `KeyboardInterrupt` is raised when the call has ended;
      the block then ends in order. A second ^C changes nothing.
    - Threads cannot be cancelled. If the engine fails, calls that wait raise `RunnerCrashed`, and later calls raise an
      `EngineStateError` that names the failure. Leaving the block raises the failure itself.
    - If an engine outlives a block of code, as in a notebook's cells, use `open` and `close` in place of the block.
      `close` raises the errors that the end of the block would raise.
    - An `EngineConfig.observer` is called in the engine's thread. There it may call no method of the engine but
      `statistics`.
    """

    def __init__(self, model: str | Path, *, config: EngineConfig | None = None, **unknown: Never) -> None:
        for name in unknown:
            raise unknown_keyword(name, "SyncEngine")
        self._adopt(Engine(model, config=config))

    @classmethod
    def from_parts(
        cls,
        make_executor: Callable[[], Executor],
        make_worker: Callable[[], Worker],
        *,
        config: EngineConfig | None = None,
    ) -> Self:
        """Implements `Engine.from_parts`."""
        engine = cls.__new__(cls)
        engine._adopt(Engine.from_parts(make_executor, make_worker, config=config))
        return engine

    def _adopt(self, engine: Engine) -> None:
        self._engine = engine
        engine.inside.spelling = Spelling("with SyncEngine(...) as engine", "close()")

    def __repr__(self) -> str:
        return repr(self._engine).replace("<Engine", "<SyncEngine", 1)

    def _repr_html_(self) -> str | None:
        return shown(self, self.statistics)

    @property
    def inside(self) -> TrioEngine:
        """The `TrioEngine`, for tests. It belongs to another thread while the block lasts."""
        return self._engine.inside

    # -- the block ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self._run(self._enter, self._undo)

    def __exit__(self, *end: *Left) -> bool | None:
        try:
            return self._run(partial(self._engine.__aexit__, *end))
        except KeyboardInterrupt as interrupt:
            if self.inside.state is State.OPEN:  # ^C came before the engine began to end
                self._run(partial(self._undo, interrupt))
            raise

    def open(self) -> None:
        """Opens the engine without a block; `close` ends the engine. If the engine is thrown away, or the interpreter
        exits, the engine still ends in order."""
        self._run(self._enter, self._undo)

    async def _enter(self) -> Self:
        await self._engine._enter(ThreadHost)
        return self

    def _undo(self, error: BaseException) -> Coroutine[Any, Any, object]:
        return self._engine.__aexit__(type(error), error, error.__traceback__)

    def close(self, drain: float | None = None) -> None:
        """Ends the engine, even before its block ends, and returns when the device is released and the engine's thread
        has ended. Running requests have ``drain`` seconds to end (default: ``EngineConfig.drain_seconds``; 0 aborts at
        once). Any thread may close the engine, any number of times.

        Raises:
            RunnerCrashed, EngineTeardownError, InvariantViolation: the error that ended the engine, see `Engine`. It is
                raised once only.
        """
        self._run(partial(self._engine.aclose, drain))

    def _run(
        self,
        begin: Callable[[], Coroutine[Any, Any, T]],
        undo: Callable[[BaseException], Coroutine[Any, Any, object]] | None = None,
    ) -> T:
        """Runs a coroutine as `run` does. If the engine has crashed, raises a `RunnerCrashed` that names the crash."""
        try:
            return run(begin, undo)
        except EngineClosed as closed:
            crash = self.inside.crash
            if crash is None:
                raise
            raise RunnerCrashed(
                f"the engine failed before the call had ended ({one_line(crash)}); open a new engine and retry"
            ) from closed

    # -- what an engine does -----------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelDescription:
        """Implements `Engine.model`."""
        return self._engine.model

    def statistics(self) -> EngineStatistics:
        """Implements `Engine.statistics`."""
        return self._engine.statistics()

    @property
    def adapters(self) -> tuple[str, ...]:
        """Implements `Engine.adapters`."""
        return self._engine.adapters

    load_adapter = _plain(Engine.load_adapter)
    unload_adapter = _plain(Engine.unload_adapter)
    sleep = _plain(Engine.sleep)
    wake = _plain(Engine.wake)
    generate = _plain(Engine.generate)
    stream = _block(Engine.stream, SyncDeltaStream)
    embed = _plain(Engine.embed)
    score = _plain(Engine.score)
    classify = _plain(Engine.classify)
    align = _plain(Engine.align)
    diarize = _plain(Engine.diarize)
    transcribe = _plain(Engine.transcribe)
    stream_transcription = _block(Engine.stream_transcription, SyncSegmentStream)
    live = _block(Engine.live, SyncLiveSession)
