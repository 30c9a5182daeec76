"""What a hand-over to the worker thread and back costs: three ways, median of many round trips, in microseconds.

python benchmarks/handover.py
"""

from __future__ import annotations

import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Awaitable, Callable

import trio

ROUNDS = 3000


async def timed(round_trip: Callable[[], Awaitable[object]]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        await round_trip()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


async def run_sync_soon() -> float:
    """As `triolet.actors.worker.ThreadWorker` does it."""
    jobs: queue.SimpleQueue[bool] = queue.SimpleQueue()
    token = trio.lowlevel.current_trio_token()
    send, receive = trio.open_memory_channel[bool](math.inf)

    def work() -> None:
        while jobs.get():
            token.run_sync_soon(send.send_nowait, True)

    async def round_trip() -> None:
        jobs.put(True)
        await receive.receive()

    return await with_thread(work, jobs, round_trip)


async def eventfd() -> float:
    jobs: queue.SimpleQueue[bool] = queue.SimpleQueue()
    wake = os.eventfd(0, os.EFD_NONBLOCK)

    def work() -> None:
        while jobs.get():
            os.eventfd_write(wake, 1)

    async def round_trip() -> None:
        jobs.put(True)
        await trio.lowlevel.wait_readable(wake)
        os.eventfd_read(wake)

    try:
        return await with_thread(work, jobs, round_trip)
    finally:
        os.close(wake)


async def to_thread() -> float:
    return await timed(lambda: trio.to_thread.run_sync(bool))


async def with_thread(
    work: Callable[[], None], jobs: queue.SimpleQueue[bool], round_trip: Callable[[], Awaitable[object]]
) -> float:
    thread = threading.Thread(target=work)
    thread.start()
    try:
        return await timed(round_trip)
    finally:
        jobs.put(False)
        thread.join()


if __name__ == "__main__":
    for way in (run_sync_soon, eventfd, to_thread):
        print(f"{way.__name__}: {trio.run(way):.0f} us")
