"""The same on the real executor: the decoder raises in the middle of a step, and nobody's tokens change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
from attrs import define

from triolet import Completion, Engine, EngineConfig, PoisonRequest, SamplingParams
from triolet.models.native.draws import Chosen
from triolet.models.networks.network import Feed
from triolet.models.sampler import Sampler
from triolet.models.speech.whisper_speech import special_tokens

REQUESTS, RATE = 200, 0.05
POISON = 2  # a token that the checkpoint suppresses: nobody draws it


@define
class Flaky:
    """A sampler that raises after its work, its decoder's pages and slots written."""

    dice: random.Random
    steps: int = 0
    failed: int = 0

    def answer(self, sampler: Sampler, feeds: Sequence[Feed], *rest: Any) -> list[Chosen]:
        self.steps += 1
        found = ANSWER(sampler, feeds, *rest)
        if any(POISON in feed.tokens for feed in feeds):
            raise RuntimeError("a poisonous prompt")
        if self.dice.random() < RATE:
            self.failed += 1
            raise RuntimeError("a cosmic ray")
        return found


ANSWER = Sampler._choose


@define
class Mixed:
    """200 requests on 24 clips: greedy and sampled, long and short, of three priorities."""

    checkpoint: Path
    audio: object
    poisonous: frozenset[int] = frozenset()

    async def run(self) -> dict[int, Completion | str]:
        ends: dict[int, Completion | str] = {}
        config = EngineConfig(device="cpu", dtype="float32", page_size=4, max_running=8, verify=True)
        async with Engine(self.checkpoint, config=config) as engine, trio.open_nursery() as nursery:
            for number in range(REQUESTS):
                nursery.start_soon(self._ask, engine, number, ends)
        return ends

    async def _ask(self, engine: Engine, number: int, ends: dict[int, Completion | str]) -> None:
        tokens = special_tokens(engine.model)
        assert tokens is not None
        sampling = SamplingParams(max_tokens=2 + number % 24, temperature=number % 2 * 0.8, seed=number)
        prompt = [tokens.start_id, 258, 262, tokens.no_timestamps_id, *[POISON] * (number in self.poisonous)]
        try:
            ends[number] = await engine.generate(
                prompt_token_ids=prompt, audio=self.audio(number % 24, 0.5), sampling=sampling, priority=number % 3
            )
        except PoisonRequest:
            ends[number] = "poison"


async def test_of_200_mixed_requests_only_the_poisonous_ones_fail(checkpoint, audio, monkeypatch: pytest.MonkeyPatch):
    undisturbed = await Mixed(checkpoint, audio).run()
    flaky = Flaky(random.Random(0))

    def answer(*arguments: Any) -> list[Chosen]:  # a function, so that it is given the sampler
        return flaky.answer(*arguments)

    monkeypatch.setattr(Sampler, "_choose", answer)
    disturbed = await Mixed(checkpoint, audio, frozenset({31, 77, 140})).run()
    assert flaky.failed >= 0.03 * flaky.steps, "the device was not flaky"
    poisoned = {number for number, end in disturbed.items() if end == "poison"}
    assert poisoned == {31, 77, 140}
    wrong = [n for n, end in disturbed.items() if n not in poisoned and end.token_ids != undisturbed[n].token_ids]
    assert not wrong
