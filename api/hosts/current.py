"""Picks an engine's host, by the event loop in which the engine is entered, and names the task that runs."""

from __future__ import annotations

import sniffio
import trio

from ...core.errors import EngineStateError
from .portal_host import PortalHost
from .trio_engine import TrioEngine
from .trio_host import TrioHost

Host = TrioHost | PortalHost


def current_host(engine: TrioEngine, *, lasting: bool = False) -> Host:
    """A host for the block of ``engine`` in the running event loop; for one without a block if it is ``lasting``.

    Raises:
        EngineStateError: no loop is running, or a loop of another library is; a ``lasting`` one under trio.
    """
    if _library() == "asyncio":
        from .asyncio_host import AsyncioHost

        return AsyncioHost(engine, lasting=lasting)
    if lasting:
        raise EngineStateError(
            "open() was called under trio, where no task outlives the block that started it, and so no engine the task "
            "that opened it; allowed: async with Engine(...) as engine, or SyncEngine(...), which open() holds in a "
            "thread of its own"
        )
    return TrioHost(engine)


def current_task() -> object:
    """The task that runs: itself, since its ``id()`` may be another one's when it has ended."""
    if _library() == "trio":
        return trio.lowlevel.current_task()
    from .asyncio_host import running_task

    return running_task()


def _library() -> str:
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "no event loop"
    if library in ("trio", "asyncio"):
        return library
    raise EngineStateError(
        f"the engine was entered under {library}; allowed: a task of trio or asyncio, and anyio on either "
        f"(trio.run(...), asyncio.run(...), anyio.run(...)); or SyncEngine(...), which needs no event loop"
    )
