"""Transcribes many files through one engine: one task per file, a line per file as soon as it is done.

    python examples/transcribe_many.py [--model MODEL] [FILE...]

Without files it takes the recordings that come along with the demo checkpoint, which is the model that it takes without
MODEL. Exits with 1 if a file failed.
"""

import argparse
import sys
from pathlib import Path

import trio

import triolet
from triolet import demo

AT_ONCE = 8  # whole files are held in memory, so their number is bounded


async def transcribe(engine: triolet.Engine, path: Path, places: trio.CapacityLimiter, failed: list[Path]) -> None:
    """A file that fails is told on standard error; the others go on."""
    async with places:
        try:
            transcript = await engine.transcribe(path)
        except triolet.TrioletError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            failed.append(path)
        else:
            print(f"{path.name} [{transcript.language}, {transcript.duration:.1f} s]: {transcript.text}")


async def main(model: str, paths: list[Path]) -> list[Path]:
    """The files that failed. The nursery is inside the engine's block: all tasks end before the device is released."""
    places = trio.CapacityLimiter(AT_ONCE)
    failed: list[Path] = []
    async with triolet.Engine(model) as engine, trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(transcribe, engine, path, places, failed)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(demo.checkpoint()), help="folder or hub id of a Whisper checkpoint")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    sys.exit(1 if trio.run(main, given.model, given.files or [sample.path for sample in demo.samples()]) else 0)
