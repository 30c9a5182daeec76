"""Several requests for one caller: the requests run together, and end together where one of them fails."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field

_AT_ONCE = 16  # begin in one turn of the event loop: an answer waits for several turns
T = TypeVar("T")
Run = Callable[[], Awaitable[T]]


@define(eq=False)
class _Together(Generic[T]):
    runs: Sequence[Run[T]]
    begun: trio.Event | None
    results: dict[int, T] = field(factory=dict, init=False)
    error: Exception | None = field(default=None, init=False)

    async def run(self) -> None:
        """Returns when all runs have ended, or one has failed and the others have been cancelled."""
        async with trio.open_nursery() as nursery:
            for index in range(len(self.runs)):
                nursery.start_soon(self._one, index, nursery.cancel_scope)
                if index % _AT_ONCE == _AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()

    async def _one(self, index: int, scope: trio.CancelScope) -> None:
        try:
            if index > 0 and self.begun is not None:
                await self._wait(self.begun)
            self.results[index] = await self.runs[index]()
        except Exception as error:  # noqa: BLE001  (raised by `run_together`, as it is)
            self.error = self.error or error
            scope.cancel()

    async def _wait(self, begun: trio.Event) -> None:
        try:
            await begun.wait()
        except trio.Cancelled as cancelled:
            cancelled.__traceback__ = None  # see `Mailbox.wait`
            raise


@trio.lowlevel.enable_ki_protection
async def run_together(runs: Sequence[Run[T]], begun: trio.Event | None = None) -> list[T]:
    """The results of ``runs``, in their order. The first error of a run ends the other runs and is raised as it is, in
    no group. So is a cancellation, which callers and the portal recognise by its class.

    Args:
        begun: the first run sets it, and the others wait for it, so that they find its prompt in the caches.
    """
    together = _Together(runs, begun)
    error: BaseException | None = None
    try:
        try:
            await together.run()
        except BaseExceptionGroup as group:
            error = _first(group.split(trio.Cancelled)[1])
        await trio.lowlevel.checkpoint_if_cancelled()  # a cancellation in the group came from here
        error = error or together.error
        if error is not None:
            raise error
    finally:
        together.error = None  # a frame in its own error's traceback would be a reference cycle
        del error
    return [together.results[index] for index in range(len(runs))]


def _first(group: BaseExceptionGroup[BaseException] | None) -> BaseException | None:
    """The first error in the nursery's group: that of a ^C."""
    error: BaseException | None = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def background() -> AsyncIterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """Gives a function that starts a task. The tasks are cancelled when the block ends, and must not raise. The block's
    own error leaves it as it is, in no group."""
    error: BaseException | None = None
    try:
        try:
            async with trio.open_nursery() as nursery:
                try:
                    yield nursery.start_soon
                except BaseException as own:  # noqa: BLE001  (raised below: the nursery would put it into a group)
                    error = own
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = _first(group.split(trio.Cancelled)[1]) or error
            if error is None:
                await trio.lowlevel.checkpoint_if_cancelled()  # a cancellation in the group came from here
        if error is not None:
            raise error
    finally:
        del error
