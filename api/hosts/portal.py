"""`Portal`: the tasks of an asyncio loop as callers of a `TrioThread`. Answers cross by
``loop.call_soon_threadsafe``, in order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import sniffio
from attrs import define, field

from .trio_thread import TrioThread, was_thrown_into


async def outlast(hurry: Callable[[], object], *futures: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Waits until one of ``futures`` is done, however often the waiting task is cancelled.

    The first cancellation calls ``hurry``, which must see to it that a future gets done. That cancellation is returned,
    for the caller to raise at the end: the same object, since anyio knows its own cancellations by their message.
    """
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError as error:
        hurry()
        cancelled = error
    except BaseException:  # the coroutine is thrown away, or a ^C hit it: it cannot wait any more
        hurry()
        raise
    else:
        return None
    try:
        with anyio.CancelScope(shield=True):  # else a cancelled scope of anyio would cancel every wait anew
            while not any(future.done() for future in futures):
                with suppress(asyncio.CancelledError):  # counted in `Task.cancelling`
                    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        return cancelled
    finally:
        del cancelled  # a frame in its own error's traceback would be a reference cycle


def may_wait(error: BaseException | None) -> bool:
    """True if a block that is left with ``error`` may await.

    `GeneratorExit` has two senders, and the innermost frame of the error tells them apart. At a ``yield`` of an async
    generator the sender is ``aclose()``, which a task awaits. In a coroutine the sender is the interpreter, which
    throws the coroutine away: it must not wait, though generators of context managers may lie between. Without a task
    nothing can wait either.
    """
    if not isinstance(error, GeneratorExit):
        return True
    try:
        sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        return False
    return bool(was_thrown_into(error) & inspect.CO_ASYNC_GENERATOR)


@define(eq=False, repr=False)
class Portal(TrioThread):
    """A `TrioThread` for the tasks of the asyncio loop that makes it. In another loop or thread its futures would never
    wake anybody, so there it raises the error that ``foreign`` makes."""

    _loop: asyncio.AbstractEventLoop = field(factory=asyncio.get_running_loop, init=False)

    def new_answer(self) -> asyncio.Future[Any]:
        """See `TrioThread.new_answer`."""
        return self._loop.create_future()

    async def outlast(self, hurry: Callable[[], object], *answers: Any) -> asyncio.CancelledError | None:
        """See `TrioThread.outlast`."""
        return await outlast(hurry, *answers)

    def may_wait(self, error: BaseException | None) -> bool:
        """See `TrioThread.may_wait`."""
        return may_wait(error)

    def check(self) -> None:
        """See `TrioThread.check`."""
        here: asyncio.AbstractEventLoop | None
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop:
            raise self.foreign()

    def _to_callers(self, function: Callable[[], object]) -> bool:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed
            return False
        return True
