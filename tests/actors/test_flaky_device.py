"""A device that fails now and then, and requests that crash it: everybody else gets the tokens of a quiet day."""

from __future__ import annotations

import random

import pytest
import trio
from attrs import define, field

from triolet import EngineConfig, PoisonRequest, SamplingParams
from triolet.actors.worker import Job
from triolet.api.inputs.audio import content_key
from triolet.core.plan import StepPlan
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_model import EOS, SimModel, expected_tokens
from triolet_testing.trio_tools.schedules import Batches, run_scheduled

from .shared import audio

REQUESTS, POISONOUS, RATE = 200, 3, 0.06
POISON = 63  # a token


@define
class FlakyDevice:
    """Fails ``RATE`` of the steps by chance, and every step with a poisonous request in it."""

    dice: random.Random
    failed: int = 0
    steps: int = 0
    _poisoned: set[int] = field(factory=set)

    def __call__(self, job: Job, plan: object) -> Exception | None:
        if job is not Job.STEP or not isinstance(plan, StepPlan) or not plan.chunks:
            return None
        self.steps += 1
        self._poisoned |= {
            start.sequence_id for start in plan.started if POISON in start.token_ids[: start.prompt_length]
        }
        if any(part.sequence_id in self._poisoned for part in plan.chunks):
            return RuntimeError("a poisonous prompt")
        if self.dice.random() >= RATE:
            return None
        self.failed += 1
        return RuntimeError("a cosmic ray")


@pytest.mark.parametrize("seed", range(4))
def test_of_200_mixed_requests_only_the_poisonous_ones_fail(seed):
    """Streams show neither gap nor duplicate: they end with the tokens that the request has when it is alone."""
    dice = random.Random(seed)
    device = FlakyDevice(dice)
    poisonous = set(dice.sample(range(REQUESTS), POISONOUS))
    ends: dict[int, object] = {}

    async def ask(number: int) -> None:
        await trio.sleep(dice.random() * 3)
        prompt = [1, 2 + number % 60, *[POISON] * (number in poisonous)]
        samples, most = audio(number % 24), 1 + number % 20
        got: list[int] = []
        try:
            sampling = SamplingParams(max_tokens=most)
            async with engine.stream(
                prompt_token_ids=prompt, audio=samples, sampling=sampling, priority=number % 3
            ) as deltas:
                async for delta in deltas:
                    got += delta.token_ids
        except PoisonRequest:
            ends[number] = "poison"
            return
        true = expected_tokens(prompt, content_key(samples, "sim"), most)
        ends[number] = tuple(got) == (true[:-1] if true[-1] == EOS else true)

    async def main() -> None:
        nonlocal engine
        executor = SimExecutor(SimModel(pages=400, cross_slots=8), fault=device)
        async with sim_engine(executor, config=EngineConfig(verify=True)) as engine, trio.open_nursery() as nursery:
            for number in range(REQUESTS):
                nursery.start_soon(ask, number)

    engine = None
    run_scheduled(main, schedule=Batches(seed))
    assert device.failed >= 0.6 * RATE * device.steps, "the device was not flaky"
    assert ends == {number: "poison" if number in poisonous else True for number in range(REQUESTS)}
