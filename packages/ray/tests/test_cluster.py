"""Replicas on a small cluster of Ray's: what one engine says they say, whatever becomes of them."""

from __future__ import annotations

import asyncio
import math
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import trio
from attrs import evolve, frozen

import triolet.demo
from triolet import CheckpointError, Engine, InvalidRequest, SamplingParams
from triolet.models.speech.whisper_speech import special_tokens
from triolet_ray import Cluster

from .conftest import CONFIG, NAME, assert_given_back, kill, replicas, until

MODEL = triolet.demo.checkpoint()
pytestmark = [pytest.mark.real_time, pytest.mark.usefixtures("machines")]


@frozen
class Case:
    audio: tuple[np.ndarray, int]
    temperature: float
    max_tokens: int
    seed: int


def make_cases(count: int) -> list[Case]:
    """Mixed requests of four recordings."""
    chance = random.Random(5)
    heard = []
    for sample in triolet.demo.samples()[:4]:
        samples, rate = soundfile.read(sample.path, dtype="float32")
        heard.append((samples[: 20 * rate], rate))
    return [
        Case(chance.choice(heard), chance.choice([0.0, 0.7]), chance.randint(5, 50), number) for number in range(count)
    ]


Answers = dict[int, tuple[int, ...]]


async def ask(engine: Engine, cases: list[Case], answers: Answers, begun: trio.Event | None = None) -> None:
    """All at once, as streams. ``begun``: one of them has a token."""
    whisper = special_tokens(engine.model)
    prompt = (
        whisper.start_id,
        whisper.language_ids["en"],
        whisper.task_ids["transcribe"],
        whisper.no_timestamps_id,
    )

    async def one(number: int, case: Case) -> None:
        sampling = SamplingParams(max_tokens=case.max_tokens, temperature=case.temperature, seed=case.seed)
        token_ids: list[int] = []
        async with engine.stream(prompt_token_ids=prompt, audio=case.audio, sampling=sampling) as deltas:
            async for delta in deltas:
                token_ids += delta.token_ids
                if begun is not None:
                    begun.set()
        answers[number] = tuple(token_ids)

    async with trio.open_nursery() as nursery:
        for number, case in enumerate(cases):
            nursery.start_soon(one, number, case)


async def test_replicas_say_what_one_engine_says_though_one_is_killed() -> None:
    """And none of them encodes a recording twice; nothing is lost, and nothing is left.

    Any of them may get any recording: Serve takes another replica where one is slow to say how much it has to do.
    """
    cases = make_cases(30)
    # There is a place for each request wherever it goes, and no output is freed, however slow the machine is.
    config = evolve(CONFIG, max_running=len(cases), encoder_idle_seconds=math.inf)
    expected: Answers = {}
    async with Engine(MODEL, config=config) as engine:
        await ask(engine, cases, expected)
        one = engine.statistics()
    assert len(set(expected.values())) > 10, "the model has something to say"
    async with Cluster(MODEL, config=config, replicas=2, cpus=0.5, name=NAME) as cluster:
        found: Answers = {}
        await ask(cluster, cases, found)
        assert found == expected
        # The replicas are asked now and then; who tells of all tokens tells of all encodings.
        await until(lambda: cluster.statistics().requests.tokens_committed >= one.requests.tokens_committed)
        statistics = cluster.statistics()
        assert one.encoder_cache.encoded <= statistics.encoder_cache.encoded <= 2 * one.encoder_cache.encoded
        assert statistics.device.device == "2 replicas on cpu"
        again: Answers = {}
        begun = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, cluster, cases, again, begun)
            await begun.wait()
            kill(random.Random(1).choice(replicas()))
        assert again == expected
    await assert_given_back()


@pytest.mark.thorough
async def test_what_a_replica_cannot_load_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        async with Cluster(tmp_path / "nothing", config=CONFIG, cpus=0.5, name=NAME):
            pytest.fail("it opened")
    await assert_given_back()


@pytest.mark.thorough
async def test_a_replica_that_comes_later_and_cannot_load_the_model_gets_no_request(tmp_path: Path) -> None:
    """Its machine lacks the folder, say. The others go on."""
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    async with Cluster(model, config=CONFIG, cpus=0.5, name=NAME) as cluster:
        expected = (await cluster.transcribe(triolet.demo.samples()[0].path)).text
        shutil.rmtree(model)
        await cluster.scale(2)
        await until(lambda: len(replicas()) == 2)
        await until(lambda: len(replicas()) == 1)  # it cannot load it, and ends
        for sample in triolet.demo.samples()[:4]:
            assert (await cluster.transcribe(sample.path)).text
        assert (await cluster.transcribe(triolet.demo.samples()[0].path)).text == expected


@pytest.mark.thorough
def test_on_asyncio_it_is_the_same() -> None:
    sample = next(sample for sample in triolet.demo.samples() if sample.path.stem == "en-command")

    async def main() -> str:
        async with Cluster(MODEL, config=CONFIG, cpus=0.5, name=NAME) as cluster:
            text = (await cluster.transcribe(sample.path, language="en")).text
            await cluster.aclose()
            assert [one.bytes_held for one in cluster.departures] == [0], "the device is released when it returns"
            return text

    assert asyncio.run(main()) == sample.text


@pytest.mark.parametrize(
    ("given", "says"),
    [({"replicas": 0}, "replicas=0"), ({"cpus": "many"}, "cpus='many'"), ({"replicas": 1.5}, "replicas=1.5")],
)
def test_what_is_not_allowed_is_told_when_it_is_made(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Cluster(MODEL, **given)
