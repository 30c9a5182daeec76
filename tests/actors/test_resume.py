"""A request that comes from an engine that was lost goes on behind the tokens that it had."""

from __future__ import annotations

import pytest
from attrs import evolve

from triolet import EngineConfig, SamplingParams
from triolet.actors.messages import Failed, Finished
from triolet.core import events
from triolet.core.errors import PoisonRequest
from triolet.core.plan import StepPlan
from triolet.core.request import Request
from triolet_testing import SimExecutor, sim_engine
from triolet_testing.sim_model import expected_tokens

from .shared import Reader

PROMPT = (3, 5, 8)
LENGTH = 12
WHOLE = expected_tokens(PROMPT, None, LENGTH)


def request(had: int = 0, **more: object) -> Request:
    return evolve(
        Request(
            id=f"behind {had}",
            prompt_token_ids=PROMPT,
            committed=WHOLE[:had],
            max_tokens=LENGTH,
            sampling=SamplingParams(max_tokens=LENGTH, ignore_eos=True),
        ),
        **more,
    )


@pytest.mark.parametrize("suspect", [False, True])
async def test_it_has_the_tokens_that_it_would_have_had(suspect: bool, autojump_clock: object) -> None:
    """Behind every token; many at once, beside each other or apart."""
    readers = {had: Reader() for had in range(len(WHOLE))}
    async with sim_engine(config=EngineConfig(verify=True)) as engine:
        for had, reader in readers.items():
            engine.inside.backend.submit(request(had, suspect=suspect), reader)
        for reader in readers.values():
            await reader.ended.wait()
    for had, reader in readers.items():
        assert isinstance(reader.told, Finished)
        assert tuple(reader.token_ids) == WHOLE[had:]


async def test_suspects_run_apart_until_they_have_sampled_a_token(autojump_clock: object) -> None:
    """From the others, and in halves: so the one that crashes steps is found alone, and the others go on."""
    steps: list[tuple[str, ...]] = []

    def crash(_: object, call: object) -> BaseException | None:
        return OSError("planted") if isinstance(call, StepPlan) and bad(call) else None

    def bad(plan: StepPlan) -> bool:
        names = steps[-1]  # told before it is run
        return "poison" in names

    def observe(event: events.Event) -> None:
        if isinstance(event, events.StepBegun):
            steps.append(event.request_ids)

    readers = {name: Reader() for name in ("poison", "a", "b", "new")}
    config = EngineConfig(observer=observe, steps_in_flight=1)
    async with sim_engine(SimExecutor(fault=crash), config=config) as engine:
        for name, reader in readers.items():
            engine.inside.backend.submit(request(id=name, suspect=name != "new"), reader)
        for reader in readers.values():
            await reader.ended.wait()
    assert isinstance(readers["poison"].told, Failed)
    assert isinstance(readers["poison"].told.error, PoisonRequest)
    assert all(tuple(readers[name].token_ids) == WHOLE for name in ("a", "b", "new"))
    assert not any({"poison", "new"} <= set(names) for names in steps), "who is above suspicion does not suffer"
