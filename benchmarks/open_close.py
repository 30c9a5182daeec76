"""Fifty engines, one after another, in one process: each opens the demo checkpoint, transcribes, and ends.

::

    python benchmarks/open_close.py

Prints what the process holds afterwards: resident size, live tensor bytes, threads, file descriptors, objects that the
collector knows. The claim: after the second engine the resident size grows by less than 1 % in all, and no tensor, thread
or descriptor is left.
"""

from __future__ import annotations

import argparse
import gc
import threading

import psutil
import trio
from attrs import astuple, frozen

from triolet import Engine, demo
from triolet.testing import live_bytes

SHOWN = (1, 2, 5)  # and every tenth


@frozen
class Level:
    """What the process holds."""

    resident_mb: float
    tensor_bytes: int
    threads: int
    descriptors: int
    objects: int

    @classmethod
    def now(cls) -> Level:
        process = psutil.Process()
        return cls(
            resident_mb=process.memory_info().rss / 1e6,
            tensor_bytes=live_bytes(),
            threads=threading.active_count(),
            descriptors=process.num_fds() if hasattr(process, "num_fds") else 0,
            objects=len(gc.get_objects()),
        )


async def live() -> None:
    async with Engine(demo.checkpoint()) as engine:
        await engine.transcribe(demo.samples()[0].path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", type=int, default=50)
    engines = parser.parse_args().engines
    if engines < 3:
        parser.error(f"--engines {engines}; allowed: 3 or more")
    levels: list[Level] = []
    print("| engine | resident, MB | tensor bytes | threads | descriptors | objects |\n|---|---|---|---|---|---|")
    for number in range(1, engines + 1):
        trio.run(live)
        levels.append(Level.now())
        if number in SHOWN or number % 10 == 0:
            print(
                f"| {number} | {levels[-1].resident_mb:.1f} | " + " | ".join(map(str, astuple(levels[-1])[1:])) + " |"
            )
    first, last = levels[1], levels[-1]
    growth = last.resident_mb / first.resident_mb - 1
    left = (last.tensor_bytes, last.threads - first.threads, last.descriptors - first.descriptors)
    print(
        f"{'holds' if growth < 0.01 else 'FAILS'}: grown by {growth:.2%} since the second engine; claimed: less than 1 %"
    )
    print(
        f"{'holds' if left == (0, 0, 0) else 'FAILS'}: tensor bytes, threads and descriptors left: {left}; claimed: none"
    )


if __name__ == "__main__":
    main()
