"""Transcribes files in a plain script, without an event loop: a pool of threads, a line for each file, in their order.

    python examples/script.py [FILE...]

Without files it takes the recordings that come along with the demo checkpoint. ^C ends it at any time: the engine's
block is inside of the pool's, so the engine ends first, and the pool does not wait for what still runs.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triolet
from triolet import demo

AT_ONCE = 8  # whole files are held in memory, so their number is bounded


def main(paths: list[Path]) -> None:
    """An error of one file ends the script; transcribe_many.py shows how the others can go on."""
    with ThreadPoolExecutor(AT_ONCE) as pool, triolet.SyncEngine(demo.checkpoint()) as engine:
        for path, transcript in zip(paths, pool.map(engine.transcribe, paths), strict=True):
            print(f"{path.name} [{transcript.language}]: {transcript.text}")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or [sample.path for sample in demo.samples()])
