"""An engine for tasks of an asyncio loop. The engine's trio loop runs in a thread that the tasks reach through a
`TaskPortal`. Answers cross with ``loop.call_soon_threadsafe``, in order."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import anyio.lowlevel
import sniffio
import trio
from attrs import define, field

from ...actors.supervisor import is_cancellation, leaving
from ...core.errors import Left
from .portal_host import PortalHost
from .state import foreign
from .trio_engine import TrioEngine
from .trio_thread import TrioThread, was_thrown_into


@define(eq=False, repr=False)
class TaskPortal(TrioThread):
    """A `TrioThread` for tasks of one asyncio loop, in which the portal is made. In another loop or thread its futures
    would wake no task.
    """

    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.get_running_loop, init=False)

    def new_answer(self) -> asyncio.Future[Any]:
        """Implements `TrioThread.new_answer`."""
        return self._loop.create_future()

    @staticmethod
    async def outlast(hurry: Callable[[], object], *answers: Any) -> None:
        """Implements `TrioThread.outlast`. Raises the first cancellation itself, since anyio recognises its own
        cancellations by their message."""
        try:
            await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            hurry()
            with anyio.CancelScope(shield=True):  # else a cancelled scope of anyio would cancel every further wait
                while not answers[-1].done():
                    with suppress(asyncio.CancelledError):  # `Task.cancelling` still counts it
                        await asyncio.wait(answers[-1:])
            raise
        except BaseException:  # the coroutine is thrown away or interrupted by ^C, and cannot wait any more
            hurry()
            raise

    async def ask(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Implements `TrioThread.ask` in a task of the loop."""
        ended, token = trio.Event(), trio.lowlevel.current_trio_token()
        answer = asyncio.run_coroutine_threadsafe(function(*arguments), self._loop)
        answer.add_done_callback(lambda _: token.run_sync_soon(ended.set))
        try:
            await ended.wait()
            return answer.result()
        finally:
            answer.cancel()
            del answer  # a frame in its own error's traceback would be a reference cycle

    @staticmethod
    def may_wait(error: BaseException | None) -> bool:
        """Implements `TrioThread.may_wait`.

        `GeneratorExit` comes from one of two senders. The innermost frame of the error shows which. In an async
        generator it is ``aclose()``, which a task awaits, so the block may wait. In a coroutine it is the interpreter,
        which throws the coroutine away. The block must not wait then, even if generators of context managers are
        between the two. Without a task no block can wait.
        """
        if not isinstance(error, GeneratorExit):
            return True
        try:
            sniffio.current_async_library()
        except sniffio.AsyncLibraryNotFoundError:
            return False
        return bool(was_thrown_into(error) & inspect.CO_ASYNC_GENERATOR)

    def _check_caller(self) -> None:
        here: asyncio.AbstractEventLoop | None
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise foreign("asyncio.run_coroutine_threadsafe(...)", "loop.call_soon_threadsafe(...)")

    def _to_callers(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            self._forsaken = True


class AsyncioHost(PortalHost):
    """A host for tasks of an asyncio loop.

    asyncio's tasks have no nurseries. So if the engine fails while the block's body runs, the host cancels the task
    that entered the engine. When that task leaves the block, the host takes the cancellation back, as `asyncio.timeout`
    does. If another task leaves the block, as in fixtures of test frameworks, the cancellation is not taken back.

    A ``lasting`` engine cancels no task, since the task that opened the engine may have ended.
    """

    def __init__(self, engine: TrioEngine, *, lasting: bool = False) -> None:
        self.lasting = lasting
        task = running_task()
        # weak, so that an engine that is kept does not keep the task of a loop that has ended
        self._task = None if lasting else weakref.ref(task)
        self._cancelling = task.cancelling()  # earlier cancellations by others
        self._is_leaving = False
        super().__init__(engine, TaskPortal)

    async def __aenter__(self) -> object:
        await anyio.lowlevel.checkpoint()  # if the caller is already cancelled, nothing is loaded
        return await super().__aenter__()

    async def __aexit__(self, *end: *Left) -> None:
        self._is_leaving = True
        await super().__aexit__(*end)

    async def _leaving(self, body_error: BaseException | None, ours: BaseException | None) -> BaseException | None:
        others = self._take_back()
        if not others or body_error is None or not is_cancellation(body_error, asyncio.CancelledError):
            return leaving(body_error, ours, asyncio.CancelledError)
        # a cancellation by others counts as an error of the body; asyncio knows none of trio's
        return leaving(await _of_anyio(body_error), ours, trio.Cancelled)

    def _engine_failed(self) -> None:
        """Cancels the task, once only, since `_take_back` takes one cancellation back."""
        task = None if self._task is None else self._task()
        if task is not None and not (self._is_leaving or self._failed):
            self._failed = task.cancel("the engine failed")

    def _take_back(self) -> bool:
        """Takes the host's cancellation back. True if the task was cancelled by the host, and by others as well."""
        task = asyncio.current_task()
        if not self._failed or self._task is None or task is None or task is not self._task():
            return False
        return task.uncancel() > self._cancelling


async def _of_anyio(error: BaseException) -> BaseException:
    """Returns anyio's own cancellation of the present task, which anyio must see, or else ``error``."""
    try:
        await anyio.lowlevel.checkpoint_if_cancelled()
    except asyncio.CancelledError as cancelled:
        return cancelled
    return error


def running_task() -> asyncio.Task[object]:
    """Returns the task that runs."""
    task = asyncio.current_task()
    assert task is not None, "a callback of the loop awaits nothing"
    return task
