"""The clients of `clients.py` that know speech alone."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from asked import KEY, Asked

Calls = Iterator[tuple[str, Callable[[], Any]]]
BRIDGE = "tcp://127.0.0.1:10310"
SECONDS = 60


def speech_recognition(server: Asked) -> Calls:
    import speech_recognition

    os.environ.update(OPENAI_API_KEY=KEY, OPENAI_BASE_URL=server.base)
    recognizer = speech_recognition.Recognizer()
    with speech_recognition.AudioFile(str(server.recording)) as source:
        audio = recognizer.record(source)
    yield "transcription", lambda: recognizer.recognize_openai(audio, model=server.speech)


def chunkscribe(server: Asked) -> Calls:
    folder = tempfile.mkdtemp()
    environment = {**os.environ, "OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": server.base}

    def run() -> str:
        target = Path(folder, "text.txt")
        program = Path(sys.executable).with_name("chunkscribe")
        command = [program, "--model", server.speech, "--workdir", folder, server.recording, target]
        subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=True)
        return target.read_text(encoding="utf-8")

    yield "transcription", run


def livekit(server: Asked) -> Calls:
    from livekit import rtc
    from livekit.agents import stt, utils
    from livekit.plugins import openai

    place: Any = {"model": server.speech, "language": server.language, "base_url": server.base, "api_key": KEY}
    rate, pieces = _pieces(server)
    frames = [rtc.AudioFrame(one, rate, 1, len(one) // 2) for one in pieces]

    async def whole() -> str:
        async with utils.http_context.open():
            event = await openai.STT(**place).recognize(frames)
            return event.alternatives[0].text

    async def live() -> str:
        async with utils.http_context.open(), openai.STT(**place, use_realtime=True).stream() as stream:
            for frame in frames:
                stream.push_frame(frame)
            async for event in stream:
                if event.type == stt.SpeechEventType.FINAL_TRANSCRIPT:
                    return event.alternatives[0].text
        return ""

    yield "transcription", lambda: asyncio.run(whole())
    yield "realtime", lambda: asyncio.run(asyncio.wait_for(live(), SECONDS))


def pipecat(server: Asked) -> Calls:
    from pipecat.services.openai.stt import OpenAIRealtimeSTTService, OpenAISTTService
    from pipecat.transcriptions.language import Language

    asked: Any = {"model": server.speech, "language": Language(server.language)}
    address = server.base.replace("http", "ws", 1) + "/realtime"

    def whole() -> Any:
        return OpenAISTTService(api_key=KEY, base_url=server.base, settings=OpenAISTTService.Settings(**asked))

    def live(**options: Any) -> Any:
        settings = OpenAIRealtimeSTTService.Settings(**asked)
        return OpenAIRealtimeSTTService(api_key=KEY, base_url=address, settings=settings, **options)

    yield "transcription", lambda: asyncio.run(_piped(server, whole))
    yield "realtime", lambda: asyncio.run(_piped(server, live))
    yield (
        "realtime, turns by the server",
        lambda: asyncio.run(_piped(server, lambda: live(turn_detection={"type": "server_vad"}))),
    )


async def _piped(server: Asked, make: Callable[[], Any]) -> str:
    """What a service of pipecat hears, in a pipeline of its own."""
    from pipecat.frames import frames
    from pipecat.pipeline.pipeline import Pipeline
    from pipecat.pipeline.runner import PipelineRunner
    from pipecat.pipeline.task import PipelineParams, PipelineTask
    from pipecat.processors.frame_processor import FrameDirection, FrameProcessor

    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    class Sink(FrameProcessor):
        async def process_frame(self, frame: Any, direction: FrameDirection) -> None:
            await super().process_frame(frame, direction)
            if isinstance(frame, frames.TranscriptionFrame) and not heard.done():
                heard.set_result(frame.text)
            await self.push_frame(frame, direction)

    rate, pieces = _pieces(server)
    task = PipelineTask(Pipeline([make(), Sink()]), params=PipelineParams(audio_in_sample_rate=rate))

    async def feed() -> str:
        await asyncio.sleep(1.0)  # the service connects meanwhile, and tells nobody when it has
        await task.queue_frame(frames.VADUserStartedSpeakingFrame())
        for piece in pieces:
            await task.queue_frame(frames.InputAudioRawFrame(audio=piece, sample_rate=rate, num_channels=1))
        await task.queue_frame(frames.VADUserStoppedSpeakingFrame())
        try:
            return await asyncio.wait_for(heard, SECONDS)
        finally:
            await task.cancel()

    _, text = await asyncio.gather(PipelineRunner(handle_sigint=False).run(task), feed())
    return text


def wyoming(server: Asked) -> Calls:
    """The bridge to Home Assistant, in a process of its own, asked as Home Assistant asks it."""

    def run(kind: str) -> str:
        place = ["--stt-openai-key", KEY, "--stt-openai-url", server.base, "--languages", server.language]
        command = [sys.executable, "-m", "wyoming_openai", "--uri", BRIDGE, *place, kind, server.speech]
        bridge = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(asyncio.wait_for(_bridged(server), SECONDS))
        finally:
            bridge.terminate()
            bridge.wait()

    yield "transcription", lambda: run("--stt-models")
    yield "transcription, streamed", lambda: run("--stt-streaming-models")
    yield "realtime", lambda: run("--stt-realtime-models")


async def _bridged(server: Asked) -> str:
    from wyoming.asr import Transcribe
    from wyoming.audio import AudioChunk, AudioStart, AudioStop
    from wyoming.client import AsyncClient

    client = AsyncClient.from_uri(BRIDGE)
    while True:
        try:
            await client.connect()
            break
        except OSError:
            await asyncio.sleep(0.2)
    rate, pieces = _pieces(server)
    await client.write_event(Transcribe(name=server.speech, language=server.language).event())
    await client.write_event(AudioStart(rate=rate, width=2, channels=1).event())
    for piece in pieces:
        await client.write_event(AudioChunk(rate=rate, width=2, channels=1, audio=piece).event())
    await client.write_event(AudioStop().event())
    while (event := await client.read_event()) is not None:
        if event.type == "transcript":
            return event.data["text"]
    return ""


def _pieces(server: Asked) -> tuple[int, list[bytes]]:
    """The rate, and the recording in pieces of 0.1 s with two seconds of silence behind it."""
    samples, rate = server.samples()
    samples += bytes(4 * rate)
    step = rate // 10 * 2
    return rate, [samples[start : start + step] for start in range(0, len(samples) - step + 1, step)]
