"""What `EngineConfig(verify=True)` costs, as a share of a step of the demo model. Two figures.

    python benchmarks/verify.py

*The checker*: the shipped recordings' first windows, again and again, by several clients at once, through the real
engine. The events are kept, and then told to a fresh checker, many times; the share is of the same run, so that a busy
machine slows both.

*In pairs*: the same load with and without ``verify``, in turns, over a device that answers at once. What a step costs
more, in time of the processor, is all that ``verify`` costs: the events are made, emitted and checked. A step of the
real model takes so long that the difference would drown in its noise.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import click
import numpy as np
import trio
from trio.testing import MockClock

import triolet.demo
from triolet import Engine, EngineConfig, Event, SamplingParams
from triolet.actors.worker import Job
from triolet.core.events import StepEnded
from triolet.testing import SimExecutor, SimModel, TraceChecker, sim_engine

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


async def serve(verify: bool, clients: int, tokens: int) -> float:
    """Seconds of the processor a step, over a device that answers at once."""
    model = SimModel(max_positions=2 * tokens, pages=clients * tokens)
    executor = SimExecutor(model)
    async with sim_engine(executor, config=EngineConfig(verify=verify)) as engine:
        begun = time.process_time()
        async with trio.open_nursery() as nursery:
            for client in range(clients):
                nursery.start_soon(read, engine, client, tokens)
        return (time.process_time() - begun) / executor.calls.count(Job.STEP)


async def read(engine: Engine, client: int, tokens: int) -> None:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    audio = np.full(1600, client, dtype=np.float32)
    async with engine.stream(prompt_token_ids=(1, 2, client), audio=audio, sampling=sampling) as deltas:
        async for _ in deltas:
            pass


def virtually(*arguments: object) -> float:
    """`serve`, on a clock that jumps."""
    return trio.run(serve, *arguments, clock=MockClock(autojump_threshold=0))


def paired(clients: int, pairs: int, tokens: int = 100) -> list[float]:
    """Seconds a step that ``verify`` costs, in each pair; which of a pair comes first changes from pair to pair."""
    differences = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        took = {verify: virtually(verify, clients, tokens) for verify in order}
        differences.append(took[True] - took[False])
    return differences


@click.command()
@click.option("--clients", default=8, show_default=True)
@click.option("--rounds", default=4, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--pairs", default=20, show_default=True)
def main(clients: int, rounds: int, repeats: int, pairs: int) -> None:
    """Print what verify=True costs, as a share of a step of the demo model."""
    shares, steps_took = [], []
    for _ in range(repeats):
        took, events = trio.run(run, triolet.demo.checkpoint(), clients, rounds)
        checked = statistics.median(check(events) for _ in range(REPLAYS))
        steps = sum(isinstance(event, StepEnded) for event in events)
        shares.append(checked / took)
        steps_took.append(took / steps)
        print(
            f"{steps} steps of {took / steps * 1e3:.2f} ms, {len(events)} events; checked in {checked * 1e3:.2f} ms: "
            f"{checked / steps * 1e6:.1f} us a step, {checked / took:.2%} of the run"
        )
    print(f"the checker, median share: {statistics.median(shares):.2%}")
    differences = sorted(paired(clients, pairs))
    cost, step = statistics.median(differences), statistics.median(steps_took)
    quarters = ", ".join(f"{differences[len(differences) * part // 4] * 1e6:.1f}" for part in (1, 3))
    print(
        f"in {pairs} pairs: {cost * 1e6:.1f} us a step (quartiles {quarters}), {cost / step:.2%} of a step of "
        f"{step * 1e3:.2f} ms"
    )


if __name__ == "__main__":
    main()
