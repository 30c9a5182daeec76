"""An engine for threads that run no event loop. The engine's trio loop runs in a thread that callers reach through a
`ThreadPortal`. `run` runs a coroutine that waits for nothing but the portal.

A waiting thread sleeps on its own queue, so that an answer wakes no other thread. The code shares no lock with the trio
side, since the handler of a signal may raise anywhere, and could leave a lock locked.
"""

from __future__ import annotations

import inspect
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import closing
from functools import partial
from types import FrameType
from typing import Any, Generic, Self, TypeVar

import trio
from attrs import define, field, frozen

from ...core.errors import EngineStateError, Left
from .portal_host import PortalHost
from .trio_engine import TrioEngine
from .trio_thread import TrioThread, was_thrown_into

T = TypeVar("T")
Bell = queue.SimpleQueue[None]
_MOST_ASKED = 40  # callers' functions at once, in threads beside those of the engine, which they may need


@define(eq=False)
class ThreadAnswer(Generic[T]):
    """Implements `triolet.api.hosts.trio_thread.Answer` for any number of waiting threads.

    `set_result` sets the value before it reads the bells, and `hang` adds a bell before it reads the value. No thread
    can therefore miss the answer and sleep for ever.
    """

    _value: tuple[()] | tuple[T] = field(default=(), init=False)
    _bells: list[Bell] = field(factory=list, init=False)

    def done(self) -> bool:
        """Implements `Answer.done`."""
        return bool(self._value)

    def result(self) -> T:
        """Implements `Answer.result`."""
        assert self._value, "an answer is read before it is there"
        return self._value[0]

    def set_result(self, result: T, /) -> None:
        """Implements `Answer.set_result`."""
        self._value = (result,)
        for bell in tuple(self._bells):
            bell.put(None)

    def hang(self, bell: Bell) -> None:
        """Rings ``bell`` when the answer is set, or now if it is already set."""
        self._bells.append(bell)
        if self._value:
            bell.put(None)


@frozen(eq=False)
class Wait:
    """An awaitable with which a coroutine in `run` waits for one of ``answers``. If the thread is interrupted,
    ``hurry`` is called, and the coroutine waits for the last of ``answers``. Then the exception that interrupted the
    thread is raised.
    """

    hurry: Callable[[], object]
    answers: tuple[ThreadAnswer[Any], ...]

    def __await__(self) -> Generator[Wait, None, None]:
        yield self


@define(eq=False, repr=False)
class ThreadPortal(TrioThread):
    """A `TrioThread` for all threads of its process. The thread of the trio loop is excepted, since it cannot wait for
    itself.
    """

    awaits = False
    _asking: trio.CapacityLimiter = field(factory=partial(trio.CapacityLimiter, _MOST_ASKED), init=False)

    def new_answer(self) -> ThreadAnswer[Any]:
        """Implements `TrioThread.new_answer`."""
        return ThreadAnswer()

    async def outlast(self, hurry: Callable[[], object], *answers: Any) -> None:
        """Implements `TrioThread.outlast`."""
        try:
            await Wait(hurry, answers)
        except BaseException:  # perhaps a signal's handler raised between two waits: the coroutine is thrown away
            hurry()
            raise

    async def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Implements `TrioThread.ask` in a thread, which a cancelled call leaves alone: it may work for minutes."""
        asked = partial(function, *arguments)
        return await trio.to_thread.run_sync(asked, limiter=self._asking, abandon_on_cancel=True)

    def may_wait(self, error: BaseException | None) -> bool:
        """Implements `TrioThread.may_wait`. The thread of the trio loop must not wait: the garbage collector may throw
        a block away there. A coroutine that is thrown away, by `run` for example, must not wait either. A user's
        generator that is closed may wait.
        """
        if threading.current_thread() is self._thread:
            return False
        return not (isinstance(error, GeneratorExit) and was_thrown_into(error) & inspect.CO_COROUTINE)

    def _check_caller(self) -> None:
        if not self.may_wait(None):
            raise EngineStateError(
                "the engine was called in its own thread (for example by an observer), where no call can wait; "
                "allowed: other threads, and statistics() in an observer"
            )

    def _to_callers(self, function: Callable[[], object]) -> None:
        function()


class ThreadHost(PortalHost):
    """A host for threads. A thread cannot be cancelled: if the engine fails, calls that wait raise the error, and so
    does the block when it is left."""

    def __init__(self, engine: TrioEngine) -> None:
        super().__init__(engine, ThreadPortal)


@define(eq=False)
class Interrupts:
    """A block that holds ^C back while a thread runs a coroutine. `KeyboardInterrupt` is not raised at once: ^C calls
    ``hurry`` of the present `Wait` and of all later ones. At the end of the block `KeyboardInterrupt` is raised, unless
    the coroutine has raised it.

    Python handles ^C in the main thread. A handler other than Python's own is not replaced. An exception that it raises
    while the thread waits is held back in the same way.
    """

    _came: BaseException | None = field(default=None, init=False)
    _hurry: Callable[[], object] | None = field(default=None, init=False)  # of the present wait

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self)
        return self

    def __call__(self, _: int, __: FrameType | None) -> None:
        """Handles the signal."""
        self._came = self._came or KeyboardInterrupt()
        if self._hurry is not None:
            self._hurry()

    def wait(self, wait: Wait) -> bool:
        """Sleeps until an answer is set. True if the thread was interrupted; then the last answer is set."""
        bell: Bell = queue.SimpleQueue()
        for answer in wait.answers:
            answer.hang(bell)
        self._hurry = wait.hurry  # before the next line, so that a ^C between them hurries twice, and is not missed
        if self._came is not None:
            wait.hurry()
        while True:
            interrupted = self._came is not None
            if any(answer.done() for answer in wait.answers[-1 if interrupted else 0 :]):
                break
            self._sleep(bell, wait)
        self._hurry = None
        return interrupted

    def go_on(self, coroutine: Coroutine[Any, Any, object], interrupted: bool) -> Wait:
        """Runs the coroutine to its next wait. If it was ``interrupted`` in the last one, raises the exception that
        came there."""
        wait: Wait = coroutine.throw(self._came) if interrupted and self._came else coroutine.send(None)
        return wait

    def _sleep(self, bell: Bell, wait: Wait) -> None:
        try:
            bell.get()
        except BaseException as error:  # noqa: BLE001  (of a signal's handler; raised at the end)
            self._came = self._came or error
            wait.hurry()

    def __exit__(self, *end: *Left) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        came, self._came = self._came, None
        try:
            if came is not None and came is not end[1]:
                raise came
        finally:
            del came  # a frame in its own error's traceback would be a reference cycle


def run(
    begin: Callable[[], Coroutine[Any, Any, T]],
    undo: Callable[[BaseException], Coroutine[Any, Any, object]] | None = None,
) -> T:
    """Runs the coroutine that ``begin`` makes, in this thread. The thread sleeps while the coroutine waits for a
    `ThreadPortal`. If ^C comes after the coroutine has ended, its result is lost, and ``undo`` is run.
    """
    has_ended = False
    try:
        with Interrupts() as interrupts, closing(begin()) as coroutine:
            result = _drive(coroutine, interrupts)
            has_ended = True
        return result  # noqa: TRY300  (a ^C at this very line is caught as well)
    except BaseException as error:
        if has_ended and undo is not None:
            run(partial(undo, error))
        raise


def _drive(coroutine: Coroutine[Any, Any, T], interrupts: Interrupts) -> T:
    interrupted = False
    try:
        while True:
            interrupted = interrupts.wait(interrupts.go_on(coroutine, interrupted))
    except StopIteration as end:
        result: T = end.value
        return result
