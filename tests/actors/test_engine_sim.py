"""The real supervisor and actors over a simulated device: life and death of an engine, on virtual time."""

from __future__ import annotations

import math

import pytest
import trio

from triolet import (
    EncodeFailed,
    Engine,
    EngineConfig,
    SamplingParams,
)
from triolet.actors.worker import Job
from triolet.core import events
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_model import EOS

from .shared import TEARDOWN, all_returned, ask, audio, expected, prompt


async def test_clips_that_arrive_together_are_encoded_in_batches_within_the_budget(
    executor, config, trace, autojump_clock
):
    settings = config(encode_batch_embeddings=50)
    async with all_returned(executor, trace), sim_engine(executor, config=settings) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, engine, number)
    batches = [len(event.keys) for event in trace.of(events.EncodeDispatched)]
    assert sum(batches) == 12
    assert max(batches) == 5, "ten embeddings an item, fifty a batch"
    assert len(batches) <= 4


async def test_the_same_audio_is_encoded_once_and_its_cross_kv_is_shared(executor, config, trace, autojump_clock):
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 1)
            nursery.start_soon(ask, engine, 1)
        await ask(engine, 1)
        statistics = engine.statistics()
    assert statistics.encoder_cache.encoded == 1
    assert statistics.requests.cross_written == 1
    assert statistics.requests.cross_shared == 2


async def test_requests_of_outside_tasks_are_drained_when_the_block_ends(executor, config, trace, autojump_clock):
    async with all_returned(executor, trace), trio.open_nursery() as nursery:
        async with sim_engine(executor, config=config()) as engine:
            nursery.start_soon(ask, engine, 1, 30)
            await trio.sleep(0.4)
    assert trace.stages() == ["device taken", "accepting", *TEARDOWN]


async def test_a_stream_gives_tokens_as_they_come_and_may_be_left_early(executor, config, trace, autojump_clock):
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        sampling = SamplingParams(max_tokens=20)
        seen: list[int] = []
        arrivals: set[float] = set()
        async with engine.stream(prompt_token_ids=prompt(1), audio=audio(1), sampling=sampling) as deltas:
            async for delta in deltas:
                seen += delta.token_ids
                arrivals.add(trio.current_time())
        assert tuple(token for token in seen if token != EOS) == expected(1)
        assert len(arrivals) > 5, "not all at the end"
        async with engine.stream(prompt_token_ids=prompt(2), audio=audio(2), sampling=sampling) as deltas:
            async for _ in deltas:
                break
        await trio.sleep(1)
        assert engine.statistics().requests.pages_free == engine.statistics().requests.pages
    assert trace.of(events.RequestEnded)[-1].outcome == "aborted"


def test_an_engine_has_no_state_before_it_is_entered():
    """Making an `Engine` neither starts threads nor touches the disk, and needs no event loop."""
    engine = Engine("no such folder", config=EngineConfig(drain_seconds=math.inf, verify=True))
    assert engine is not None


async def test_a_stream_that_has_failed_stays_ended(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: RuntimeError("boom") if job is Job.ENCODE else None)
    async with sim_engine(executor, config=config()) as engine:
        async with engine.stream(prompt_token_ids=prompt(1), audio=audio(1)) as deltas:
            with pytest.raises(EncodeFailed):
                await anext(deltas)
            with pytest.raises(StopAsyncIteration):
                await anext(deltas)
