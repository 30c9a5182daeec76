"""Hosts: where an engine's trio loop runs, and how its callers reach it. `Engine` picks one when it is entered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Protocol, TypeVar

from ...core.errors import EngineStateError
from ..live.session import LiveSession
from ..outputs.streams import DeltaStream
from ..speech.segments import SegmentStream

T = TypeVar("T")


class Host(Protocol):
    """Runs the callers' operations in the trio loop of a `TrioEngine`.

    Every method raises `EngineStateError` outside of the event loop that the engine was entered in.
    """

    @property
    def lasting(self) -> bool:
        """True if no block ends the engine, but `Engine.aclose`, which then leaves this host."""

    async def __aenter__(self) -> object:
        """Opens the engine. Its errors come out unchanged."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        """Closes the engine in order; `triolet.actors.supervisor.leaving` decides which error leaves the block. Called
        in another loop, it only tells the engine to stop."""

    def call(self, operation: Callable[[], Awaitable[T]]) -> Awaitable[T]:
        """Runs an operation of the engine. Cancelling the awaiting task cancels the operation and waits for its end."""

    def read(self, function: Callable[[], T]) -> T:
        """Calls a quick function where the engine's state may be read. Observers, which run in the engine's own loop,
        may call this too."""

    def deltas(
        self, open_block: Callable[[], AbstractAsyncContextManager[DeltaStream]]
    ) -> AbstractAsyncContextManager[DeltaStream]:
        """A block of the engine that gives deltas."""

    def segments(
        self, open_block: Callable[[], AbstractAsyncContextManager[SegmentStream]]
    ) -> AbstractAsyncContextManager[SegmentStream]:
        """A block of the engine that gives segments."""

    def live(
        self, open_block: Callable[[], AbstractAsyncContextManager[LiveSession]]
    ) -> AbstractAsyncContextManager[LiveSession]:
        """A block of the engine that is fed with audio and gives text."""


def foreign(way: str, plain: str) -> EngineStateError:
    """The error of a caller in another loop or thread. ``way`` is the call that leads to the engine's loop for what is
    awaited, ``plain`` the one for all else."""
    return EngineStateError(
        f"the engine was used outside of the event loop that it was entered in; allowed: tasks of that loop. From "
        f"another thread ask it by {way}, and by {plain} for what is not awaited, as statistics(); in another loop "
        f"open an engine of its own"
    )
