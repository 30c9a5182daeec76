"""Memory of an engine, and the way out of its block: nothing grows, and nothing is left.

::

    python benchmarks/memory.py speech            # rounds of recordings of 5 to 19 MB, all of a round at once
    python benchmarks/memory.py images            # rounds of questions about two images of 8 MB each
    python benchmarks/memory.py hours             # a recording of three hours, window by window, its speech found
    python benchmarks/memory.py engines           # fifty engines in one process, one after another
    python benchmarks/memory.py exits             # seconds from leaving the block until everything is released
    python benchmarks/memory.py footprint MODEL   # resident size before, open, asleep and closed; the peak of loading

``--count`` makes a run shorter: rounds, minutes, engines, or exits of each kind. Python's garbage collector is off.

Each recording and each question is new, so the caches turn over. glibc keeps freed blocks for itself, scattered over
the arenas of its threads, so its resident size drifts though nothing is held. The script therefore runs itself again
with a fixed ``MALLOC_MMAP_THRESHOLD_``; ``--malloc default`` leaves glibc as it is.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import soundfile
import trio
from attrs import define, evolve, field
from claims import Claims
from tiny import make_checkpoint

from triolet import Engine, EngineConfig, SamplingParams, demo
from triolet.actors.gpu_runner import torch_executor
from triolet.actors.worker import ThreadWorker
from triolet.api.inputs.audio import load_audio
from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import Hearing
from triolet.api.speech.silero import Silero
from triolet.api.speech.voice import SpanRules
from triolet_testing import live_bytes

RATE = 16_000
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
WARM_UP = 2  # rounds; in later rounds nothing may grow
MMAP_THRESHOLD = 256 << 10  # bytes; smaller than an encoder output, which outlives most of the blocks around it
MB = 1e6
claim = Claims()


def resident() -> int:
    """Returns the bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


# -- rounds of large requests ----------------------------------------------------------------------------------------


async def hear(engine: Engine, _: int, seed: int, share: float) -> None:
    """Transcribes 80 to 300 s of audio: the shipped recordings, repeated from a random point on, with noise."""
    rng = np.random.default_rng(seed)
    spoken = np.concatenate([load_audio(sample.path) for sample in demo.samples()])
    samples = np.resize(np.roll(spoken, -int(rng.integers(len(spoken)))), int((80 + 220 * share) * RATE))
    samples += 1e-3 * rng.standard_normal(len(samples), np.float32)
    await engine.transcribe(samples, language="en", temperature=0.0)


async def look(engine: Engine, number: int, seed: int, _: float) -> None:
    """Asks about two images of noise. All requests of the round share the first one; the second is the request's
    own."""
    kinds = (number, 1_000_000 + seed)
    images = [np.random.default_rng(kind).integers(0, 256, (1640, 1640, 3), dtype=np.uint8) for kind in kinds]
    prompt = " ".join(f"{' '.join([f'{text} cats'] * 25)} {IMAGE}" for text in (number, seed))
    await engine.generate(prompt, images=images, sampling=SamplingParams(max_tokens=24, ignore_eos=True))


async def rounds(model: Path, config: EngineConfig, ask: Any, count: int) -> None:
    requests, before, sizes, apart = 4, live_bytes(), [], set()
    async with Engine(model, config=config) as engine:
        for number in range(count):
            async with trio.open_nursery() as nursery:
                for index in range(requests):
                    nursery.start_soon(ask, engine, number, number * requests + index, index / (requests - 1))
            while (now := engine.statistics().requests).running or now.leaving or now.steps_in_flight:  # noqa: ASYNC110
                await trio.sleep(0.01)  # waits for the last step, in which the executor forgets the ended sequences
            sizes.append(resident())
            books = sum(engine.statistics().device.by_owner.values())
            apart.add(books - live_bytes())
            print(f"round {number + 1}: {sizes[-1] / MB:.1f} MB resident, {books / MB:.3f} MB in the books", flush=True)
        evicted = engine.statistics().encoder_cache.evicted
    growth = [later / earlier - 1 for earlier, later in pairwise(sizes[WARM_UP - 1 :])]
    mean = (sizes[-1] / sizes[WARM_UP - 1]) ** (1 / len(growth)) - 1
    claim(max(growth) < 0.01, f"growth a round: mean {mean:+.2%}, worst {max(growth):+.2%}; claimed: less than 1 %")
    claim(apart == {0}, f"the books and the walk over live tensors differ by {sorted(apart)} bytes")
    claim(live_bytes() == before, f"bytes of tensors left after the block: {live_bytes() - before}")
    claim(evicted > 0, f"encoder outputs evicted: {evicted}; claimed: some, as the caches are to turn over")


# The caches are so small that two rounds fill them, since memory that nobody has written to is not resident.
CONFIG = EngineConfig(device="cpu", threads=1, max_running=8, encoder_idle_seconds=3600.0, encoder_cache_bytes=32 << 20)


def speech(count: int) -> None:
    trio.run(rounds, demo.checkpoint(), CONFIG, hear, count)


def images(count: int) -> None:
    small = evolve(CONFIG, encoder_cache_bytes=13_000, self_kv_bytes=512 << 10)
    with TemporaryDirectory() as folder:
        trio.run(rounds, make_checkpoint("qwen2_5_vl", folder), small, look, count)


# -- a recording of hours --------------------------------------------------------------------------------------------


async def read_hours(path: Path) -> None:
    """Reads a recording as a transcription does, which forgets each window when it asks for the next one."""
    sizes, start = [], 0
    async with Recording(path) as recording:
        hearing = Hearing(recording, Silero(), SpanRules())
        length = 30 * recording.sampling_rate
        while len(window := await recording.window(start, length)):
            await hearing.hear(start + length)
            start += len(window)
            recording.forget(start)
            if start % (20 * length) == 0 or len(window) < length:
                sizes.append(resident())
                print(f"{start / recording.sampling_rate / 60:.0f} minutes: {sizes[-1] / MB:.1f} MB", flush=True)
        claim(recording.broken is None, "the recording was read to its end")
    grown = max(sizes, default=0) - min(sizes[:1], default=0)
    claim(grown <= 16e6, f"grown by {grown / MB:.1f} MB since the first ten minutes; claimed: at most 16")


def hours(minutes: int) -> None:
    noise = 0.1 * np.random.default_rng(0).standard_normal(60 * RATE).astype(np.float32)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "hours.flac"
        with soundfile.SoundFile(path, "w", RATE, 1) as file:
            for minute in range(minutes):
                file.write(noise * (minute % 2))
        trio.run(read_hours, path)


# -- engines one after another ---------------------------------------------------------------------------------------


def engines(count: int) -> None:
    async def live() -> None:
        async with Engine(demo.checkpoint()) as engine:
            await engine.transcribe(demo.samples()[0].path)

    sizes, left = [], []
    for _ in range(count):
        trio.run(live)
        sizes.append(resident())
        left.append((live_bytes(), threading.active_count(), psutil.Process().num_fds()))
    fifth = max(2, len(sizes) // 5)  # the size of the allocator's arenas varies, so medians are compared
    growth = median(sizes[-fifth:]) / median(sizes[2 : 2 + fifth]) - 1
    claim(growth < 0.01, f"grown by {growth:+.2%} from the first fifth to the last; claimed: less than 1 %")
    more = [last - early for last, early in zip(left[-1], left[2], strict=True)]
    claim(not any(more), f"tensor bytes, threads, descriptors left: {more}; claimed: none")


# -- the way out -----------------------------------------------------------------------------------------------------


@define(eq=False)
class Timed:
    """An executor that passes every call on, and records when each step and each encoding began and ended."""

    inner: Any
    begun: Any  # called on the worker when a call begins, with the kind of the call
    calls: list[tuple[float, float]] = field(factory=list)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        return (lambda argument: self.timed(name, call, argument)) if name in ("step", "encode") else call

    def timed(self, name: str, call: Any, argument: Any) -> Any:
        start = time.perf_counter()
        self.begun(name)
        try:
            return call(argument)
        finally:
            self.calls.append((start, time.perf_counter()))


async def leave(during: str) -> tuple[float, float]:
    """Leaves an engine's block while a call runs. Returns the seconds until everything is released, and the seconds of
    the call."""
    config = EngineConfig(device="cpu", threads=1)
    token, running, timed = trio.lowlevel.current_trio_token(), trio.Event(), []

    def make() -> Timed:
        begun = lambda name: name == during and token.run_sync_soon(running.set)  # noqa: E731
        timed.append(Timed(torch_executor(demo.checkpoint(), config), begun))
        return timed[0]

    async def ask(engine: Engine, seed: int) -> None:
        noise = 0.1 * np.random.default_rng(seed).standard_normal(30 * RATE).astype(np.float32)
        await engine.transcribe(noise, language="en", no_speech_threshold=None)

    with trio.CancelScope() as scope:
        async with Engine.from_parts(make, ThreadWorker, config=config) as engine, trio.open_nursery() as nursery:
            if during != "idle":
                for seed in range(8):
                    nursery.start_soon(ask, engine, seed)
                await running.wait()
            left = time.perf_counter()
            scope.cancel()
    seconds = time.perf_counter() - left
    in_flight = [end - start for start, end in timed.pop().calls if start <= left <= end]
    threads = [thread.name for thread in threading.enumerate() if thread.name == "triolet-runner"]
    claim(not threads and not live_bytes(), f"{during}: nothing is left {1e3 * seconds:.0f} ms after the end")
    return seconds, max(in_flight, default=0.0)


def exits(count: int) -> None:
    for during in ("idle", "step", "encode"):
        beside = [seconds - call for seconds, call in (trio.run(leave, during) for _ in range(count + 1))][1:]
        told = f"{during}: median {1e3 * median(beside):.0f} ms, most {1e3 * max(beside):.0f} ms beside the call"
        claim(max(beside) <= 0.5, f"{told} in flight; claimed: at most 500")


# -- sizes of one engine ---------------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Returns the size of this process that the kernel lists under ``name``, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


async def sizes_of(model: str, dtype: str) -> None:
    before = resident()
    forget_peak()
    async with Engine(model, config=EngineConfig(device="cpu", dtype=dtype)) as engine:
        peak, opened, weights = status("VmHWM"), resident(), engine.statistics().device.by_owner["weights"]
        if engine.model.speech is not None:
            await engine.transcribe(demo.samples()[0].path)
        else:
            await engine.generate("Once upon a time " * 20, sampling=SamplingParams(max_tokens=8))
        await engine.sleep()
        asleep = resident()
    found = {"before": before, "open": opened, "peak of loading": peak, "asleep": asleep, "closed": resident()}
    print(", ".join(f"{moment} {size / MB:.0f} MB" for moment, size in found.items()))
    loading, kept, left = (peak - before) / weights, asleep / (before + weights), found["closed"] / before
    claim(loading <= 1.3, f"peak of loading, of the weights: {loading:.2f}; claimed: at most 1.3")
    claim(kept <= 1.15, f"asleep, of before and the weights: {kept:.2f}; claimed: at most 1.15")
    claim(left <= 1.15, f"closed, of before: {left:.2f}; claimed: at most 1.15")


def footprint(model: str, dtype: str, imports: str | None) -> None:
    """Measures in two processes. The first finds out which modules an engine imports; the second imports them before it
    measures anything."""
    command = [sys.executable, __file__, "footprint", model, "--dtype", dtype, "--imports"]
    if imports is None:
        names = subprocess.run([*command, "[]"], check=False, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1]
        sys.exit(subprocess.run([*command, "-"], check=False, input=names, text=True).returncode)
    for name in json.loads(sys.stdin.read() if imports == "-" else imports):
        with suppress(Exception):  # some modules cannot be imported by name; others import them
            importlib.import_module(name)
    trio.run(sizes_of, model, dtype)
    if imports != "-":
        print(json.dumps(sorted(sys.modules)))


def main() -> None:
    parts = {"speech": (speech, 12), "images": (images, 12), "hours": (hours, 180), "engines": (engines, 50)}
    parts["exits"] = (exits, 10)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*parts, "footprint"])
    parser.add_argument("model", nargs="?", default=str(demo.checkpoint()), help="of footprint")
    parser.add_argument("--count", type=int)
    parser.add_argument("--malloc", choices=["returning", "default"], default="returning")
    parser.add_argument("--dtype", default="float32", help="of footprint")
    parser.add_argument("--imports", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.what == "footprint":
        footprint(asked.model, asked.dtype, asked.imports)
        claim.exit()
    if asked.malloc == "returning" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # glibc reads it at the start only
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    gc.disable()
    measure, default = parts[asked.what]
    measure(asked.count or default)
    claim.exit()


if __name__ == "__main__":
    main()
