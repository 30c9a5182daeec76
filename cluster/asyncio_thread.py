"""An asyncio loop in a thread of its own: Ray's answers come on asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Self

Work = Callable[[], Coroutine[Any, Any, None]]


class AsyncioThread:
    """An asyncio loop in a thread, for the block. Tasks that are left when it ends are cancelled and awaited."""

    def __enter__(self) -> Self:
        self._ready = threading.Event()
        self._tasks: dict[Hashable, asyncio.Task[None]] = {}
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="triolet cluster")
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._leave.set)
        self._thread.join()

    def start(self, name: Hashable, work: Work) -> None:
        """Starts ``work()`` as a task of a new ``name``. From any thread."""
        self._loop.call_soon_threadsafe(self._start, name, work)

    def cancel(self, name: Hashable) -> None:
        """Cancels the task of this name, if it runs. From any thread."""
        self._loop.call_soon_threadsafe(self._cancel, name)

    async def _run(self) -> None:
        self._loop, self._leave = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        await self._leave.wait()
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
