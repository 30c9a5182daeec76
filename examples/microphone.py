"""Writes what is said into a microphone: stable text at once and for good, the rest as it is understood so far.

    arecord -q -f S16_LE -r 16000 -c 1 -t raw | python examples/microphone.py [MODEL [RATE]]
    ffmpeg -loglevel error -f pulse -i default -f s16le -ar 16000 -ac 1 - | python examples/microphone.py [MODEL]

Standard input is raw PCM: int16, little endian, mono, 16 kHz or RATE. ^C, or the end of the input, stops it. Without
MODEL it takes the demo checkpoint, which understands nothing but its own recordings.
"""

import os
import sys
from functools import partial

import trio

import triolet
from triolet import demo

CHUNK = 3200  # bytes: 0.1 s at 16 kHz
SHOWN = 100  # characters of provisional text: it must not fill more than a line


async def listen(session: triolet.LiveSession) -> None:
    """Feeds standard input. `os.read` returns as soon as there is something; half a sample waits for its other half."""
    rest = b""
    while read := await trio.to_thread.run_sync(partial(os.read, 0, CHUNK), abandon_on_cancel=True):
        data = rest + read
        whole = len(data) // 2 * 2
        rest = data[whole:]
        await session.feed(data[:whole])
    await session.finish()


def write(update: triolet.LiveText) -> None:
    """On a terminal, too, the provisional text: grey, behind the cursor, where the next update writes over it."""
    end = "\n" if update.ends_utterance else ""
    if not sys.stdout.isatty():
        print(update.stable, end=end, flush=True)
        return
    provisional = f"\x1b7\x1b[90m{update.provisional[:SHOWN]}\x1b[0m\x1b8"
    print(f"\x1b[J{update.stable}{end}{provisional}", end="", flush=True)


async def main(model: str, rate: int) -> None:
    """One task feeds, this one writes."""
    async with (
        triolet.Engine(model) as engine,
        engine.live(rate=rate) as session,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(listen, session)
        async for update in session:
            write(update)


if __name__ == "__main__":
    model, rate, *_ = [*sys.argv[1:], *[str(demo.checkpoint()), "16000"][len(sys.argv) - 1 :]]
    try:
        trio.run(main, model, int(rate))
    except* KeyboardInterrupt:
        print()
