"""`Backend`: runs the requests of a `TrioEngine`, by the actors of this process or by replicas elsewhere."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from ...actors.messages import Stream
from ...actors.statistics import EngineStatistics
from ...core.model import ModelDescription
from ...core.request import Request


class Backend(Protocol):
    """Runs requests. `triolet.actors.supervisor.Supervisor` is the backend of this process."""

    @property
    def failure(self) -> str | None:
        """The type and text of what ended it unasked."""

    def running(self) -> AbstractAsyncContextManager[ModelDescription]:
        """Its life, for a block."""

    async def stop(self, drain_seconds: float) -> None:
        """Ends before the block does. Aborts requests that run longer than ``drain_seconds``."""

    def submit(self, request: Request, stream: Stream) -> None:
        """Takes a checked request, whose tokens and end go to ``stream``. Raises `EngineClosed` once it is stopping,
        `InvalidRequest` where there is no decoder."""

    def abort(self, request_id: str) -> None:
        """Aborts a request. Works under cancellation and while it stops; never raises."""

    async def sleep(self) -> None:
        """Gives the device back."""

    async def wake(self) -> None:
        """Takes the device again."""

    def statistics(self) -> EngineStatistics:
        """A snapshot."""
