"""Resident memory, round by round, under requests of 5 to 20 MB each with Python's garbage collector switched off.

    python benchmarks/memory.py [--load images] [--rounds 12] [--requests 4] [--malloc default] [--png memory.png]

A round of speech: transcriptions of recordings of 80 to 300 s, all at once, through one engine. Each recording is made
of the shipped ones and of noise of its own, so that every window is new and the caches turn over. A round of images:
questions about two images of 8 MB each, all at once, to a tiny random Qwen2.5-VL that is made in a temporary folder.
One image is the question's own and one is the round's, and so are their texts; the encoder cache has room for four
images, and the pages for a few questions. After a round, with nothing under way: the resident size as the operating
system tells it, what C's ``malloc`` has given out and not got back, the bytes of the engine's own books, and,
independently of them, the bytes behind all tensors that are alive.

glibc keeps freed blocks for itself: of up to 32 MB, as soon as one of that size was freed once, and scattered over the
threads' arenas. Its resident size then drifts though nothing is held. So the benchmark runs itself with a fixed
``MALLOC_MMAP_THRESHOLD_``, under which freed blocks of 256 KiB or more go back to the system; ``--malloc default``
leaves glibc as it is. Three claims are checked:

- after the second round, the resident size grows by less than 1 % a round;
- the books are what is alive, to the byte;
- when the block has ended, not a byte of a tensor is left.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import psutil
import trio
from attrs import evolve, frozen
from numpy.typing import NDArray

import triolet.demo
from triolet import Engine, EngineConfig, SamplingParams
from triolet.api.inputs.audio import Samples, load_audio
from triolet.testing import live_bytes
from triolet.testing.families import make_checkpoint

RATE = 16_000
SHORTEST, LONGEST = 80.0, 300.0  # seconds: 5 and 19 MB as float32
SIDE = 1640  # pixels of an image: 8 MB
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
WARM_UP = 2  # rounds
MOST_GROWTH = 0.01  # a round
MMAP_THRESHOLD = 256 << 10  # bytes: less than an encoder output, which live long among what does not
MB = 1e6
CLAIMED = (
    f"claimed: after round {WARM_UP} the resident size grows by less than {MOST_GROWTH:.0%} a round; the books are what"
    " is alive, to the byte; after the block not a byte of a tensor is left\n"
)


@frozen(kw_only=True)
class Reading:
    """What the process holds at one moment."""

    resident: int
    given_out: int  # by malloc, and not freed; 0 where it does not tell
    tensors: int  # bytes of all storages behind live tensors, whoever made them
    threads: int  # of the operating system
    books: Mapping[str, int]  # the engine's own, by owner

    @classmethod
    def now(cls, engine: Engine | None) -> Reading:
        books = {} if engine is None else dict(engine.statistics().device.by_owner)
        process = psutil.Process()
        return cls(
            resident=process.memory_info().rss,
            given_out=given_out(),
            tensors=live_bytes(),
            threads=process.num_threads(),
            books=books,
        )


@frozen(kw_only=True)
class Round:
    seconds: float
    payload: int  # bytes of all recordings or images
    tokens: int
    after: Reading


@frozen(kw_only=True)
class Asked:
    """Which request of which round."""

    round: int
    request: int
    requests: int  # of a round

    @property
    def seed(self) -> int:
        """Another one for each request of the run."""
        return self.round * self.requests + self.request


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "rest", "top")
    )


def given_out() -> int:
    """Bytes in use in all arenas and in blocks of their own pages."""
    ask = _mallinfo()
    if ask is None:
        return 0
    info = ask()
    return int(info.uordblks + info.hblkhd)


@cache
def _mallinfo() -> Callable[[], Any] | None:
    """Found once: each `ctypes.CDLL` makes a class, which only the collector frees."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # another C library, or one from before 2021
        return None
    ask.restype = _MallocInfo
    return ask


# -- the load --------------------------------------------------------------------------------------------------------


def speech() -> Samples:
    """The shipped recordings, one after another."""
    return np.concatenate([load_audio(sample.path) for sample in triolet.demo.samples()])


def recording(base: Samples, seconds: float, seed: int) -> Samples:
    """``base`` from some point on, again and again, in noise: different for each seed."""
    rng = np.random.default_rng(seed)
    length = int(seconds * RATE)
    samples = np.resize(np.roll(base, -int(rng.integers(len(base)))), length)
    samples += 1e-3 * rng.standard_normal(length, np.float32)
    return samples


@frozen(kw_only=True)
class Speech:
    """Recordings."""

    base: Samples

    async def ask(self, engine: Engine, asked: Asked) -> tuple[int, int]:
        """One request of a round; its bytes, and the tokens of its answer."""
        seconds = float(np.linspace(SHORTEST, LONGEST, asked.requests)[asked.request])
        samples = recording(self.base, seconds, asked.seed)
        transcript = await engine.transcribe(samples, language="en", temperature=0.0)
        return samples.nbytes, sum(len(segment.token_ids) for segment in transcript.segments)


@frozen
class Images:
    """Images of noise."""

    async def ask(self, engine: Engine, asked: Asked) -> tuple[int, int]:
        """As `Speech.ask`."""
        images = [noise(asked.round), noise(1_000_000 + asked.seed)]
        texts = [" ".join(f"{seed} cats" for _ in range(25)) for seed in (asked.round, asked.seed)]
        prompt = f"{texts[0]} {IMAGE} {texts[1]} {IMAGE}"
        sampling = SamplingParams(max_tokens=24, ignore_eos=True)
        answer = await engine.generate(prompt, images=images, sampling=sampling)
        return sum(image.nbytes for image in images), len(answer.token_ids)


def noise(seed: int) -> NDArray[np.uint8]:
    """An image of 8 MB."""
    return np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)


async def play(engine: Engine, load: Speech | Images, requests: int, number: int) -> Round:
    payload = tokens = 0
    begun = time.perf_counter()

    async def ask(request: int) -> None:
        nonlocal payload, tokens
        size, count = await load.ask(engine, Asked(round=number, request=request, requests=requests))
        payload += size
        tokens += count

    async with trio.open_nursery() as nursery:
        for request in range(requests):
            nursery.start_soon(ask, request)
    took = time.perf_counter() - begun
    await settled(engine)
    return Round(seconds=took, payload=payload, tokens=tokens, after=Reading.now(engine))


async def settled(engine: Engine) -> None:
    while (now := engine.statistics().requests).running or now.leaving or now.steps_in_flight:  # noqa: ASYNC110
        await trio.sleep(0.01)  # the last step, in which the executor forgets who ended


# -- the report ------------------------------------------------------------------------------------------------------


def growth(rounds: list[Round]) -> list[float]:
    """Of each round over the one before, as a share."""
    sizes = [one.after.resident for one in rounds]
    return [later / earlier - 1 for earlier, later in itertools.pairwise(sizes)]


def print_round(number: int, rounds: list[Round]) -> None:
    one, after = rounds[-1], rounds[-1].after
    cells = [
        number,
        f"{one.payload / MB:.0f}",
        one.tokens,
        f"{one.seconds:.1f}",
        f"{after.resident / MB:.1f}",
        f"{growth(rounds)[-1]:+.2%}" if len(rounds) > 1 else "",
        *(f"{size / MB:.3f}" for size in (after.given_out, sum(after.books.values()), after.tensors)),
        after.threads,
    ]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_plot(rounds: list[Round], width: int = 60) -> None:
    """Bars from nothing, so that they are as long as the memory is large."""
    largest = max(one.after.resident for one in rounds)
    print("\nresident size after each round, MB")
    for number, one in enumerate(rounds, 1):
        bar = "#" * round(width * one.after.resident / largest)
        print(f"{number:>3} {bar} {one.after.resident / MB:.1f}")


def print_bytes(readings: Mapping[str, Reading]) -> None:
    owners = list(dict.fromkeys(owner for reading in readings.values() for owner in reading.books))
    print("\nbytes on the device, by owner; the last column is the walk over all live tensors\n")
    print("| when | " + " | ".join(owners) + " | books | tensors alive |")
    print("|---|" + "---|" * (len(owners) + 2))
    for when, reading in readings.items():
        cells = [f"{reading.books.get(owner, 0):,}" for owner in owners]
        print(f"| {when} | {' | '.join(cells)} | {sum(reading.books.values()):,} | {reading.tensors:,} |")


def print_caches(engine: Engine) -> None:
    """That they turned over."""
    now = engine.statistics()
    ledger, requests = now.encoder_cache, now.requests
    print(
        f"\nencodings: {ledger.encoded} computed, {ledger.hits} found, {ledger.evicted} evicted; tokens of prompts: "
        f"{requests.tokens_fed} fed, {requests.tokens_cached} found in pages"
    )


def save_plot(file: Path, rounds: list[Round]) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    numbers = range(1, len(rounds) + 1)
    axes.plot(numbers, [one.after.resident / MB for one in rounds], marker="o", label="resident size")
    axes.plot(numbers, [sum(one.after.books.values()) / MB for one in rounds], marker=".", label="device, by the books")
    axes.set(xlabel="round", ylabel="MB", ylim=(0, None), title="Memory after each round, garbage collector off")
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    print(f"\nwritten: {file}")


def claims(rounds: list[Round], before: Reading, closed: Reading, left: Mapping[str, int]) -> list[tuple[str, bool]]:
    """Each claim with its figures, and whether it holds."""
    counted = growth(rounds)[WARM_UP - 1 :]
    first, last = rounds[WARM_UP - 1].after.resident, rounds[-1].after.resident
    mean = (last / first) ** (1 / len(counted)) - 1
    held = rounds[-1].after.given_out / max(rounds[WARM_UP - 1].after.given_out, 1) - 1
    books = {sum(one.after.books.values()) - one.after.tensors for one in rounds}
    return [
        (
            f"growth in the {len(counted)} rounds after round {WARM_UP}: mean {mean:+.2%}, worst {max(counted):+.2%} "
            f"a round; claimed: less than {MOST_GROWTH:.0%} (what malloc has given out: {held:+.2%} in all)",
            max(counted) < MOST_GROWTH,
        ),
        (f"the books and the walk over live tensors differ by {sorted(books)} bytes after the rounds", books == {0}),
        (
            f"tensors alive: {before.tensors:,} bytes before, {closed.tensors:,} after the block; the books: "
            f"{sum(left.values()):,}",
            closed.tensors == before.tensors and not sum(left.values()),
        ),
    ]


# -- the run ---------------------------------------------------------------------------------------------------------


async def run(
    config: EngineConfig, model: Path, load: Speech | Images, rounds: int, requests: int, png: Path | None
) -> bool:
    played: list[Round] = []
    readings = {"before": Reading.now(None)}
    async with Engine(model, config=config) as engine:
        readings["open"] = Reading.now(engine)
        print(CLAIMED)
        print(
            "| round | payload MB | tokens | s | resident MB | growth | malloc MB | books MB | tensors MB | threads |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for number in range(1, rounds + 1):
            played.append(await play(engine, load, requests, number))
            print_round(number, played)
            readings[f"round {number}"] = played[-1].after
        print_caches(engine)
        supervisor: Any = engine.inside.backend  # only this benchmark asks for the books of a closed engine
    left = supervisor.statistics().device.by_owner
    readings["closed"] = closed = Reading.now(None)
    print_plot(played)
    print_bytes(readings)
    if png is not None:
        save_plot(png, played)
    print(f"\nresident size: {readings['before'].resident / MB:.1f} MB before, {closed.resident / MB:.1f} MB closed")
    print()
    said = claims(played, readings["before"], closed, left)
    for claim, holds in said:
        print(f"{'holds' if holds else 'FAILS'}: {claim}")
    return all(holds for _, holds in said)


@contextmanager
def loads(kind: str, model: Path | None, threads: int) -> Iterator[tuple[Path, Speech | Images, EngineConfig]]:
    """A model, what it is asked, and caches that two rounds fill and no idle time empties: memory that was never
    written to is not resident."""
    config = EngineConfig(device="cpu", threads=threads, max_running=8, encoder_idle_seconds=3600.0)
    if kind == "speech":
        yield model or triolet.demo.checkpoint(), Speech(base=speech()), evolve(config, encoder_cache_bytes=32 << 20)
        return
    with TemporaryDirectory() as folder:
        made = model or make_checkpoint("qwen2_5_vl", folder)
        yield made, Images(), evolve(config, encoder_cache_bytes=13_000, self_kv_bytes=512 << 10)


@click.command()
@click.option("--load", "kind", type=click.Choice(["speech", "images"]), default="speech", show_default=True)
@click.option("--rounds", default=12, show_default=True, type=click.IntRange(WARM_UP + 1))
@click.option("--requests", default=4, show_default=True, help="Of a round, all at once.")
@click.option("--model", type=click.Path(path_type=Path), help="A checkpoint; the demo's, or a tiny one for images.")
@click.option(
    "--threads", default=1, show_default=True, help="CPU threads of torch; more are slower on a busy machine."
)
@click.option("--malloc", type=click.Choice(["returning", "default"]), default="returning", show_default=True)
@click.option("--png", type=click.Path(path_type=Path), help="Draw the plot into this file too; needs matplotlib.")
def main(
    kind: str, rounds: int, requests: int, model: Path | None, threads: int, malloc: str, png: Path | None
) -> None:
    """Print the resident size after each round of large requests, and whether it grows."""
    if png is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--png draws with matplotlib, which is not installed; pip install matplotlib")
    if malloc == "returning" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # read when a process starts
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MMAP_THRESHOLD)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    with loads(kind, model, threads) as (folder, load, config):
        gc.collect()
        gc.disable()
        holds = trio.run(run, config, folder, load, rounds, requests, png)
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
