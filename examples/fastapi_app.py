"""A web service on FastAPI, which is asyncio: the engine lives as long as the app and runs in a thread of its own.

    python examples/fastapi_app.py [--model MODEL] [PORT]
    curl --data-binary @speech.wav http://127.0.0.1:8000/transcribe

Without MODEL it takes the demo checkpoint, a toy. A client that hangs up cancels its request, and the log has a line.
When the server stops, requests that run are drained, then the device is released.
"""

import argparse
import logging
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

import triolet
from triolet import demo
from triolet.web import EngineMiddleware, lifespan

app = FastAPI(lifespan=lifespan(lambda: triolet.Engine(app.state.model)))
app.add_middleware(EngineMiddleware, max_body_bytes=64 * 2**20)  # of one file: it is held in memory
app.state.model = demo.checkpoint()


@app.post("/transcribe")
async def transcribe(request: Request, language: str | None = None) -> dict[str, Any]:
    """The body is a whole audio file, in any format that FFmpeg reads, and no form that holds one."""
    if request.headers.get("content-type", "").startswith("multipart/"):
        raise triolet.UnsupportedAudio("a form was sent; send the file itself as the body: curl --data-binary @FILE")
    transcript = await request.state.engine.transcribe(await request.body(), language=language, wait=False)
    segments = [{"start": part.start, "end": part.end, "text": part.text} for part in transcript.segments]
    about = {"language": transcript.language, "duration": transcript.duration}
    return {"text": transcript.text, **about, "segments": segments}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=app.state.model, help="folder or hub id of a Whisper checkpoint")
    parser.add_argument("port", nargs="?", type=int, default=8000, help="0: any that is free")
    given = parser.parse_args()
    app.state.model = given.model
    logging.basicConfig(level=logging.INFO)  # Triolet's lines, beside uvicorn's
    uvicorn.run(app, port=given.port)
