"""Transcribes several files in an anyio task group, on the event loop that you name: the program is the same.

    python examples/anyio_group.py [--model MODEL] [asyncio|trio [FILE...]]

Without files it takes the recordings that come along with the demo checkpoint, which is the model that it takes without
MODEL.
"""

import argparse
from pathlib import Path

import anyio

import triolet
from triolet import demo


async def transcribe(engine: triolet.Engine, path: Path, places: anyio.CapacityLimiter) -> None:
    """An error of one file leaves the group and cancels the others; transcribe_many.py shows how they can go on."""
    async with places:
        transcript = await engine.transcribe(path)
    print(f"{path.name} [{transcript.language}]: {transcript.text}")


async def main(model: str, paths: list[Path]) -> None:
    """All tasks have ended when the device is given back."""
    places = anyio.CapacityLimiter(8)  # whole files are held in memory, so their number is bounded
    async with triolet.Engine(model) as engine, anyio.create_task_group() as group:
        for path in paths:
            group.start_soon(transcribe, engine, path, places)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(demo.checkpoint()), help="folder or hub id of a Whisper checkpoint")
    parser.add_argument("backend", nargs="?", choices=["asyncio", "trio"], default="asyncio", help="the event loop")
    parser.add_argument("files", nargs="*", type=Path)
    given = parser.parse_args()
    files = given.files or [sample.path for sample in demo.samples()]
    anyio.run(main, given.model, files, backend=given.backend)
