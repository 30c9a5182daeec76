"""Several requests of one caller, run together. If one of them fails, all end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import trio
from attrs import define, field

from ...core.tracebacks import Untraced

_AT_ONCE = 16  # requests that begin in one turn of the event loop, so that many requests do not block it
T = TypeVar("T")
Operation = Callable[[], Awaitable[T]]


@define(eq=False)
class _Together(Generic[T]):
    operations: Sequence[Operation[T]]
    begun: trio.Event | None
    results: dict[int, T] = field(factory=dict, init=False)
    error: Exception | None = field(default=None, init=False)

    async def run(self) -> None:
        """Runs all operations. Returns when all have ended, or when one has failed and the others are cancelled."""
        async with trio.open_nursery() as nursery:
            for index in range(len(self.operations)):
                nursery.start_soon(self._one, index, nursery.cancel_scope)
                if index % _AT_ONCE == _AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()

    @trio.lowlevel.enable_ki_protection
    async def _one(self, index: int, scope: trio.CancelScope) -> None:
        try:
            if index > 0 and self.begun is not None:
                with Untraced(trio.Cancelled):
                    await self.begun.wait()
            self.results[index] = await self.operations[index]()
        except Exception as error:  # noqa: BLE001  (raised by `run_together`, as it is)
            self.error = self.error or error
            scope.cancel()


async def run_together(operations: Sequence[Operation[T]], begun: trio.Event | None = None) -> list[T]:
    """Runs ``operations`` together, and returns their results in this order. The first error of an operation ends the
    others and is raised as it is, not in a group. A cancellation is raised as it is, too, since callers and the portal
    recognise it by its class.

    Args:
        begun: an event that the first operation sets. The others wait for it, so that they find the prompt of the first
            one in the caches.
    """
    if len(operations) == 1:  # a nursery would cost time
        return [await operations[0]()]
    together = _Together(operations, begun)
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
    return [together.results[index] for index in range(len(operations))]


def _first(group: BaseExceptionGroup[BaseException] | None) -> BaseException | None:
    """Returns the first error in the group that a nursery raised. Only ^C puts an error into the nursery's group."""
    error: BaseException | None = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def background() -> AsyncIterator[Callable[[Callable[[], Awaitable[None]]], None]]:
    """Opens a block and returns a function that starts tasks in it. The tasks must not raise; they are cancelled when
    the block ends. An error of the block's body is raised as it is, not in a group."""
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
