"""Several calls of one engine at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio

from ...api.engine import Engine
from ...api.hosts.alternatives import run_together
from ...api.outputs.results import Delta, Usage
from ...core.timings import Timings

T = TypeVar("T")


async def run_all(calls: list[Callable[[], Awaitable[T]]]) -> list[T]:
    """The result of each call. One that fails ends the others, and its error is raised as it is."""

    def run_of(call: Callable[[], Awaitable[T]]) -> Callable[[Callable[[], object]], Awaitable[T]]:
        async def run(begun: Callable[[], object]) -> T:
            begun()
            return await call()

        return run

    return await run_together([run_of(call) for call in calls])


async def streams_together(
    engine: Engine, queries: list[dict[str, Any]], tell: Callable[[int, Delta], Awaitable[None]]
) -> tuple[list[Usage], Timings | None]:
    """Streams each of ``queries`` (arguments of `Engine.stream`), and tells their deltas with their places, as they
    come. One that fails ends all. Returns the usage of each, and the timings of the first."""
    send, receive = trio.open_memory_channel[tuple[int, Delta]](0)

    def follower(index: int, out: trio.MemorySendChannel[tuple[int, Delta]]) -> Callable[[], Awaitable[Any]]:
        async def follow() -> tuple[Usage | None, Timings | None]:
            usage = None
            async with out, engine.stream(**queries[index]) as deltas:
                async for delta in deltas:
                    usage = delta.usage or usage
                    await out.send((index, delta))
                return usage, deltas.timings

        return follow

    async def relay() -> None:
        async with receive:
            async for index, delta in receive:
                await tell(index, delta)

    async with send:
        followers = [follower(index, send.clone()) for index in range(len(queries))]
    _, *ends = await run_all([relay, *followers])
    return [usage for usage, _ in ends if usage is not None], ends[0][1]
