"""Transcribes many files through one engine: one task per file, a line per file as soon as it is done.

    python examples/transcribe_many.py [FILE...]

Without files it takes the recordings that come along with the demo checkpoint.
"""

import sys
from pathlib import Path

import trio

import triolet
from triolet import demo

AT_ONCE = 8  # whole files are held in memory, so their number is bounded


async def transcribe(engine: triolet.Engine, path: Path, places: trio.CapacityLimiter) -> None:
    """A file that fails is told on standard error; the others go on."""
    async with places:
        try:
            transcript = await engine.transcribe(path)
        except triolet.TrioletError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
        else:
            print(f"{path.name} [{transcript.language}, {transcript.duration:.1f} s]: {transcript.text}")


async def main(paths: list[Path]) -> None:
    """The nursery is inside the engine's block, so all tasks are done when the device is given back."""
    places = trio.CapacityLimiter(AT_ONCE)
    async with triolet.Engine(demo.checkpoint()) as engine, trio.open_nursery() as nursery:
        for path in paths:
            nursery.start_soon(transcribe, engine, path, places)


if __name__ == "__main__":
    trio.run(main, [Path(name) for name in sys.argv[1:]] or [sample.path for sample in demo.samples()])
