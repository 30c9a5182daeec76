"""An engine for tasks of an asyncio loop: its trio loop runs in a thread behind a `Portal`."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

import anyio.lowlevel

from ...actors.supervisor import is_cancellation, leaving
from ...core.errors import EngineStateError
from .host import foreign
from .portal import Portal
from .portal_host import PortalHost
from .trio_engine import TrioEngine


class AsyncioHost(PortalHost):
    """asyncio has no nurseries: where the engine fails while the body runs, the host cancels the task that entered it.
    When that task leaves the block, the host takes the cancellation back, as `asyncio.timeout` does. Where another task
    leaves the block, as in fixtures of test frameworks, nothing takes the cancellation back.

    A ``lasting`` engine cancels nobody: the task that has opened it may be over.
    """

    def __init__(self, engine: TrioEngine, *, lasting: bool = False) -> None:
        self.lasting = lasting
        task = running_task()
        # weak: a kept engine must not keep the task of a loop that is gone
        self._task = None if lasting else weakref.ref(task)
        self._cancelling = task.cancelling()  # cancellations by others, before
        self._leaving = False
        self._failed = False  # the engine failed, and the host cancelled ``_task`` for it
        super().__init__(engine, Portal, _foreign, _weakly(self._engine_failed))

    async def __aenter__(self) -> object:
        await anyio.lowlevel.checkpoint()  # a caller that is cancelled already loads nothing
        return await super().__aenter__()

    async def _close(self, body_error: BaseException | None, *, drain: bool) -> BaseException | None:
        """See `PortalHost._close`."""
        self._leaving = True
        ours, cancelled = await self._end(drain=drain and not self._failed)
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
        task = None if self._task is None else self._task()
        if task is not None and not (self._leaving or self._failed):
            self._failed = task.cancel("the engine failed")

    def _take_back(self) -> bool:
        """Takes the host's cancellation back. True if there was one, and others have cancelled the task as well."""
        task = asyncio.current_task()
        if not self._failed or self._task is None or task is None or task is not self._task():
            return False
        return task.uncancel() > self._cancelling


def running_task() -> asyncio.Task[object]:
    """The task that runs."""
    task = asyncio.current_task()
    assert task is not None, "a callback of the loop awaits nothing"
    return task


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
