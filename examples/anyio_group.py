"""Transcribes several files in an anyio task group, on the event loop that you name: the program is the same.

    python examples/anyio_group.py [asyncio|trio [FILE...]]

Without files it takes the recordings that come along with the demo checkpoint.
"""

import sys
from pathlib import Path

import anyio

import triolet
from triolet import demo


async def transcribe(engine: triolet.Engine, path: Path, places: anyio.CapacityLimiter) -> None:
    """An error of one file leaves the group and cancels the others; transcribe_many.py shows how they can go on."""
    async with places:
        transcript = await engine.transcribe(path)
    print(f"{path.name} [{transcript.language}]: {transcript.text}")


async def main(paths: list[Path]) -> None:
    """All tasks have ended when the device is given back."""
    places = anyio.CapacityLimiter(8)  # whole files are held in memory, so their number is bounded
    async with triolet.Engine(demo.checkpoint()) as engine, anyio.create_task_group() as group:
        for path in paths:
            group.start_soon(transcribe, engine, path, places)


if __name__ == "__main__":
    backend, *names = sys.argv[1:] or ["asyncio"]
    if backend not in {"asyncio", "trio"}:
        sys.exit(f"unknown event loop {backend!r}; usage: anyio_group.py [asyncio|trio [FILE...]]")
    anyio.run(main, [Path(name) for name in names] or [sample.path for sample in demo.samples()], backend=backend)
