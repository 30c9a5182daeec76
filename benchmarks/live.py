"""Live transcription: how soon a word is stable text, and how right that text is.

::

    python benchmarks/recordings.py FOLDER
    python benchmarks/live.py FOLDER CHECKPOINT [--seconds 60] [--step 0.5] [--model-seconds 0.3] [--only NAME]

Each recording, ``NAME.wav`` with its words and their times in ``NAME.json``, is played in real time, 100 ms a chunk,
into a live session. Printed are the word error rate of the stable text, and the seconds from the end of a word to the
update in which it is stable: the median and the 90th percentile.

With ``--model-seconds`` the recordings are played on virtual time, on which a reading's encoder takes so long and each
step of the decoder a 30th of it. These figures show the session's decisions, not what this machine can do.
"""

from __future__ import annotations

import argparse
import json
import re
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jiwer
import soundfile
import trio

from triolet import Engine, EngineConfig, LiveText
from triolet.actors.gpu_runner import torch_executor
from triolet.actors.worker import Job
from triolet_testing import SimWorker
from triolet_testing.trio_tools import run_virtually

CHUNK = 0.1  # seconds
Timed = list[tuple[str, float]]  # words without case and punctuation, each with a moment of the recording


def plain(words: list[tuple[str, float]]) -> Timed:
    return [(part, at) for word, at in words for part in re.findall(r"[^\W_]+", word.lower().replace("'", ""))]


def latencies(true: Timed, found: Timed) -> list[float]:
    """Returns the seconds from the end of each word that was understood until the word is stable text."""
    matcher = SequenceMatcher(None, [word for word, _ in true], [word for word, _ in found], autojunk=False)
    pairs = ((match.a + at, match.b + at) for match in matcher.get_matching_blocks() for at in range(match.size))
    return [found[there][1] - true[here][1] for here, there in pairs]


async def play(make: Any, samples: Any, rate: int, options: dict[str, Any]) -> list[tuple[LiveText, float]]:
    """Returns the updates of a session, each with the second of the recording at which it came."""
    async with make() as engine, engine.live(rate=rate, **options) as session, trio.open_nursery() as nursery:
        begun = trio.current_time()

        async def speak() -> None:
            size = round(CHUNK * rate)
            for start in range(0, len(samples), size):
                await trio.sleep_until(begun + (start + size) / rate)
                await session.feed(samples[start : start + size])
            await session.finish()

        nursery.start_soon(speak)
        return [(update, trio.current_time() - begun) async for update in session]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint")
    parser.add_argument("--only", action="append", help="this recording; may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="the beginning of each recording")
    parser.add_argument("--step", type=float, default=0.5)
    parser.add_argument("--model-seconds", type=float, help="virtual time: an encoding takes so long")
    asked, config = parser.parse_args(), EngineConfig()
    run: Any = trio.run
    make: Any = partial(Engine, asked.checkpoint, config=config)
    if asked.model_seconds:
        seconds = dict.fromkeys(Job, 0.0) | {Job.ENCODE: asked.model_seconds, Job.STEP: asked.model_seconds / 30}
        executor = partial(torch_executor, asked.checkpoint, config)
        run = run_virtually
        make = partial(Engine.from_parts, executor, partial(SimWorker, seconds=seconds), config=config)
    for path in sorted(asked.folder.glob("*.wav")):
        if asked.only and path.stem not in asked.only:
            continue
        frames = round(asked.seconds * soundfile.info(path).samplerate)
        samples, rate = soundfile.read(path, dtype="int16", frames=frames)
        updates = run(play, make, samples, rate, {"step": asked.step, "language": "en", "beam_size": 1})
        words = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["words"]
        true = plain([(word["word"], word["end"]) for word in words if word["end"] <= len(samples) / rate])
        found = plain([(word.text, at) for update, at in updates for word in update.words])
        wrong = jiwer.wer(*(" ".join(word for word, _ in some) for some in (true, found)))
        waited = latencies(true, found) or [0.0]
        late = quantiles([*waited, waited[-1]], n=10)[-1]
        told = f"{path.stem}: {len(true)} words, WER {wrong:.1%}"
        print(f"{told}; stable after {median(waited):.2f} s, p90 {late:.2f} s", flush=True)


if __name__ == "__main__":
    main()
