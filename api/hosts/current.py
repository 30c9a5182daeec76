"""Picks an engine's host, by the event loop in which the engine is entered."""

from __future__ import annotations

import sniffio

from ...core.errors import EngineStateError
from .host import Host
from .trio_engine import TrioEngine
from .trio_host import TrioHost


def current_host(engine: TrioEngine) -> Host:
    """A host for ``engine`` in the running event loop.

    Raises:
        EngineStateError: no loop is running, or a loop of another library is.
    """
    try:
        library = sniffio.current_async_library()
    except sniffio.AsyncLibraryNotFoundError:
        library = "no event loop"
    if library == "trio":
        return TrioHost(engine)
    if library == "asyncio":
        from .asyncio_host import AsyncioHost

        return AsyncioHost(engine)
    raise EngineStateError(
        f"the engine was entered under {library}; allowed: a task of trio or asyncio, and anyio on either "
        f"(trio.run(...), asyncio.run(...), anyio.run(...))"
    )
