"""What `EngineConfig(verify=True)` costs: the time that the checker takes over the events of a run, as a share of the
time that the run takes.

    python benchmarks/verify.py

A run: the shipped recordings' first windows, again and again, by several clients at once, through the real engine.
Its events are kept, and then told to a fresh checker, many times; the share is of the same run, so that a busy machine
slows both.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import trio

import triolet.demo
from triolet import Engine, EngineConfig, Event
from triolet.core.events import StepEnded
from triolet.testing import TraceChecker

REPLAYS = 20


async def run(model: Path, clients: int, rounds: int) -> tuple[float, list[Event]]:
    """Seconds of the run, and its events."""
    events: list[Event] = []
    samples = [sample.path for sample in triolet.demo.samples()]
    async with Engine(model, config=EngineConfig(device="cpu", observer=events.append)) as engine:
        begun = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for client in range(clients):
                nursery.start_soon(transcribe, engine, [samples[client % len(samples)]] * rounds)
        return time.perf_counter() - begun, events


async def transcribe(engine: Engine, paths: list[Path]) -> None:
    for path in paths:
        await engine.transcribe(path, language="en")


def check(events: list[Event]) -> float:
    """Seconds that a checker takes over the events."""
    checker = TraceChecker(capacity=EngineConfig().encoder_cache_bytes, steps_in_flight=2)
    begun = time.perf_counter()
    for event in events:
        checker(event)
    seconds = time.perf_counter() - begun
    checker.end()
    return seconds


@click.command()
@click.option("--clients", default=8, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--repeats", default=3, show_default=True)
def main(clients: int, rounds: int, repeats: int) -> None:
    """Print the share of a run's time that checking its events takes."""
    shares = []
    for _ in range(repeats):
        took, events = trio.run(run, triolet.demo.checkpoint(), clients, rounds)
        checked = statistics.median(check(events) for _ in range(REPLAYS))
        steps = sum(isinstance(event, StepEnded) for event in events)
        shares.append(checked / took)
        print(
            f"{steps} steps of {took / steps * 1e3:.2f} ms, {len(events)} events; checked in {checked * 1e3:.2f} ms: "
            f"{checked / steps * 1e6:.1f} us a step, {checked / took:.2%} of the run"
        )
    print(f"median share: {statistics.median(shares):.2%}")


if __name__ == "__main__":
    main()
