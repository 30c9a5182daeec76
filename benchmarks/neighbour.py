"""A busy neighbour: one process that spins at nice 10 beside a transcription, by how its threads wait.

::

    python benchmarks/neighbour.py [MODEL] [AUDIO ...] [--repeats 5] [--threads 1 --threads 2]

The recordings are joined to one of ``--seconds``. Each combination runs in a process of its own, quiet and busy in
turns, so that what else the machine does falls on both. ``as it comes``: nothing is set, the engine chooses.
``torch's``: nothing is set and torch is imported first, so the library of OpenMP has its own default. ``passive``: the
environment says ``OMP_WAIT_POLICY=PASSIVE``. The claim: as it comes, the median of busy over quiet is at most 1.7. Run
it on a machine that has nothing else to do; the load is printed.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

import click
import numpy as np
import soundfile
import soxr
import trio

from triolet import Engine, EngineConfig, demo

RATE = 16_000
MOST = 1.7
SPIN = "import os\nos.nice(10)\nwhile True: pass"
AS_IT_COMES, OF_TORCH = "as it comes", "torch's"
POLICIES = {AS_IT_COMES: {}, OF_TORCH: {}, "passive": {"OMP_WAIT_POLICY": "PASSIVE"}}  # what is set, by row
SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def recording(paths: tuple[str, ...], seconds: float) -> np.ndarray:
    """``paths`` one behind the other, again and again, as mono of 16 kHz."""
    parts = []
    for path in paths or tuple(str(sample.path) for sample in demo.samples()):
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        parts.append(soxr.resample(samples.mean(1), rate, RATE))
    return np.resize(np.concatenate(parts), int(seconds * RATE)).astype(np.float32)


@contextmanager
def neighbour(*, there: bool) -> Iterator[None]:
    if not there:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def measure(model: str, samples: np.ndarray, threads: int, repeats: int) -> None:
    """Prints pairs of seconds: quiet and busy."""
    async with Engine(model, config=EngineConfig(device="cpu", threads=threads)) as engine:
        await engine.transcribe(samples, language="en", temperature=0.0)
        for _ in range(repeats):
            for there in (False, True):
                with neighbour(there=there):
                    begun = time.perf_counter()
                    await engine.transcribe(samples, language="en", temperature=0.0)
                    print(time.perf_counter() - begun, end="\n" if there else " ", flush=True)


def pairs(command: list[str], policy: str) -> list[tuple[float, float]]:
    """Of a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | POLICIES[policy]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    return [(float(quiet), float(busy)) for quiet, busy in map(str.split, done.stdout.splitlines())]


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.argument("model", default=str(demo.checkpoint()))
@click.argument("audio", nargs=-1)
@click.option("--repeats", default=5, show_default=True)
@click.option("--threads", multiple=True, default=(1, 2), show_default=True, type=int)
@click.option("--seconds", default=25.0, show_default=True)
@click.option("--inside", type=click.Choice(list(POLICIES)), help="One row, in this process; so it runs itself.")
def main(
    model: str, audio: tuple[str, ...], repeats: int, threads: tuple[int, ...], seconds: float, inside: str | None
) -> None:
    if inside is not None:
        if inside == OF_TORCH:
            importlib.import_module("torch")
        trio.run(measure, model, recording(audio, seconds), threads[0], repeats)
        return
    print(f"load before: {os.getloadavg()}, {os.cpu_count()} CPUs")
    print("| threads | waiting | quiet, s | busy, s | busy / quiet |\n|---|---|---|---|---|")
    holds = True
    for count in threads:
        for policy in POLICIES:
            options = ["--repeats", repeats, "--threads", count, "--seconds", seconds, "--inside", policy]
            found = pairs([sys.executable, __file__, model, *audio, *map(str, options)], policy)
            quiet, busy = (median(times) for times in zip(*found, strict=True))
            ratio = median(busy / quiet for quiet, busy in found)
            print(f"| {count} | {policy} | {quiet:.2f} | {busy:.2f} | {ratio:.2f} |", flush=True)
            holds = holds and (policy != AS_IT_COMES or ratio <= MOST)
    print(f"load after: {os.getloadavg()}")
    print(f"{'holds' if holds else 'FAILS'}: as it comes, busy over quiet; claimed: at most {MOST}")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
