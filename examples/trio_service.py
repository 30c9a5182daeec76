"""A TCP service on trio: whoever connects sends an audio file and closes its sending half, and gets a line of JSON.

    python examples/trio_service.py [--model MODEL] [PORT]
    nc -N 127.0.0.1 8000 < speech.wav

Without MODEL it takes the demo checkpoint, a toy. The engine runs in the service's own loop. ^C stops the service:
connections are closed, then the device is released.
"""

import argparse
import json
import sys
from functools import partial

import trio

import triolet
from triolet import demo

MOST_BYTES = 64 * 2**20  # of one file: it is held in memory
LINGER = 60.0  # seconds for a client that still sends when it is answered


async def answer(engine: triolet.Engine, stream: trio.SocketStream) -> dict[str, object]:
    """What the client is told, an error too: the next one is served."""
    audio = bytearray()
    try:
        async for chunk in stream:
            audio += chunk
            if len(audio) > MOST_BYTES:
                raise triolet.RequestTooLarge(f"more than {MOST_BYTES:,} bytes; send a smaller file")
        transcript = await engine.transcribe(bytes(audio))
    except triolet.TrioletError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"text": transcript.text, "language": transcript.language, "duration": transcript.duration}


async def serve(engine: triolet.Engine, stream: trio.SocketStream) -> None:
    """One connection. Closing it with bytes unread would reset it, and the client lose its line: they are discarded."""
    try:
        line = json.dumps(await answer(engine, stream))
        await stream.send_all(line.encode() + b"\n")
        await stream.send_eof()
        with trio.move_on_after(LINGER):
            async for _ in stream:
                pass
    except trio.BrokenResourceError:
        print("a client hung up", file=sys.stderr)


async def main(model: str, port: int) -> None:
    """The nursery of the connections is inside the engine's block."""
    async with triolet.Engine(model) as engine, trio.open_nursery() as nursery:
        listen = partial(trio.serve_tcp, partial(serve, engine), port, host="127.0.0.1")
        listeners = await nursery.start(listen)
        print(f"listening on port {listeners[0].socket.getsockname()[1]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(demo.checkpoint()), help="folder or hub id of a Whisper checkpoint")
    parser.add_argument("port", nargs="?", type=int, default=8000, help="0: any that is free")
    given = parser.parse_args()
    try:
        trio.run(main, given.model, given.port)
    except* KeyboardInterrupt:
        print("stopped")
