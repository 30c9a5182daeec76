"""The real supervisor and actors over a simulated device: life and death of an engine, on virtual time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import trio

from triolet import (
    CheckpointError,
    EncodeFailed,
    Engine,
    EngineClosed,
    EngineConfig,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    SamplingParams,
)
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_model import EOS, SimModel

from .shared import TEARDOWN, all_returned, ask, audio, expected, prompt


async def test_requests_join_and_leave_and_each_gets_its_own_tokens(executor, config, trace, autojump_clock):
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(24):
                await trio.sleep(0.013 * (number % 3))
                nursery.start_soon(ask, engine, number, 1 + number % 17)


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


async def test_too_few_pages_cost_preemptions_and_no_token(config, trace, autojump_clock):
    executor = SimExecutor(SimModel(max_positions=56, pages=16, cross_slots=6))
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, engine, number, 50)
        assert engine.statistics().requests.preemptions > 0


async def test_an_exception_in_the_body_leaves_unchanged_and_everything_is_given_back(
    executor, config, trace, autojump_clock
):
    error = KeyError("mine")
    async with all_returned(executor, trace):
        with pytest.raises(KeyError) as caught:
            async with sim_engine(executor, config=config()):
                raise error
    assert caught.value is error


async def test_requests_of_outside_tasks_are_drained_when_the_block_ends(executor, config, trace, autojump_clock):
    async with all_returned(executor, trace), trio.open_nursery() as nursery:
        async with sim_engine(executor, config=config()) as engine:
            nursery.start_soon(ask, engine, 1, 30)
            await trio.sleep(0.4)
    assert trace.stages() == ["device taken", "accepting", *TEARDOWN]


async def test_what_is_not_drained_in_time_is_aborted_and_told_so(executor, config, trace, autojump_clock):
    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with all_returned(executor, trace), trio.open_nursery() as nursery:
        async with sim_engine(executor, config=config(drain_seconds=0.1)) as engine:
            nursery.start_soon(outsider, engine)
            await trio.sleep(0.4)
    assert "drain deadline" in trace.stages()


async def test_a_model_that_does_not_load_raises_its_own_error(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: CheckpointError("no weights") if job is Job.OPEN else None)
    with pytest.raises(CheckpointError, match="no weights"):
        async with sim_engine(executor, config=config()):
            raise AssertionError("never reached")
    assert not executor.is_open


async def test_a_full_queue_refuses_who_does_not_want_to_wait(executor, config, trace, autojump_clock):
    async with sim_engine(executor, config=config(max_pending=2)) as engine, trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(ask, engine, number)
        await trio.sleep(0.1)
        with pytest.raises(Overloaded, match="2 requests"):
            await ask(engine, 9, wait=False)


async def test_aclose_stops_early_and_later_requests_are_refused(executor, config, trace, autojump_clock):
    async with sim_engine(executor, config=config()) as engine:
        await ask(engine, 1)
        await engine.aclose(drain=0)
        assert not executor.is_open


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


async def test_encoding_does_not_starve_decoding(executor, config, trace, autojump_clock):
    """A burst of new audio: between two encode batches every waiting step runs."""
    async with sim_engine(executor, config=config(encode_batch_embeddings=10)) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(ask, engine, number)
    kinds = [job for job in executor.calls if job in (Job.ENCODE, Job.STEP)]
    first_step = kinds.index(Job.STEP)
    waits = "".join("e" if job is Job.ENCODE else "s" for job in kinds[first_step:])
    assert "ee" not in waits.rstrip("e")


def test_an_engine_has_no_state_before_it_is_entered():
    """Making an `Engine` neither starts threads nor touches the disk, and needs no event loop."""
    engine = Engine("no such folder", config=EngineConfig(drain_seconds=math.inf, verify=True))
    assert engine is not None


@pytest.mark.parametrize("priority", [None, "high", 1.5])
async def test_a_priority_that_is_no_integer_is_refused(priority, executor, config, trace, autojump_clock):
    """It would break the order of the queue, and with it everybody's requests."""
    async with sim_engine(executor, config=config()) as engine:
        with pytest.raises(InvalidRequest, match=r"priority=.*an integer"):
            await ask(engine, 1, priority=priority)
        await ask(engine, 2)


async def test_a_stream_that_has_failed_stays_ended(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: RuntimeError("boom") if job is Job.ENCODE else None)
    async with sim_engine(executor, config=config()) as engine:
        async with engine.stream(prompt_token_ids=prompt(1), audio=audio(1)) as deltas:
            with pytest.raises(EncodeFailed):
                await anext(deltas)
            with pytest.raises(StopAsyncIteration):
                await anext(deltas)


async def test_with_verify_a_broken_promise_stops_the_engine_and_is_named(
    executor, config, trace, monkeypatch, autojump_clock
):
    """E2 the other way round: bytes that are given back twice, so that there is room for more than there is room for.
    The request that runs hears at once; the device is given back all the same."""

    def gives_all_back(ledger: EncoderLedger, *changed: Any) -> None:
        change(ledger, *changed)
        ledger._bytes[State.ABSENT] = ledger.capacity

    change = EncoderLedger._change
    monkeypatch.setattr(EncoderLedger, "_change", gives_all_back)

    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with trio.open_nursery() as nursery:
        with pytest.raises(InvariantViolation, match="books balance: 200 bytes are taken of 150") as caught:
            async with sim_engine(executor, config=config(encoder_cache_bytes=150)) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(1.0)
                await ask(engine, 2)
    assert [type(event) for event in caught.value.history][-1] is events.EntryReserved
    assert not executor.is_open


async def test_a_drain_ends_when_the_surroundings_are_cancelled(executor, config, trace, autojump_clock):
    """At once: the request would take a second more, and nobody waits for it."""

    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with all_returned(executor, trace), trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with sim_engine(executor, config=config(drain_seconds=math.inf)) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(0.4)
                scope.deadline = trio.current_time() + 0.1
        assert trio.current_time() < 2.0, "the drain is waited for"


async def test_entering_while_cancelled_loads_nothing(executor, config, trace, autojump_clock):
    with trio.CancelScope() as scope:
        scope.cancel()
        async with sim_engine(executor, config=config()):
            raise AssertionError("never reached")
    assert executor.calls == []
