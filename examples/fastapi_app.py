"""A web service on FastAPI, which is asyncio: the engine lives as long as the app and runs in a thread of its own.

    python examples/fastapi_app.py [--model MODEL] [PORT]
    curl --data-binary @speech.wav http://127.0.0.1:8000/transcribe

Without MODEL it takes the demo checkpoint, a toy. A client that hangs up cancels its request, and the log has a line.
When the server stops, requests that run are drained, then the device is released.
"""

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect

import triolet
from triolet import demo

T = TypeVar("T")
MOST_BYTES = 64 * 2**20  # of one file: it is held in memory


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[dict[str, triolet.Engine]]:
    """What it yields is in every request's ``state``."""
    async with triolet.Engine(app.state.model) as engine:
        yield {"engine": engine}


app = FastAPI(lifespan=lifespan)
app.state.model = str(demo.checkpoint())


@app.post("/transcribe")
async def transcribe(request: Request, language: str | None = None) -> dict[str, Any]:
    """The body is a whole audio file, in any format that FFmpeg reads, and no form that holds one."""
    engine: triolet.Engine = request.state.engine
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise triolet.UnsupportedAudio("a form was sent; send the file itself as the body: curl --data-binary @FILE")
    audio = await upload(request)
    transcript = await while_connected(request, engine.transcribe(audio, language=language, wait=False))
    return {
        "text": transcript.text,
        "language": transcript.language,
        "duration": transcript.duration,
        "segments": [{"start": part.start, "end": part.end, "text": part.text} for part in transcript.segments],
    }


@app.exception_handler(triolet.TrioletError)
async def explain(_: Request, error: triolet.TrioletError) -> JSONResponse:
    """Every error of the engine knows its status: 415 for what is no audio, 429 where the queue is full, and so on."""
    return JSONResponse({"error": type(error).__name__, "message": str(error)}, status_code=error.http_status)


@app.exception_handler(ClientDisconnect)
async def hung_up(_: Request, __: ClientDisconnect) -> JSONResponse:
    """Nobody reads the answer, and uvicorn logs none of a client that is gone: this line does."""
    logging.getLogger("uvicorn.error").info("a client hung up; its request is withdrawn")
    return JSONResponse({"error": "ClientDisconnect", "message": "the client hung up"}, status_code=499)


async def upload(request: Request) -> bytes:
    """The body. Too large a one is read on for as much again: many clients do not listen before they have sent all."""
    audio, size = bytearray(), 0
    async with aclosing(request.stream()) as chunks:
        async for chunk in chunks:
            size += len(chunk)
            if size <= MOST_BYTES:
                audio += chunk
            elif size > 2 * MOST_BYTES:
                break
    if size > MOST_BYTES:
        raise triolet.RequestTooLarge(f"more than {MOST_BYTES:,} bytes; send a smaller file")
    return bytes(audio)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work``, and cancels it when the client hangs up."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    task = asyncio.create_task(work)
    watcher = asyncio.create_task(watch())
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done() and not watcher.cancelled():
            raise ClientDisconnect from None
        raise HTTPException(503, "the server stops") from None  # a second ^C cancels every task
    finally:
        watcher.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=app.state.model, help="folder or hub id of a Whisper checkpoint")
    parser.add_argument("port", nargs="?", type=int, default=8000, help="0: any that is free")
    given = parser.parse_args()
    app.state.model = given.model
    uvicorn.run(app, port=given.port)
