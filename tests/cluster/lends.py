"""A program: an encoder and a decoder on a Ray cluster of this machine, and the tokens of one engine to compare."""

from __future__ import annotations

import trio

import triolet.demo
from triolet import Engine, EngineConfig, EngineStateError, SamplingParams
from triolet.cluster.cluster import Cluster

CONFIG = EngineConfig(device="cpu", threads=1, dtype="float32")


async def answer(engine: Engine) -> tuple[int, ...]:
    whisper = engine.model.whisper
    language, task = whisper.language_ids["en"], whisper.task_ids["transcribe"]
    prompt = (whisper.start_id, language, task, whisper.no_timestamps_id)
    audio, sampling = triolet.demo.samples()[0].path, SamplingParams(max_tokens=20)
    return (await engine.generate(prompt_token_ids=prompt, audio=audio, sampling=sampling)).token_ids


async def main() -> None:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        own = await answer(engine)
    async with Cluster(triolet.demo.checkpoint(), config=CONFIG, encoders=1, cpus=0.5) as engine:
        assert await answer(engine) == own, "a borrowed output gives the tokens of an own one"
        with trio.fail_after(60):
            while not (told := counted(engine)):  # noqa: ASYNC110  (nobody tells of news)
                await trio.sleep(0.2)
    assert told == (1, 1, 1), "encode once: there, and not here"


def counted(engine: Engine) -> tuple[int, int, int] | None:
    """Of all replicas: encoded, borrowed, lent. ``None``: they have not told of it yet."""
    try:
        told = engine.statistics().encoder_cache
    except EngineStateError:
        return None
    return (told.encoded, told.borrowed, told.loans) if told.borrowed else None


trio.run(main)
