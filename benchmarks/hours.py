"""Memory while audio of hours is read window by window, and its speech found: resident size for each ten minutes.

::

    python benchmarks/hours.py [--minutes 180] [--kind wav|flac|mp3] [--voice]

The recording is made first, in a temporary folder: minutes of noise and silence in turns, mono at 16 kHz, but ``wav``
is stereo at 44.1 kHz. It is read as a transcription reads it: windows of 30 seconds, each
forgotten when the next one is asked for. With ``--voice`` the speech in each is found by Silero before. The claim:
from the first ten minutes on the resident size grows by at most 16 MB.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np
import psutil
import soundfile
import trio

from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import Hearing
from triolet.api.speech.silero import Silero
from triolet.api.speech.spans import SpanRules

GROWTH = 16e6  # bytes
WINDOW = 30  # seconds
SHAPES = {"wav": (44_100, 2, "WAV"), "flac": (16_000, 1, "FLAC"), "mp3": (16_000, 1, "MP3")}


def resident() -> int:
    """Bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def make(folder: Path, kind: str, minutes: int) -> Path:
    rate, channels, form = SHAPES[kind]
    path = folder / f"hours.{kind}"
    noise = 0.1 * np.random.default_rng(0).standard_normal((rate * 60, channels)).astype(np.float32)
    with soundfile.SoundFile(path, "w", rate, channels, format=form) as file:
        for minute in range(minutes):
            file.write(noise if minute % 2 else 0 * noise)
    return path


async def read(path: Path, *, voice: bool) -> bool:
    print("| minutes read | resident, MB | waiting, MB | spans | seconds |\n|---|---|---|---|---|")
    begun = time.perf_counter()
    sizes: list[int] = []
    held = spans = start = 0

    def tell() -> None:
        sizes.append(resident())
        minutes, seconds = start / recording.sampling_rate / 60, time.perf_counter() - begun
        waiting = 2 * recording.held / 1e6
        print(f"| {minutes:.0f} | {sizes[-1] / 1e6:.1f} | {waiting:.2f} | {spans} | {seconds:.1f} |")

    async with Recording(path) as recording:
        hearing = Hearing(recording, Silero(), SpanRules()) if voice else None
        length = WINDOW * recording.sampling_rate
        while len(window := await recording.window(start, length)):
            if hearing is not None:
                await hearing.hear(start + length)
                spans = len(hearing.spans)
            start += len(window)
            held = max(held, recording.held)
            recording.forget(start)
            if start % (600 * recording.sampling_rate) == 0:
                tell()
        if start % (600 * recording.sampling_rate):
            tell()
        broken = recording.broken
    if broken is not None:
        print(broken)
    grown = max(sizes) - sizes[0]
    holds = grown <= GROWTH and broken is None
    print(f"{'holds' if holds else 'FAILS'}: grown by {grown / 1e6:.1f} MB; claimed: at most {GROWTH / 1e6:.0f}")
    print(f"most samples at once: {held / recording.sampling_rate:.1f} s")
    return holds


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--minutes", default=180, show_default=True)
@click.option("--kind", type=click.Choice(list(SHAPES)), default="flac", show_default=True)
@click.option("--voice", is_flag=True, help="Find speech meanwhile.")
def main(minutes: int, kind: str, *, voice: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = make(Path(folder), kind, minutes)
        print(f"{path.stat().st_size / 1e6:.0f} MB of {kind}, {minutes} minutes")
        holds = trio.run(lambda: read(path, voice=voice))
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
