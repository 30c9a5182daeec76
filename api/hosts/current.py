"""The host of an engine, chosen by the event loop in which the engine is entered, and the identity of the running
task.
"""

from __future__ import annotations

import sniffio
import trio

from ...core.errors import EngineStateError
from .portal_host import PortalHost
from .trio_engine import TrioEngine
from .trio_host import TrioHost

Host = TrioHost | PortalHost


def current_host(engine: TrioEngine, *, lasting: bool = False) -> Host:
    """Returns a host for ``engine`` in the running event loop.

    Args:
        lasting: the engine is opened without a block.

    Raises:
        EngineStateError: no event loop of trio or asyncio is running, or ``lasting`` is true under trio.
    """
    if _library() == "asyncio":
        from .asyncio_host import AsyncioHost

        return AsyncioHost(engine, lasting=lasting)
    if lasting:
        raise EngineStateError(
            "open() was called under trio, where an engine cannot outlive the block that opens it; use async with "
            "Engine(...) as engine, or SyncEngine(...) with open(), whose engine has a thread of its own"
        )
    return TrioHost(engine)


def current_task() -> object:
    """Returns the task that runs. Callers keep the task, not its ``id()``, which another task may get later."""
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
        f"the engine was entered under {library}; allowed: a task of trio or asyncio, also by anyio (trio.run(...), "
        "asyncio.run(...), anyio.run(...)). Without an event loop use SyncEngine(...)"
    )
