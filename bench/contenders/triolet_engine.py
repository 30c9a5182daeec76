"""The contender Triolet: ``triolet_engine.py FOLDER CONFIG KIND``. CONFIG is JSON, KIND is "speech", "text" or
"embed"."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import trio
from serve import beside, connect, say

GREEDY = {"beam_size": 1, "temperature": 0.0, "timestamps": "none", "voice_activity": "off"}


async def main() -> None:
    """Answers tasks, as `serve.serve` does."""
    answers = connect()
    folder, config, kind = sys.argv[1:]
    begun = time.perf_counter()
    from triolet import Engine, EngineConfig

    async with Engine(folder, config=EngineConfig(**json.loads(config))) as engine:
        about = {"dtype": engine.model.dtype, "config": config}
        say(answers, opened=time.perf_counter() - begun, about=about)
        answer = {"speech": hear, "text": write, "embed": embed}[kind]
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            task = json.loads(line)
            with beside(task) as told:
                if kind == "embed" and not task.get("each") and not task.get("arrivals"):
                    found = await vectors_of(engine, task["texts"])
                else:
                    found = await in_tasks(engine, answer, task)
            say(answers, **told, answers=found)


async def in_tasks(engine: Any, answer: Any, task: Any) -> list[dict[str, Any]]:
    """Returns the answers to all inputs, each of which has a task of trio's."""
    inputs = task.get("paths") or task.get("prompts") or task["texts"]
    found: list[dict[str, Any]] = [{} for _ in inputs]
    begun = time.perf_counter()
    async with trio.open_nursery() as nursery:
        for index, item in enumerate(inputs):
            nursery.start_soon(arrive, engine, answer, task, index, item, found, begun)
    return found


async def arrive(
    engine: Any, answer: Any, task: Any, index: int, item: str, found: list[dict[str, Any]], begun: float
) -> None:
    """Answers one input when it arrives. Its seconds count from its arrival, even if this task wakes up later."""
    arrival = (task.get("arrivals") or [0.0] * len(found))[index]
    await trio.sleep(max(begun + arrival - time.perf_counter(), 0.0))
    late = time.perf_counter() - begun - arrival
    told = await answer(engine, task, item)
    first = None if told["first"] is None else told["first"] + late
    found[index] = {**told, "first": first, "total": time.perf_counter() - begun - arrival}


async def hear(engine: Any, task: Any, path: str) -> dict[str, Any]:
    """Returns the text of a file, with its tokens and the seconds to the first one."""
    options = {**GREEDY, "encoder_context": task.get("context", "full")}
    language = "en" if engine.model.speech.facts.languages else None  # some models know one language and take no name
    transcript = await engine.transcribe(path, language=None if task.get("reuse") else language, **options)
    if task.get("reuse"):
        await engine.transcribe(path, language="en", task="translate", **options)
    tokens = [token for segment in transcript.segments for token in segment.token_ids]
    first = None if transcript.timings is None else transcript.timings.first_token
    return {"text": transcript.text, "tokens": tokens, "first": first}


async def write(engine: Any, task: Any, prompt: str) -> dict[str, Any]:
    """Returns the continuation of a prompt, with its tokens and the seconds to the first one."""
    from triolet import SamplingParams

    sampling = SamplingParams(max_tokens=task["tokens"], min_tokens=task["tokens"])
    completion = await engine.generate(prompt, sampling=sampling)
    first = None if completion.timings is None else completion.timings.first_token
    return {"text": completion.text, "tokens": list(completion.token_ids), "first": first}


async def vectors_of(engine: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Returns the vectors of texts, which are one call of the engine."""
    return [{"vector": vector} for vector in (await engine.embed(texts, pooling="mean", normalize=True)).tolist()]


async def embed(engine: Any, task: Any, text: str) -> dict[str, Any]:  # noqa: ARG001  (as the others)
    """Returns the vector of a text."""
    (found,) = await vectors_of(engine, [text])
    return {**found, "first": None}


if __name__ == "__main__":
    trio.run(main)
