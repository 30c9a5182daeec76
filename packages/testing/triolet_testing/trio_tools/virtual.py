"""Virtual time for programs that use threads. Time stands still while a thread works.

`trio.testing.MockClock` with ``autojump_threshold`` does not notice threads: by chance, it would jump while they work.
`run_virtually` jumps only when every task waits and no thread of trio's works, so that threads take no virtual time,
and the same program takes the same time in every run.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import trio
import trio.testing

T = TypeVar("T")

_PATIENCE = 0.001  # real seconds between two checks whether a thread still works


def run_virtually(main: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Runs ``main`` as `trio.run` does, on virtual time. Only threads of `trio.to_thread` under its default limiter may
    work. If all tasks wait and no deadline is left, the program waits for ever."""
    clock = trio.testing.MockClock()

    async def driven() -> T:
        trio.lowlevel.spawn_system_task(_drive, clock)
        return await main(*arguments)

    return trio.run(driven, clock=clock)


async def _drive(clock: trio.testing.MockClock) -> None:
    threads = trio.to_thread.current_default_thread_limiter()
    while True:
        await trio.testing.wait_all_tasks_blocked(_PATIENCE if threads.borrowed_tokens else 0.0)
        seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
        if threads.borrowed_tokens or math.isinf(seconds):
            await trio.testing.wait_all_tasks_blocked(_PATIENCE)
        else:
            clock.jump(max(seconds, 0.0))
