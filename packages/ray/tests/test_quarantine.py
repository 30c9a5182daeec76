"""A request that ends processes, on a small cluster of Ray's: it ends one replica, and nobody else suffers for it."""

from __future__ import annotations

import pytest
import trio

import triolet.demo
from triolet import Engine, PoisonRequest, SamplingParams
from triolet.models.speech.whisper_speech import special_tokens
from triolet_ray import Cluster

from .conftest import CONFIG, NAME, POISON, assert_given_back, replicas

MODEL = triolet.demo.checkpoint()
SEEDS = (1, 2, POISON, 3, 4, 5, 6)
pytestmark = [pytest.mark.real_time, pytest.mark.thorough, pytest.mark.usefixtures("machines")]


async def ask_all(engine: Engine, seeds: tuple[int, ...]) -> dict[int, tuple[int, ...] | Exception]:
    """All at once, and all of one recording, so that one replica has them. What each has come to."""
    whisper = special_tokens(engine.model)
    prompt = (whisper.start_id, whisper.language_ids["en"], whisper.task_ids["transcribe"], whisper.no_timestamps_id)
    audio = triolet.demo.samples()[0].path
    answers: dict[int, tuple[int, ...] | Exception] = {}

    async def ask(seed: int) -> None:
        sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=seed, ignore_eos=True)
        try:
            found = await engine.generate(prompt_token_ids=prompt, audio=audio, sampling=sampling)
            answers[seed] = found.token_ids
        except PoisonRequest as error:
            answers[seed] = error

    async with trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(ask, seed)
    return answers


async def test_what_ends_its_process_ends_one_replica_and_is_found_in_quarantine() -> None:
    innocent = tuple(seed for seed in SEEDS if seed != POISON)
    async with Engine(MODEL, config=CONFIG) as engine:
        expected = await ask_all(engine, innocent)
    async with Cluster(MODEL, config=CONFIG, replicas=2, cpus=0.5, name=NAME) as cluster:
        before = {process.pid for process in replicas()}
        with trio.fail_after(300):
            found = await ask_all(cluster, SEEDS)
        poison = found.pop(POISON)
        assert isinstance(poison, PoisonRequest)
        assert "alone" in str(poison)
        assert found == expected, "the others go on, and their tokens are those that they would have had"
        assert len(before & {process.pid for process in replicas()}) == 1, "one replica has ended, the other has not"
    await assert_given_back()
