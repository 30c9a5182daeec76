"""A Python thread that computes in the engine's own process: what it costs the engine, and what the engine costs it.

::

    python benchmarks/busy_thread.py DECODER [--interval 20 --interval 5000] [--rounds 5] [--speech WHISPER AUDIO]

Each round has a quiet request, the thread alone for half a second, and a request beside the thread, which counts. So
for each switch interval, in microseconds, of `triolet.actors.switch_interval`: the seconds of a request quiet and
beside the thread, their ratio, and how fast the thread counts beside it as a share of alone. Medians, with the lowest
and the highest. A round in which others took more than a fifth of the machine is repeated, 50 times at
most.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median

import click
import soundfile
import trio
from attrs import define, field

from triolet import Engine, EngineConfig, SamplingParams
from triolet.actors import switch_interval

OTHERS = 0.2
"""The most that others may take of the machine in a round."""

TRIES = 50
"""Rounds on end in which others may be busy."""

Request = Callable[[], Awaitable[object]]


@define
class Row:
    """What was measured with one interval: in each round."""

    quiet: list[float] = field(factory=list)
    beside: list[float] = field(factory=list)
    share: list[float] = field(factory=list)

    def shown(self, microseconds: float) -> str:
        ratios = [beside / quiet for quiet, beside in zip(self.quiet, self.beside, strict=True)]
        spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        return (
            f"| {microseconds:g} | {median(self.quiet):.2f} | {median(self.beside):.2f} | {spread} | "
            f"{median(self.share):.2f} ({min(self.share):.2f} to {max(self.share):.2f}) |"
        )


@contextmanager
def counting() -> Iterator[list[float]]:
    """A thread counts within the block. Then the list has how far it came in a second."""
    ended, told, reached = threading.Event(), [0.0], [0]

    def count() -> None:
        number = 0
        while not ended.is_set():
            number += 1
        reached[0] = number

    thread = threading.Thread(target=count, daemon=True)
    begun = time.perf_counter()
    thread.start()
    try:
        yield told
    finally:
        seconds = time.perf_counter() - begun
        ended.set()
        thread.join()
        told[0] = reached[0] / seconds


def taken() -> tuple[float, float, float]:
    """Seconds so far: of all processors, of this process's, and of the clock."""
    with open("/proc/stat") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    times = os.times()
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
    return busy, times.user + times.system, time.perf_counter()


async def timed(request: Request) -> float:
    begun = time.perf_counter()
    await request()
    return time.perf_counter() - begun


async def play(request: Request, intervals: tuple[float, ...], rounds: int) -> dict[float, Row]:
    """Rounds of each interval in turn."""
    rows = {interval: Row() for interval in intervals}
    await request()
    for interval in [each for _ in range(rounds) for each in intervals]:
        switch_interval.SHORT = interval * 1e-6
        for _ in range(TRIES):
            before = taken()
            quiet = await timed(request)
            with counting() as alone:
                await trio.sleep(0.5)
            with counting() as counted:
                beside = await timed(request)
            busy, ours, clock = (after - earlier for after, earlier in zip(taken(), before, strict=True))
            if (busy - ours) / clock / (os.cpu_count() or 1) <= OTHERS:
                break
            print("others were busy: again", file=sys.stderr)
        else:
            raise click.ClickException(f"others were busy in {TRIES} rounds on end; measure when the machine is quiet")
        row = rows[interval]
        row.quiet.append(quiet)
        row.beside.append(beside)
        row.share.append(counted[0] / alone[0])
    return rows


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("decoder", default="")
@click.option("--interval", "intervals", multiple=True, type=float, default=(switch_interval.SHORT * 1e6, 5000.0))
@click.option("--rounds", default=5, show_default=True)
@click.option("--speech", nargs=2, metavar="WHISPER AUDIO", help="Ten seconds of AUDIO instead of eight tokens.")
def main(decoder: str, intervals: tuple[float, ...], rounds: int, speech: tuple[str, str] | None) -> None:
    number = 0

    async def run() -> dict[float, Row]:
        async with Engine(speech[0] if speech else decoder, config=EngineConfig(device="cpu")) as engine:
            samples = soundfile.read(speech[1], dtype="float32")[0][: 10 * 16_000] if speech else None

            async def request() -> object:
                nonlocal number
                number += 1  # nothing is remembered
                if samples is not None:
                    return await engine.transcribe(samples * (1 - 0.001 * number), language="en")
                prompt = [1 + number, *range(100, 120)]
                return await engine.generate(
                    prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=8, ignore_eos=True)
                )

            return await play(request, intervals, rounds)

    print(f"load before: {os.getloadavg()}, {os.cpu_count()} CPUs")
    print("| interval, microseconds | quiet, s | beside, s | beside / quiet | thread, of alone |")
    print("|---|---|---|---|---|")
    for interval, row in trio.run(run).items():
        print(row.shown(interval))
    print(f"load after: {os.getloadavg()}")


if __name__ == "__main__":
    main()
