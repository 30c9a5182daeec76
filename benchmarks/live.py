"""Live transcription: how soon a word is stable text, and how right that text is.

::

    python benchmarks/recordings.py FOLDER
    python benchmarks/live.py FOLDER CHECKPOINT [--seconds 60] [--step 0.5] [--model-seconds 0.4] [--only NAME]

Each recording, ``NAME.wav`` with its words and their times in ``NAME.json``, is played in real time, 100 ms a chunk,
into a live session. Printed are seconds from the end of a word to the update in which it is stable: the median and the
90th percentile, and the word error rate of the stable text.

With ``--model-seconds`` the recordings are played on virtual time, on which a reading's encoder takes so long and each
step of the decoder a 30th of it. These figures say what the session decides, not what this machine is able to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import click
import numpy as np
import soundfile
import trio
from attrs import frozen

from triolet import Engine, EngineConfig, LiveText
from triolet.actors.gpu_runner import torch_executor
from triolet.actors.worker import Job
from triolet.testing import SimWorker
from triolet.testing.trio_tools import run_virtually

CHUNK = 0.1  # seconds

Play = Callable[[], Awaitable[list[tuple[float, LiveText]]]]


@frozen
class Said:
    """A word as it compares with others, and the time of its end, or the time when it was stable."""

    word: str
    at: float


def plain(text: str) -> list[str]:
    """The words of a text without case and marks."""
    return re.findall(r"[^\W_]+", text.lower().replace("'", ""))


def truth(path: Path, seconds: float) -> list[Said]:
    """The words of a recording that end within its first ``seconds``."""
    words = json.loads(path.read_text(encoding="utf-8"))["words"]
    found = [(one["word"], one["end"]) if isinstance(one, dict) else (one[0], one[2]) for one in words]
    return [Said(part, end) for word, end in found if end <= seconds for part in plain(word)]


def stable(updates: Sequence[tuple[float, LiveText]]) -> list[Said]:
    """The stable words, and when each was told."""
    return [Said(part, at) for at, update in updates for word in update.words for part in plain(word.text)]


def errors(true: Sequence[str], found: Sequence[str]) -> int:
    """Words to insert, delete or exchange."""
    row = np.arange(len(found) + 1)
    for count, word in enumerate(true, 1):
        before, row = row, np.empty_like(row)
        row[0] = count
        for index, other in enumerate(found, 1):
            row[index] = min(before[index - 1] + (word != other), before[index] + 1, row[index - 1] + 1)
    return int(row[-1])


def latencies(true: Sequence[Said], found: Sequence[Said]) -> list[float]:
    """Seconds from the end of each word that was understood to its stable text."""
    matcher = SequenceMatcher(None, [one.word for one in true], [one.word for one in found], autojunk=False)
    return [
        found[match.b + index].at - true[match.a + index].at
        for match in matcher.get_matching_blocks()
        for index in range(match.size)
    ]


async def play(make: Callable[[], Engine], samples: np.ndarray, rate: int, options: dict[str, Any]) -> Any:
    """The updates, each with the second of the recording at which it came, and the most seconds that were held."""
    held = [0.0]
    async with make() as engine, engine.live(rate=rate, **options) as session, trio.open_nursery() as nursery:
        begun = trio.current_time()

        async def speak() -> None:
            size = round(CHUNK * rate)
            for start in range(0, len(samples), size):
                await trio.sleep_until(begun + (start + size) / rate)
                await session.feed(samples[start : start + size])
                held[0] = max(held[0], session.held_seconds)  # type: ignore[attr-defined]
            await session.finish()

        nursery.start_soon(speak)
        found = [(trio.current_time() - begun, update) async for update in session]
    return found, held[0]


def engines(checkpoint: str, device: str, model_seconds: float | None) -> Callable[[], Engine]:
    """Makes engines: real ones, or with a model that takes virtual time."""
    config = EngineConfig(device=device)
    if model_seconds is None:
        return partial(Engine, checkpoint, config=config)
    seconds = dict.fromkeys(Job, 0.0) | {Job.ENCODE: model_seconds, Job.STEP: model_seconds / 30}
    executor = partial(torch_executor, checkpoint, config)
    return partial(Engine.from_parts, executor, partial(SimWorker, seconds=seconds), config=config)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("checkpoint")
@click.option("--only", multiple=True, help="These recordings; default: all.")
@click.option("--seconds", default=60.0, show_default=True, help="The beginning of each recording.")
@click.option("--step", default=0.5, show_default=True)
@click.option("--endpoint-silence", default=0.7, show_default=True)
@click.option("--language", default="en", show_default=True)
@click.option("--beam-size", default=1, show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--model-seconds", type=float, help="Virtual time: an encoding takes so long.")
@click.option("--show", is_flag=True, help="Print the stable text too.")
def main(
    folder: Path,
    checkpoint: str,
    only: tuple[str, ...],
    seconds: float,
    device: str,
    model_seconds: float | None,
    show: bool,
    **options: Any,
) -> None:
    """Plays the recordings of FOLDER into live sessions of CHECKPOINT."""
    run: Any = trio.run if model_seconds is None else run_virtually
    print("| recording | seconds | words | WER | median latency | 90th percentile | most audio held |")
    print("|---|---|---|---|---|---|---|")
    for path in sorted(folder.glob("*.wav")):
        if only and path.stem not in only:
            continue
        samples, rate = soundfile.read(path, dtype="int16", frames=round(seconds * soundfile.info(path).samplerate))
        updates, held = run(play, engines(checkpoint, device, model_seconds), samples, rate, options)
        true, found = truth(path.with_suffix(".json"), len(samples) / rate), stable(updates)
        wrong = errors([one.word for one in true], [one.word for one in found])
        waited = latencies(true, found) or [0.0]
        tenths = quantiles(waited, n=10) if len(waited) > 1 else waited * 9
        print(
            f"| {path.stem} | {len(samples) / rate:.0f} | {len(true)} | {100 * wrong / max(len(true), 1):.1f} % "
            f"| {median(waited):.2f} s | {tenths[-1]:.2f} s | {held:.1f} s |",
            flush=True,
        )
        if show:
            print("".join(update.stable for _, update in updates))


if __name__ == "__main__":
    main()
