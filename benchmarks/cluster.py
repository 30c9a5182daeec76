"""A cluster of the demo model on this machine: Ray's own local cluster of three nodes, and three replicas.

    python benchmarks/cluster.py equal      # 200 mixed requests have the tokens of one engine
    python benchmarks/cluster.py kill       # a replica is killed at 20 moments by chance, under load
    python benchmarks/cluster.py zipf       # encodings of contents that come again
    python benchmarks/cluster.py scale      # a replica leaves 10 times, under load

A command ends with status 1 where a claim fails, and with an error where a request does. `make soak` runs
all four. The replicas share this machine's cores with the process that asks, so the figures say nothing of speed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median

import psutil
import ray
import soundfile
import trio
from claims import Claims
from ray import serve
from ray.cluster_utils import Cluster as Machines
from ray.serve._private.common import ReplicaState

from triolet import Engine, EngineConfig, SamplingParams, demo
from triolet.models.speech.whisper_speech import special_tokens
from triolet_ray import Cluster

CONFIG = EngineConfig(device="cpu", threads=1)
REPLICAS = 3
NAME = "triolet-benchmark"
Case = tuple[tuple[object, int], SamplingParams]  # samples with their rate, and how to sample the tokens
Answers = dict[int, tuple[int, ...]]
claim = Claims()


def make_cases(count: int, seed: int, *, contents: int = 12, zipf: float = 0.0, tokens: int = 50) -> list[Case]:
    """Returns requests for ``contents`` parts of the shipped recordings. The n-th part is wanted in proportion to ``n
    ** -zipf``."""
    chance, windows = random.Random(seed), []
    recordings = [soundfile.read(sample.path, dtype="float32") for sample in demo.samples()]
    for number in range(contents):
        samples, rate = recordings[number % len(recordings)]
        begin = number // len(recordings) * rate // 2
        windows.append((samples[begin : begin + 20 * rate], rate))
    weights = [(rank + 1) ** -zipf for rank in range(contents)]
    return [
        (
            chance.choices(windows, weights)[0],
            SamplingParams(max_tokens=chance.randint(5, tokens), temperature=chance.choice([0.0, 0.7]), seed=number),
        )
        for number in range(count)
    ]


async def ask(engine: Engine, cases: list[Case], answers: Answers, at_once: int = 64) -> None:
    """Streams all ``cases``, at most ``at_once`` at a time, and writes their tokens into ``answers``."""
    whisper, limiter = special_tokens(engine.model), trio.CapacityLimiter(at_once)
    prompt = (whisper.start_id, whisper.language_ids["en"], whisper.task_ids["transcribe"], whisper.no_timestamps_id)

    async def one(number: int, case: Case) -> None:
        audio, sampling = case
        token_ids: list[int] = []
        async with limiter, engine.stream(prompt_token_ids=prompt, audio=audio, sampling=sampling) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
        answers[number] = tuple(token_ids)

    async with trio.open_nursery() as nursery:
        for number, case in enumerate(cases):
            nursery.start_soon(one, number, case)


@contextmanager
def machines() -> Iterator[None]:
    """Starts three nodes of Ray on this machine, and stops them at the end of the block."""
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
    async with Cluster(demo.checkpoint(), config=CONFIG, replicas=replicas, cpus=0.5, name=NAME) as engine:
        yield engine
    left = {(one.bytes_held, one.outputs_held, one.error) for one in engine.departures}
    claim(left == {(0, 0, None)}, f"the {len(engine.departures)} replicas that left held nothing: {left}")
    claim(not (orphans := processes(NAME)), f"processes of replicas that are left: {len(orphans)}")


def processes(prefix: str = f"{NAME}:") -> list[psutil.Process]:
    """Returns the processes of replicas. A shorter ``prefix`` includes the replicas in quarantine."""
    lines = [(one, one.info["cmdline"] or [""]) for one in psutil.process_iter(["cmdline"])]
    return [one for one, words in lines if words[0].startswith(f"ray::ServeReplica:{prefix}")]


async def alone(cases: list[Case]) -> tuple[Answers, int]:
    """Returns the answers of one engine, and the number of its encodings."""
    answers: Answers = {}
    async with Engine(demo.checkpoint(), config=CONFIG) as engine:
        await ask(engine, cases, answers)
        return answers, engine.statistics().encoder_cache.encoded


async def until(condition: Callable[[], bool]) -> None:
    """Waits until ``condition``, which is about other processes, holds."""
    with trio.fail_after(60):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.2)


def all_there() -> bool:
    """Returns whether Ray Serve reports all replicas as ready."""
    states = serve.status().applications[NAME].deployments["replica"].replica_states
    return states.get(ReplicaState.RUNNING, 0) == REPLICAS


async def encoded_by(engine: Engine) -> int:
    """Returns the number of encodings of all replicas, once the replicas have reported them."""
    await trio.sleep(5)
    return engine.statistics().encoder_cache.encoded


async def equal(requests: int) -> None:
    cases, found = make_cases(requests, seed=1), dict[int, tuple[int, ...]]()
    expected, once = await alone(cases)
    async with cluster() as engine:
        await ask(engine, cases, found)
        wrong = sum(found[number] != tokens for number, tokens in expected.items())
        claim(not wrong, f"{requests - wrong} of {requests} answers are those of one engine, token for token")
        print(f"encodings: {await encoded_by(engine)}, of one engine: {once}")


async def zipf(requests: int) -> None:
    cases = make_cases(requests, seed=3, contents=40, zipf=1.0, tokens=12)
    _, once = await alone(cases)
    async with cluster() as engine:
        await ask(engine, cases, {}, at_once=16)
        encoded = await encoded_by(engine)
    turns = sum(len({id(audio) for audio, _ in cases[first::REPLICAS]}) for first in range(REPLICAS))
    told = f"{requests} requests: {encoded} encodings, of one engine {once}, in turns over the replicas {turns}"
    claim(encoded <= 1.2 * once, f"{told}; claimed: at most 1.2 times those of one engine")


async def disturbed(times: int, seed: int, disturb: Callable[[Cluster, int], Awaitable[None]]) -> None:
    """Lets a replica leave under load, again and again. Each request must get the tokens that it gets undisturbed."""
    cases, wrong, took = make_cases(60, seed), 0, []
    expected, _ = await alone(cases)
    async with cluster() as engine:
        for number in range(times):
            await until(all_there)
            found: Answers = {}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, cases, found)
                await disturb(engine, number)
                begun = trio.current_time()
            took.append(trio.current_time() - begun)
            wrong += sum(found.get(number) != tokens for number, tokens in expected.items())
            await engine.scale(REPLICAS)
        await until(all_there)
        await encoded_by(engine)
        held = engine.statistics().encoder_cache.held
    claim(not wrong, f"{times} times a replica left under load: {wrong} of {times * len(cases)} requests went wrong")
    print(f"from then to the last of {len(cases)} answers: median {median(took):.1f} s, most {max(took):.1f} s")
    claim(not held, f"encoder outputs held by requests that have ended, on the survivors: {held}")


async def kill(times: int) -> None:
    chance = random.Random(2)

    async def disturb(_: Cluster, number: int) -> None:  # noqa: ARG001
        await trio.sleep(chance.uniform(0.1, 1.0))
        os.kill(chance.choice(processes()).pid, signal.SIGKILL)

    await disturbed(times, 2, disturb)


async def scale(times: int) -> None:
    async def disturb(engine: Cluster, number: int) -> None:
        await trio.sleep(0.5)
        await engine.scale(REPLICAS - 1)
        await until(lambda: len(engine.departures) > number)

    await disturbed(times, 4, disturb)


COMMANDS: dict[str, tuple[Callable[[int], Awaitable[None]], int]] = {
    "equal": (equal, 200),
    "kill": (kill, 20),
    "zipf": (zipf, 300),
    "scale": (scale, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--count", type=int, help="requests, or times")
    asked = parser.parse_args()
    measure, default = COMMANDS[asked.what]
    with machines():
        trio.run(measure, asked.count or default)
    claim.exit()


if __name__ == "__main__":
    main()
