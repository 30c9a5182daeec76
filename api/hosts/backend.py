"""`Backend`: runs the requests of a `TrioEngine`, either on actors of this process or on replicas elsewhere."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ...actors.messages import Stream
from ...actors.statistics import EngineStatistics
from ...core.model import ModelDescription
from ...core.request import Request


class Backend(Protocol):
    """A part that runs requests. `triolet.actors.supervisor.Supervisor` is the backend of this process."""

    @property
    def failure(self) -> str | None:
        """The type and text of the error that ended the backend; ``None``: it has not failed."""

    def running(self) -> AbstractAsyncContextManager[ModelDescription]:
        """Returns a block within which the backend runs."""

    async def stop(self, drain_seconds: float) -> None:
        """Ends the backend before its block ends. Requests that run longer than ``drain_seconds`` are aborted."""

    def submit(self, request: Request, stream: Stream) -> None:
        """Accepts a checked request, and sends its tokens and its end to ``stream``.

        Raises:
            EngineClosed: the backend is stopping.
        """

    def abort(self, request_id: str, stopped: bool = False) -> None:
        """Aborts a request. ``stopped``: it counts as finished, since its caller has found a stop string. Works under
        cancellation and while the backend stops, and never raises."""

    async def sleep(self) -> None:
        """Releases the device, see `Engine.sleep`."""

    async def wake(self) -> None:
        """Takes the device again, see `Engine.wake`."""

    async def load_adapter(self, folder: str) -> str:
        """Loads an adapter, and returns its key. Each load is to be taken back by `unload_adapter`."""

    def unload_adapter(self, key: str) -> None:
        """Takes one load of an adapter back. Never waits, never raises."""

    def statistics(self) -> EngineStatistics:
        """Returns a snapshot of the statistics."""
