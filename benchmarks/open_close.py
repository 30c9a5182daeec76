"""Fifty engines, one after another, in one process: each opens the demo checkpoint, transcribes, and ends.

::

    python benchmarks/open_close.py

Prints what the process holds afterwards: resident size, live tensor bytes, threads, file descriptors, objects that the
collector knows. The claim: from the third engine on the resident size grows by less than 1 % in all, and no tensor,
thread or descriptor is left.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
from statistics import median

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
    if engines < 10:
        parser.error(f"--engines {engines}; allowed: 10 or more")
    levels: list[Level] = []
    print("| engine | resident, MB | tensor bytes | threads | descriptors | objects |\n|---|---|---|---|---|---|")
    for number in range(1, engines + 1):
        trio.run(live)
        levels.append(Level.now())
        if number in SHOWN or number % 10 == 0:
            print(
                f"| {number} | {levels[-1].resident_mb:.1f} | " + " | ".join(map(str, astuple(levels[-1])[1:])) + " |"
            )
    sys.exit(0 if _claim(levels[2:]) else 1)


def _claim(levels: list[Level]) -> bool:
    """The allocator's arenas breathe, so that the first and the last fifth are compared, not two readings."""
    fifth = max(2, len(levels) // 5)
    first, last = (median(level.resident_mb for level in part) for part in (levels[:fifth], levels[-fifth:]))
    growth = last / first - 1
    left = (
        levels[-1].tensor_bytes,
        levels[-1].threads - levels[0].threads,
        levels[-1].descriptors - levels[0].descriptors,
    )
    print(f"{_holds(growth < 0.01)}: grown by {growth:+.2%} from the first fifth to the last; claimed: less than 1 %")
    print(f"{_holds(not any(left))}: tensor bytes, threads, descriptors left: {left}; claimed: none")
    return growth < 0.01 and not any(left)


def _holds(claim: bool) -> str:
    return "holds" if claim else "FAILS"


if __name__ == "__main__":
    main()
