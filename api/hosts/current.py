"""Picks an engine's host, by the event loop in which the engine is entered, and names the task that runs."""

from __future__ import annotations

import sniffio
import trio

from ...core.errors import EngineStateError
from .host import Host
from .trio_engine import TrioEngine
from .trio_host import TrioHost


def current_host(engine: TrioEngine) -> Host:
    """A host for the block of ``engine`` in the running event loop.

    Raises:
        EngineStateError: no loop is running, or a loop of another library is.
    """
    if _library() == "trio":
        return TrioHost(engine)
    from .asyncio_host import AsyncioHost

    return AsyncioHost(engine)


def lasting_host(engine: TrioEngine) -> Host:
    """A host for ``engine`` in the running event loop, without a block.

    Raises:
        EngineStateError: as `current_host`; or the loop is trio's.
    """
    if _library() == "trio":
        raise EngineStateError(
            "open() was called under trio, where no task outlives the block that started it, and so no engine the task "
            "that opened it; allowed: async with Engine(...) as engine, or SyncEngine(...), which open() holds in a "
            "thread of its own"
        )
    from .asyncio_host import AsyncioHost

    return AsyncioHost(engine, lasting=True)


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
