"""`TrioThread`: a trio loop in a thread of its own, and the way there for callers of any kind.

::

    the callers' side                                     trio side, the thread "triolet-loop"
    -----------------                                     ------------------------------------
    open                               starts  --------->  enters the resource
    call(operation)                    submits --------->  a task of its own runs it in a scope of its own
      cancelled? cancels the scope, and waits on
      answer <------------------------ tells ------------  its outcome
    close(...)                         leaves  --------->  leaves the resource, lets the calls end

Calls cross by ``TrioToken.run_sync_soon``, answers as the subclass says: `TaskPortal` in `asyncio_host` for tasks of an
asyncio loop, `ThreadPortal` in `thread_host` for threads. There are no locks: a name that begins with ``_on_trio``
belongs to the trio side, every other name to the callers' side.

Calls run outside of the resource's block, like tasks of other nurseries on trio, so that a drain can wait for them.

anyio's ``start_blocking_portal`` does not do: its callers wait under a lock, which a ^C may leave taken, return before
what they have cancelled has ended, and at the interpreter's exit its thread just dies.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import outcome
import trio
from attrs import define, field

from ...core.errors import EngineClosed

T = TypeVar("T")


class Answer(Protocol[T]):
    """A value that callers wait for, given once, as `asyncio.Future` is."""

    def done(self) -> bool:
        """True if the result is there."""

    def result(self) -> T:
        """The result, once it is there."""

    def set_result(self, result: T, /) -> None:
        """Wakes who waits. Call it once."""


def unwrapped(answer: outcome.Outcome[T]) -> T:
    """The answer's value, or raises its error. Callers must not keep ``answer``: the traceback would refer to it."""
    try:
        return answer.unwrap()
    finally:
        del answer


async def captured(operation: Callable[[], Awaitable[T]]) -> outcome.Outcome[T]:
    """Runs ``operation`` on the trio side; a cancellation is no outcome."""
    try:
        return outcome.Value(await operation())
    except trio.Cancelled:
        raise
    except BaseException as error:  # noqa: BLE001  (raised on the other side)
        return outcome.Error(error)


def was_thrown_into(error: GeneratorExit) -> int:
    """The flags of the code that ``error`` was thrown into, that of its innermost frame, as `inspect.CO_COROUTINE`."""
    flags = [frame.f_code.co_flags for frame, _ in traceback.walk_tb(error.__traceback__)]
    return flags[-1] if flags else 0


def nothing() -> None:
    """Hurries nothing: the end is under way already."""


@define(eq=False)
class Call(Generic[T]):
    """One operation on its way. The answer is ``None`` where ``scope`` cancelled the operation, or it never began.

    A call does not refer to its operation, which may refer to the call's owner.
    """

    answer: Answer[outcome.Outcome[T] | None]
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False, repr=False)  # the resource's repr would put kilobytes into the first line of a traceback
class TrioThread(ABC):
    """Holds ``resource`` open in a trio loop of its own, and runs operations there.

    Subclasses say who the callers are: how they wait, and how an answer gets to them.

    Args:
        resource: entered and left on the trio side.
        refuse: makes the error of calls that come when the resource is not open; called on the callers' side.
        failed: called on the callers' side where the resource ends unasked. ``failed`` must not keep its owner alive,
            since the running thread keeps ``failed``.
        seconds: how long calls may run on after the resource has ended. The interpreter's exit waits for the thread
            four times as long: for three actors, and for the calls.
    """

    resource: AbstractAsyncContextManager[object]
    refuse: Callable[[], Exception]
    failed: Callable[[], object]
    seconds: float
    _forsaken: bool = field(default=False, init=False)
    _opened: Answer[None] = field(init=False)
    _ended: Answer[outcome.Outcome[None]] = field(init=False)
    _process: int = field(factory=os.getpid, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _over: threading.Event = field(factory=threading.Event, init=False)  # the thread has nothing left to do
    _token: trio.lowlevel.TrioToken | None = field(default=None, init=False)
    # of the trio side
    _on_trio_calls: trio.Nursery | None = field(default=None, init=False)  # None: calls are refused
    _on_trio_leave: trio.Event = field(factory=trio.Event, init=False)
    _on_trio_surroundings: trio.CancelScope = field(factory=trio.CancelScope, init=False)
    on_trio_ending: trio.Event = field(factory=trio.Event, init=False)
    """The resource has been left: streams hand over the items that they still hold."""

    def __attrs_post_init__(self) -> None:
        self._opened, self._ended = self.new_answer(), self.new_answer()

    # -- the callers -------------------------------------------------------------------------------------------------

    @abstractmethod
    def new_answer(self) -> Answer[Any]:
        """An answer for the trio side to give by `tell`."""

    @abstractmethod
    async def outlast(self, hurry: Callable[[], object], *answers: Answer[Any]) -> BaseException | None:
        """Waits until one of ``answers`` is there, however often the waiting caller is cancelled. The first
        cancellation calls ``hurry``, which must see to it that an answer comes. That cancellation is returned, for the
        caller to raise at the end."""

    @abstractmethod
    def may_wait(self, error: BaseException | None) -> bool:
        """True if a block that is left with ``error`` may wait here."""

    @abstractmethod
    def check(self) -> None:
        """Raises `EngineStateError` where nobody can wait for this thread's answers."""

    @abstractmethod
    def _to_callers(self, function: Callable[[], object]) -> None:
        """Has ``function`` called on the callers' side, or sets ``_forsaken`` where no caller is left. The thread calls
        it."""

    # -- the callers' side -------------------------------------------------------------------------------------------

    async def open(self) -> tuple[bool, BaseException | None]:
        """Enters the resource. Returns True if it is open (else `close` tells why), and the cancellation that came
        meanwhile, with which it is not open."""
        tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(tokens,), name="triolet-loop", daemon=True)
        self._thread.start()
        self._token = tokens.get()  # takes as long as an empty trio.run
        atexit.register(self._finish)
        cancelled = await self.outlast(self.stop, self._opened, self._ended)
        return cancelled is None and not self._ended.done(), cancelled

    async def close(self, *, drain: bool) -> tuple[BaseException | None, BaseException | None]:
        """Leaves the resource (without ``drain`` as if its surroundings were cancelled), and waits until the thread has
        ended. Returns the resource's error, and the cancellation that came meanwhile: it ends the drain, not the wait.
        """
        if drain:
            self._post(self._on_trio_leave.set)
        else:
            self.stop()
        cancelled = await self.outlast(self.stop, self._ended)
        assert self._thread is not None, "closed before opened"
        self._thread.join()  # it has nothing left to do
        ended = self._ended.result()
        return ended.error if isinstance(ended, outcome.Error) else None, cancelled

    def stop(self) -> None:
        """Ends the resource as if its surroundings were cancelled. Never waits; may be called from any thread."""
        self._post(self._on_trio_surroundings.cancel)

    def forsake(self) -> None:
        """Ends the resource, since nobody is left to close it: its error goes to the thread's hook. Never waits; may be
        called from any thread."""
        self._forsaken = True
        self.stop()

    async def call(self, operation: Callable[[], Awaitable[T]]) -> T:
        """Runs ``operation`` on the trio side. Where the caller is cancelled, so is the operation; the cancellation is
        raised when the operation has ended."""
        call = self.submit(operation)
        try:
            cancelled = await self.outlast(partial(self.cancel, call), call.answer)
            answer = call.answer.result()
        finally:
            del call
        try:
            if cancelled is not None:
                raise cancelled
            if answer is None:
                raise self.refuse()
            return unwrapped(answer)
        finally:
            del answer, cancelled

    def submit(self, operation: Callable[[], Awaitable[T]]) -> Call[T]:
        """Begins a call."""
        self.check()
        call: Call[T] = Call(self.new_answer())
        if not self._post(partial(self._on_trio_begin, operation, call)):
            call.answer.set_result(None)
        return call

    def cancel(self, call: Call[Any]) -> None:
        """Cancels a call. Its answer tells how the call ended."""
        self._post(call.scope.cancel)

    def read(self, function: Callable[[], T]) -> T:
        """The result of ``function``, which the trio side calls while this thread waits: it must be quick. A caller on
        the trio side, as an observer is, calls it there."""
        if threading.current_thread() is self._thread:
            return function()
        self.check()
        answers: queue.SimpleQueue[outcome.Outcome[T]] = queue.SimpleQueue()
        if not self._post(lambda: answers.put(outcome.capture(function))):
            raise self.refuse()
        return unwrapped(answers.get())

    def _post(self, function: Callable[[], object]) -> bool:
        """Has ``function`` called on the trio side. False: the trio side has ended, or never began."""
        try:
            if self._token is not None:
                self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            return False
        return self._token is not None

    def _finish(self) -> None:
        """Runs at the interpreter's exit, where the block was never left."""
        assert self._thread is not None, "registered before opened"
        if os.getpid() != self._process:
            return  # a fork, which does not have the thread
        deadline = time.monotonic() + min(4 * self.seconds, threading.TIMEOUT_MAX)
        while True:
            try:
                self.stop()
                self._over.wait(max(0.0, deadline - time.monotonic()))
                self._thread.join(max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:
                # The process ends already. Returning now would finalize the interpreter under a call of the device,
                # which may abort the process (SIGABRT); the deadline bounds the wait. The wait is for an event, since
                # Python 3.11 takes a thread for ended when its join was interrupted
                continue
            break

    # -- the trio side -----------------------------------------------------------------------------------------------

    def _run(self, tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None]) -> None:
        """Runs the thread."""
        try:
            ended = trio.run(self._on_trio_main, tokens)
        except BaseException as error:  # noqa: BLE001  (ours or trio's bug: raised where the block is left)
            ended = outcome.Error(error)
            tokens.put(None)  # in case the trio run never put its token
            self._to_callers(self.failed)
        atexit.unregister(self._finish)
        self._over.set()
        self._to_callers(partial(_resolve, self._ended, ended))
        if self._forsaken:
            unwrapped(ended)  # nobody is left to hear of it: an error goes to the thread's hook

    async def _on_trio_main(self, tokens: queue.SimpleQueue[trio.lowlevel.TrioToken | None]) -> outcome.Outcome[None]:
        tokens.put(trio.lowlevel.current_trio_token())
        async with trio.open_nursery() as calls:
            ended = await captured(partial(self._on_trio_hold, calls))
            self._on_trio_calls = None
            self.on_trio_ending.set()
            calls.cancel_scope.deadline = trio.current_time() + self.seconds
        return ended

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
        """Gives ``answer``, unless it is there."""
        self.call_back(partial(_resolve, answer, value))

    def call_back(self, function: Callable[[], object]) -> None:
        """Has ``function`` called on the callers' side. Where no caller is left, nobody can leave the resource, so the
        thread ends it."""
        self._to_callers(function)
        if self._forsaken:
            self._on_trio_surroundings.cancel()


def _resolve(answer: Answer[Any], value: object) -> None:
    if not answer.done():
        answer.set_result(value)
