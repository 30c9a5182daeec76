"""An engine for threads that run no event loop: its trio loop runs in a thread behind a `ThreadPortal`."""

from __future__ import annotations

import trio

from ...actors.supervisor import leaving
from ...core.errors import EngineStateError
from .portal_host import PortalHost
from .thread_portal import ThreadPortal
from .trio_engine import TrioEngine
from .trio_thread import nothing


class ThreadHost(PortalHost):
    """Nothing can cancel a thread: where the engine fails, the calls that wait end with the error, and so does the
    block."""

    def __init__(self, engine: TrioEngine) -> None:
        super().__init__(engine, ThreadPortal, _foreign, nothing)

    async def _close(self, body_error: BaseException | None, *, drain: bool) -> BaseException | None:
        """See `PortalHost._close`."""
        ours, interrupted = await self._end(drain=drain)
        try:
            if interrupted is not None and (body_error is None or isinstance(body_error, (Exception, GeneratorExit))):
                body_error = interrupted
            return leaving(body_error, ours, trio.Cancelled)
        finally:
            del body_error, ours, interrupted


def _foreign() -> EngineStateError:
    return EngineStateError(
        "the engine was called where nobody can wait for it: in its own thread, as by an observer, or in a fork of the "
        "process that opened it; allowed: any other thread of that process, and statistics() in an observer. In a fork "
        "open an engine of its own"
    )
