"""`TrioThread`: a trio loop in its own thread, and the way from callers of any kind to this loop.

::

    the callers' side                                     trio side, the thread "triolet-loop"
    -----------------                                     ------------------------------------
    open                               starts  --------->  enters the resource
    call(operation)                    submits --------->  a task of its own runs it in a scope of its own
      cancelled? cancels the scope, and waits on
      answer <------------------------ tells ------------  its outcome
    close(...)                         leaves  --------->  leaves the resource, lets the calls end

Calls cross with ``TrioToken.run_sync_soon``. The subclass decides how answers cross: `TaskPortal` in `asyncio_host` is
for tasks of an asyncio loop, `ThreadPortal` in `thread_host` for threads. There are no locks: a name that begins with
``_on_trio`` belongs to the trio side, every other name to the callers' side. In a fork of the process there is no trio
side: calls are refused, and everything else does nothing.

Calls run outside of the resource's block, as in nurseries around it, so that a drain can wait for them.

anyio's ``start_blocking_portal`` is not used. Its callers wait under a lock, which a ^C may leave locked. A cancelled
call returns before its operation has ended. At the interpreter's exit its thread is killed.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import outcome
import trio
from attrs import define, field

from ...actors.process import Process
from ...core.errors import EngineClosed

T = TypeVar("T")


class Answer(Protocol[T]):
    """A value that callers wait for and that is set once, as in `asyncio.Future`."""

    def done(self) -> bool:
        """True if the result is set."""

    def result(self) -> T:
        """Returns the result, which must be set."""

    def set_result(self, result: T, /) -> None:
        """Sets the result, and wakes the callers that wait. Must be called once only."""


async def captured(operation: Callable[[], Awaitable[T]]) -> outcome.Outcome[T]:
    """Runs ``operation`` on the trio side, and returns its value or its error. A cancellation is raised."""
    try:
        return outcome.Value(await operation())
    except trio.Cancelled:
        raise
    except BaseException as error:  # noqa: BLE001  (raised on the other side)
        return outcome.Error(error)


def was_thrown_into(error: GeneratorExit) -> int:
    """Returns the code flags, such as `inspect.CO_COROUTINE`, of the frame that ``error`` was thrown into. It is the
    innermost frame of the traceback.
    """
    flags = [frame.f_code.co_flags for frame, _ in traceback.walk_tb(error.__traceback__)]
    return flags[-1] if flags else 0


def nothing() -> None:
    """Does nothing: the ``hurry`` of a wait that will end in any case."""


@define(eq=False)
class Call(Generic[T]):
    """One operation that was sent to the trio side. The answer is ``None`` if ``scope`` cancelled the operation, or if
    it never began.

    A call does not refer to its operation, since the operation may refer to the call's owner.
    """

    answer: Answer[outcome.Outcome[T] | None]
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False, repr=False)  # the resource's repr would put kilobytes into the first line of a traceback
class TrioThread(ABC):
    """A thread that holds ``resource`` open in its own trio loop, and runs operations there.

    Subclasses know the callers: how they wait, and how they receive an answer.

    Args:
        resource: the block to hold open, which is entered and left on the trio side.
        refuse: returns the error for calls while the resource is not open; called on the callers' side.
        failed: called on the callers' side if the resource ends although nobody asked for it. ``failed`` must not keep
            its owner alive, since the running thread keeps ``failed``.
        seconds: the time that calls may continue after the resource has ended. The interpreter's exit waits for the
            thread four times as long, since three actors and the calls each may take this time.
    """

    awaits: ClassVar[bool] = True
    """True if `ask` calls async functions, false if it calls plain ones."""
    resource: AbstractAsyncContextManager[object]
    refuse: Callable[[], Exception]
    failed: Callable[[], object]
    seconds: float
    _forsaken: bool = field(default=False, init=False)
    _opened: Answer[None] = field(init=False)
    _ended: Answer[None] = field(init=False)
    _left: BaseException | None = field(default=None, init=False)  # of the resource; read once, when it has ended
    process: Process = field(factory=Process, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _over: threading.Event = field(factory=threading.Event, init=False)  # the thread has nothing left to do
    _token: trio.lowlevel.TrioToken | None = field(default=None, init=False)
    # fields of the trio side
    _on_trio_calls: trio.Nursery | None = field(default=None, init=False)  # None: calls are refused
    _on_trio_leave: trio.Event = field(factory=trio.Event, init=False)
    _on_trio_surroundings: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    on_trio_ending: trio.Event = field(factory=trio.Event, init=False)
    """An event that is set when the resource has been left. Streams then send the items that they still hold."""

    def __attrs_post_init__(self) -> None:
        self._opened, self._ended = self.new_answer(), self.new_answer()

    # -- the callers -------------------------------------------------------------------------------------------------

    @abstractmethod
    def new_answer(self) -> Answer[Any]:
        """Returns a new answer, which the trio side sets with `tell`."""

    @abstractmethod
    async def outlast(self, hurry: Callable[[], object], *answers: Answer[Any]) -> None:
        """Waits until one of ``answers`` is set. If the waiting caller is cancelled, calls ``hurry``, which must make
        sure that the last one of ``answers`` comes, waits for this one however often the caller is cancelled, and
        raises the first cancellation.
        """

    @abstractmethod
    async def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Calls a caller's ``function`` on the callers' side and returns its result. Awaited on the trio side. A
        cancellation ends the call, as far as the callers' side can."""

    @abstractmethod
    def may_wait(self, error: BaseException | None) -> bool:
        """True if a block that is left with ``error`` may wait in the present thread or task."""

    @abstractmethod
    def _check_caller(self) -> None:
        """Raises `EngineStateError` if the caller cannot wait for answers of this thread."""

    @abstractmethod
    def _to_callers(self, function: Callable[[], object]) -> None:
        """Calls ``function`` on the callers' side, or sets ``_forsaken`` if no caller is left. The trio thread calls
        this method."""

    # -- the callers' side -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises `EngineStateError` if the caller cannot wait for answers of this thread, or is in a fork."""
        self.process.check()
        self._check_caller()

    async def open(self) -> None:
        """Enters the resource. If it cannot be entered, it has ended with the error. So it has if the caller was
        cancelled, and the cancellation is raised."""
        tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(tokens,), name="triolet-loop", daemon=True)
        self._thread.start()
        self._token = tokens.get()  # takes as long as an empty trio.run
        atexit.register(self._finish)
        await self.outlast(self.stop, self._opened, self._ended)

    async def close(self, *, drain: bool) -> None:
        """Leaves the resource, and waits until it has ended. Without ``drain`` the resource ends as if its surroundings
        were cancelled. A cancellation of the caller ends the drain, but not the wait, and is raised."""
        if drain:
            self._post(self._on_trio_leave.set)
        else:
            self.stop()
        await self.outlast(self.stop, self._ended)

    @property
    def has_ended(self) -> bool:
        """True if the resource has been left, or was never entered."""
        return self._ended.done()

    def joined(self) -> BaseException | None:
        """Waits for the thread's end. Returns the error with which the resource has ended, and forgets it."""
        assert self._thread is not None, "closed before opened"
        self._thread.join()  # it has nothing left to do
        error, self._left = self._left, None
        return error

    def stop(self) -> None:
        """Ends the resource as if its surroundings were cancelled. Never waits; may be called from any thread."""
        self._post(self._on_trio_surroundings.cancel)

    def forsake(self) -> None:
        """Ends the resource when no caller is left to close it. An error of the resource goes to
        `threading.excepthook`. Never waits; may be called from any thread."""
        self._forsaken = True
        self.stop()

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Runs ``operation`` on the trio side. If the caller is cancelled, the operation is cancelled too, and the
        cancellation is raised when the operation has ended."""
        return self.taken(await self._answer_to(operation))

    async def _answer_to(self, operation: Callable[[], Awaitable[T]]) -> outcome.Outcome[T] | None:
        call = self.submit(operation)
        await self.outlast(partial(self.cancel, call), call.answer)
        return call.answer.result()

    def taken(self, answer: outcome.Outcome[T] | None) -> T:
        """Returns the value of ``answer``, or raises its error. Callers must not keep ``answer``, since the traceback
        would refer to it.

        Args:
            answer: that of a call. ``None``: the call was refused, since the resource is not open.
        """
        try:
            if answer is None:
                raise self.refuse()
            return answer.unwrap()
        finally:
            del answer

    def submit(self, operation: Callable[[], Awaitable[T]]) -> Call[T]:
        """Sends ``operation`` to the trio side, and returns the call."""
        self.check()
        call: Call[T] = Call(self.new_answer())
        if not self._post(partial(self._on_trio_begin, operation, call)):
            call.answer.set_result(None)
        return call

    def cancel(self, call: Call[Any]) -> None:
        """Cancels a call. The answer of the call still comes."""
        self._post(call.scope.cancel)

    def read(self, function: Callable[[], T]) -> T:
        """Calls ``function`` on the trio side, and returns its result. ``function`` must be quick, since this thread
        waits. If the caller is already on the trio side, as observers are, ``function`` is called directly."""
        if threading.current_thread() is self._thread and not self.process.is_forked:
            return function()
        self.check()
        answers: queue.SimpleQueue[outcome.Outcome[T]] = queue.SimpleQueue()
        if not self._post(lambda: answers.put(outcome.capture(function))):
            raise self.refuse()
        return self.taken(answers.get())

    def _post(self, function: Callable[[], object]) -> bool:
        """Orders the trio side to call ``function``. False: the trio side has ended, never began, or is another
        process's, whose loop this process could wake."""
        if self.process.is_forked:
            return False
        try:
            if self._token is not None:
                self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return self._token is not None

    def _finish(self) -> None:
        """Ends the thread at the interpreter's exit, if the block was never left."""
        assert self._thread is not None, "registered before opened"
        if self.process.is_forked:
            return
        deadline = time.monotonic() + min(4 * self.seconds, threading.TIMEOUT_MAX)
        while True:
            try:
                self.stop()
                self._over.wait(max(0.0, deadline - time.monotonic()))
                self._thread.join(max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:
                # The process is already ending. Returning now would finalize the interpreter during a call of the
                # device, which may abort the process (SIGABRT). The deadline bounds the wait. An event is waited for
                # first, since Python 3.11 believes that a thread has ended if its join was interrupted.
                continue
            break

    # -- the trio side -----------------------------------------------------------------------------------------------

    def _run(self, tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None]) -> None:
        """Runs the thread."""
        try:
            trio.run(self._on_trio_main, tokens)
        except BaseException as error:  # noqa: BLE001  (ours or trio's bug: raised where the block is left)
            self._left = error
            tokens.put(None)  # in case the trio run never put its token
            self._to_callers(self.failed)
        atexit.unregister(self._finish)
        self._over.set()
        self._to_callers(partial(_resolve, self._ended, None))
        if self._forsaken and self._left is not None:
            raise self._left  # no caller is left, so an error goes to `threading.excepthook`

    async def _on_trio_main(self, tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None]) -> None:
        """Holds the resource open, and keeps the error with which it ends. A result of `trio.run` would stay in
        reference cycles of trio's."""
        tokens.put(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as calls:
            ended = await captured(partial(self._on_trio_hold, calls))
            self._left = ended.error if isinstance(ended, outcome.Error) else None
            del ended
            self._on_trio_calls = None
            self.on_trio_ending.set()
            calls.cancel_scope.deadline = trio.current_time() + self.seconds

    async def _on_trio_hold(self, calls: trio.Nursery) -> None:
        """Holds the resource open."""
        with self._on_trio_surroundings:
            async with self.resource:
                self._on_trio_calls = calls
                self.tell(self._opened, None)
                try:
                    await self._on_trio_leave.wait()
                except trio.Cancelled:
                    if not self._on_trio_surroundings.cancel_called:  # the resource cancelled it
                        self.call_back(self.failed)
                    raise

    def _on_trio_begin(self, operation: Callable[[], Awaitable[Any]], call: Call[Any]) -> None:
        if self._on_trio_calls is None:
            self.tell(call.answer, None)
        else:
            self._on_trio_calls.start_soon(self._on_trio_serve, operation, call, name="triolet call")

    async def _on_trio_serve(self, operation: Callable[[], Awaitable[Any]], call: Call[Any]) -> None:
        answer: outcome.Outcome[Any] | None = outcome.Error(
            EngineClosed("the engine's block ended before the call did; leave it later")
        )
        try:
            with call.scope:
                answer = await captured(operation)
            if call.scope.cancelled_caught:
                answer = None
        finally:
            self.tell(call.answer, answer)
            del answer, call  # the frame of `captured`, in the error's traceback, refers to this one since Python 3.12

    def tell(self, answer: Answer[Any], value: object) -> None:
        """Sets ``answer`` to ``value`` on the callers' side, unless the answer is already set."""
        self.call_back(partial(_resolve, answer, value))

    def call_back(self, function: Callable[[], object]) -> None:
        """Calls ``function`` on the callers' side. If no caller is left, nobody can leave the resource, so the thread
        ends it."""
        self._to_callers(function)
        if self._forsaken:
            self._on_trio_surroundings.cancel()


def _resolve(answer: Answer[Any], value: object) -> None:
    if not answer.done():
        answer.set_result(value)
