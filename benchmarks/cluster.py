"""A cluster of the demo model on this machine: Ray's own local cluster of three nodes, two or three replicas.

    python benchmarks/cluster.py equal      # 200 mixed requests have the tokens of one engine
    python benchmarks/cluster.py kill       # a replica is killed at 20 moments by chance, under load
    python benchmarks/cluster.py zipf       # encodings of contents that come again, routed by content and by chance
    python benchmarks/cluster.py scale      # replicas leave 10 times, under load
    python benchmarks/cluster.py overhead   # of a request, over one engine in this process

A command ends with status 1 where a claim fails, and with an error where a request does. `make soak` runs the first
four.

Three replicas share this machine's cores with the process that asks: what is measured is correctness, the number of
encodings, and the cost of the way, not speed.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import click
import numpy as np
import psutil
import ray
import soundfile
import trio
from attrs import frozen
from ray import serve
from ray.cluster_utils import Cluster as Machines
from ray.serve._private.common import ReplicaState

import triolet.demo
from triolet import Engine, EngineConfig, SamplingParams
from triolet.cluster import Cluster

MODEL = triolet.demo.checkpoint()
CONFIG = EngineConfig(device="cpu", threads=1)
REPLICAS = 3
NAME = "triolet-benchmark"
Answers = dict[int, tuple[int, ...]]


@frozen
class Case:
    """A request: a part of a recording, and how it is sampled."""

    audio: tuple[np.ndarray, int]
    sampling: SamplingParams


def make_cases(count: int, seed: int, *, contents: int = 12, zipf: float = 0.0, tokens: int = 50) -> list[Case]:
    """Requests for ``contents`` different windows; the n-th is wanted in proportion to ``n ** -zipf``."""
    chance = random.Random(seed)
    heard = list(windows(contents))
    weights = [(rank + 1) ** -zipf for rank in range(contents)]
    return [
        Case(
            chance.choices(heard, weights)[0],
            SamplingParams(max_tokens=chance.randint(5, tokens), temperature=chance.choice([0.0, 0.7]), seed=number),
        )
        for number in range(count)
    ]


def windows(count: int) -> Iterator[tuple[np.ndarray, int]]:
    """Parts of the shipped recordings, each another one."""
    recordings = [soundfile.read(sample.path, dtype="float32") for sample in triolet.demo.samples()]
    for number in range(count):
        samples, rate = recordings[number % len(recordings)]
        begin = number // len(recordings) * rate // 2
        yield samples[begin : begin + 20 * rate], rate


async def ask(engine: Engine, cases: list[Case], answers: Answers, at_once: int = 64) -> None:
    """All of them as streams, ``at_once`` at a time."""
    whisper = engine.model.whisper
    assert whisper is not None
    prompt = (
        whisper.start_id,
        whisper.language_ids["en"],
        whisper.task_ids["transcribe"],
        whisper.no_timestamps_id,
    )
    limiter = trio.CapacityLimiter(at_once)

    async def one(number: int, case: Case) -> None:
        token_ids: list[int] = []
        async with (
            limiter,
            engine.stream(prompt_token_ids=prompt, audio=case.audio, sampling=case.sampling) as deltas,
        ):
            async for delta in deltas:
                token_ids += delta.token_ids
        answers[number] = tuple(token_ids)

    async with trio.open_nursery() as nursery:
        for number, case in enumerate(cases):
            nursery.start_soon(one, number, case)


@contextmanager
def machines() -> Iterator[None]:
    """Three nodes of Ray's on this machine."""
    sizes = {"num_cpus": 2, "object_store_memory": 100 << 20}
    several = Machines(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    for _ in range(2):
        several.add_node(**sizes)
    ray.init(address=several.address, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()
        several.shutdown()


@asynccontextmanager
async def cluster(replicas: int = REPLICAS) -> AsyncIterator[Cluster]:
    """The cluster's block; what it has left is told."""
    engine = Cluster(MODEL, config=CONFIG, replicas=replicas, cpus=0.5, name=NAME)
    async with engine:
        yield engine
    left = [(one.bytes_held, one.outputs_held, one.error) for one in engine.departures]
    claim(set(left) == {(0, 0, None)}, f"{len(left)} replicas left, and held nothing then: {left}")
    orphans = processes(NAME)
    claim(not orphans, f"processes of replicas that are left: {len(orphans)}")


def processes(prefix: str = f"{NAME}:") -> list[psutil.Process]:
    """Those of the replicas; without those in quarantine, unless the ``prefix`` is shorter."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or [""]
        if words[0].startswith(f"ray::ServeReplica:{prefix}"):
            found.append(process)
    return found


_FAILED: list[str] = []


def claim(holds: bool, what: str) -> None:
    """Prints whether it holds; the command ends with 1 where one does not."""
    print(f"{'holds' if holds else 'FAILS'}: {what}")
    if not holds:
        _FAILED.append(what)


async def alone(cases: list[Case]) -> tuple[Answers, int]:
    """The answers of one engine, and its encodings."""
    answers: Answers = {}
    async with Engine(MODEL, config=CONFIG) as engine:
        await ask(engine, cases, answers)
        return answers, engine.statistics().encoder_cache.encoded


async def until(condition: Callable[[], bool]) -> None:
    """Returns when ``condition`` holds: what it looks at is in other processes."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.2)


async def all_there() -> None:
    """Returns when all replicas are ready, by Serve's word."""
    await until(lambda: running() == REPLICAS)


def running() -> int:
    """Replicas that are ready."""
    return serve.status().applications[NAME].deployments["replica"].replica_states.get(ReplicaState.RUNNING, 0)


def has_left(engine: Cluster, count: int) -> bool:
    """Whether so many replicas have left."""
    return len(engine.departures) >= count


async def encoded_by(engine: Engine) -> int:
    """Encodings of all replicas, once they have told them."""
    await trio.sleep(5)
    return engine.statistics().encoder_cache.encoded


async def equal(requests: int) -> None:
    """Tokens, and encodings."""
    cases = make_cases(requests, seed=1)
    expected, once = await alone(cases)
    async with cluster() as engine:
        found: Answers = {}
        await ask(engine, cases, found)
        wrong = sum(found[number] != tokens for number, tokens in expected.items())
        claim(not wrong, f"{requests - wrong} of {requests} answers are those of one engine, token for token")
        print(f"encodings: {await encoded_by(engine)}, of one engine: {once}")


async def kill(times: int) -> None:
    """At moments by chance."""
    chance = random.Random(2)
    cases = make_cases(60, seed=2)
    expected, _ = await alone(cases)
    lost, wrong, took, in_flight = 0, 0, list[float](), list[int]()
    async with cluster() as engine:
        for _ in range(times):
            await all_there()
            found: Answers = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, cases, found)
                await trio.sleep(chance.uniform(0.1, 1.0))
                in_flight.append(len(cases) - len(found))
                os.kill(chance.choice(processes()).pid, signal.SIGKILL)
                begun = trio.current_time()
            took.append(trio.current_time() - begun)
            lost += len(expected) - len(found)
            wrong += sum(found[number] != expected[number] for number in found)
        await all_there()
        await encoded_by(engine)
        books = engine.statistics().encoder_cache
    claim(not lost, f"{times} kills of a replica under load: {lost} of {times * len(expected)} requests lost")
    print(f"requests in flight at a kill: median {statistics.median(in_flight):.0f}, least {min(in_flight)}")
    print(f"from a kill to the last of 60 answers: median {statistics.median(took):.1f} s, most {max(took):.1f} s")
    claim(not wrong, f"streams with a gap, a duplicate or another token: {wrong}")
    claim(books.held == 0, f"encoder outputs held by requests that have ended, on the survivors: {books.held}")


async def zipf(requests: int) -> None:
    """Contents that come again."""
    cases = make_cases(requests, seed=3, contents=40, zipf=1.0, tokens=12)
    _, once = await alone(cases)
    async with cluster() as engine:
        await ask(engine, cases, {}, at_once=16)
        by_content = await encoded_by(engine)
    by_chance = sum(len({id(case.audio) for case in cases[first::REPLICAS]}) for first in range(REPLICAS))
    claim(
        by_content <= 1.2 * once,
        f"{requests} requests: {by_content} encodings, {by_content / once:.2f} times those of one engine ({once}); "
        f"in turns over {REPLICAS} replicas they would be {by_chance}, {by_chance / once:.2f} times",
    )


async def scale(times: int) -> None:
    """Down and up again."""
    cases = make_cases(60, seed=4)
    expected, _ = await alone(cases)
    wrong = left = 0
    async with cluster() as engine:
        for _ in range(times):
            await all_there()
            found: Answers = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, cases, found)
                await trio.sleep(0.5)
                await engine.scale(REPLICAS - 1)
            wrong += sum(found.get(number) != tokens for number, tokens in expected.items())
            left += 1
            await until(partial(has_left, engine, left))
            await engine.scale(REPLICAS)
        departures = engine.departures
    claim(not wrong, f"{times} times a replica left under load: {wrong} of {times * len(expected)} requests went wrong")
    held = [one.bytes_held for one in departures]
    claim(not any(held), f"bytes held by the replicas that left: {held}")


async def overhead(requests: int) -> None:
    """One request at a time, of a window that is encoded already, for one token."""
    (case,) = make_cases(1, seed=5, contents=1)
    asked = [Case(case.audio, SamplingParams(max_tokens=1))] * requests

    async def times(engine: Engine) -> list[float]:
        await ask(engine, asked[:3], {}, at_once=1)
        took = []
        for one in asked:
            begun = time.perf_counter()
            await ask(engine, [one], {})
            took.append((time.perf_counter() - begun) * 1e3)
        return sorted(took)

    async with Engine(MODEL, config=CONFIG) as engine:
        here = await times(engine)
    async with cluster(1) as engine:
        there = await times(engine)
    print("| | p50 | p99 |\n|---|---|---|")
    for name, took in (("one engine, ms", here), ("a cluster of one replica, ms", there)):
        print(f"| {name} | {statistics.median(took):.1f} | {took[int(0.99 * len(took))]:.1f} |")


COMMANDS: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
    "equal": (equal, 200),
    "kill": (kill, 20),
    "zipf": (zipf, 300),
    "scale": (scale, 10),
    "overhead": (overhead, 200),
}


@click.command()
@click.argument("what", type=click.Choice(list(COMMANDS)))
@click.option("--count", type=int, help="Requests, or times. Default: 200 equal, 20 kill, 300 zipf, 10 scale.")
def main(what: str, count: int | None) -> None:
    """Measure a cluster on this machine."""
    measure, default = COMMANDS[what]
    with machines():
        trio.run(measure, count or default)
    sys.exit(1 if _FAILED else 0)


if __name__ == "__main__":
    main()
