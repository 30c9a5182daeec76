"""An asyncio loop in a thread of its own, and its tasks by name. Ray's answers need such a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any

Work = Callable[[], Coroutine[Any, Any, None]]


class NamedTasks:
    """Starts tasks in ``loop`` and cancels them by their names. Both may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}

    def start(self, name: Hashable, work: Work) -> None:
        """Starts ``work()`` as a task with ``name``, which no other task may have."""
        self._loop.call_soon_threadsafe(self._start, name, work)

    def cancel(self, name: Hashable) -> None:
        """Cancels the task ``name`` if it still runs."""
        self._loop.call_soon_threadsafe(self._cancel, name)

    async def end(self) -> None:
        """Cancels all tasks, and waits for their end. Called in the loop."""
        left = list(self._tasks.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _start(self, name: Hashable, work: Work) -> None:
        task = self._tasks[name] = self._loop.create_task(work())
        task.add_done_callback(lambda _: self._tasks.pop(name, None))

    def _cancel(self, name: Hashable) -> None:
        task = self._tasks.get(name)
        if task is not None:
            task.cancel()


class AsyncioThread:
    """An asyncio loop that runs in a thread during the block. The block gets the loop's `NamedTasks`. Tasks that still
    run at its end are cancelled and awaited."""

    def __enter__(self) -> NamedTasks:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="triolet cluster")
        self._thread.start()
        self._ready.wait()
        return self._tasks

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    async def _run(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        self._tasks = NamedTasks(self._loop)
        self._ready.set()
        await self._leave.wait()
        await self._tasks.end()
