"""The real supervisor and actors over a simulated device: life and death of an engine, on virtual time."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import trio

from triolet import (
    CheckpointError,
    DeviceLost,
    EncodeFailed,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineTeardownError,
    InvalidRequest,
    InvariantViolation,
    Overloaded,
    PoisonRequest,
    RunnerCrashed,
    SamplingParams,
)
from triolet.actors.messages import Encoded
from triolet.actors.worker import Job, ThreadWorker
from triolet.api.audio import Samples, content_key
from triolet.core import events
from triolet.core.ledger import EncoderLedger
from triolet.testing.sim import EOS, SimExecutor, SimModel, SimWorker, expected_tokens, sim_engine

TEARDOWN = [
    "intake closed",
    "scheduler stopped",
    "encoder cache stopped",
    "device released",
    "runner stopped",
    "channels closed",
]


def audio(number: int) -> Samples:
    return np.full(1600, number / 100, np.float32)


def prompt(number: int) -> list[int]:
    return [1, 2 + number]


def expected(number: int, max_tokens: int = 20) -> tuple[int, ...]:
    tokens = expected_tokens(prompt(number), content_key(audio(number), "sim"), max_tokens)
    return tokens[:-1] if tokens[-1] == EOS else tokens


async def ask(engine: Engine, number: int, max_tokens: int = 20, **more: object) -> None:
    """One request, whose tokens must be those it would have had alone."""
    completion = await engine.generate(
        prompt_token_ids=prompt(number),
        audio=audio(number),
        sampling=SamplingParams(max_tokens=max_tokens),
        **more,
    )
    assert completion.token_ids == expected(number, max_tokens)


class Trace(list[events.Event]):
    def stages(self) -> list[str]:
        return [event.stage for event in self if isinstance(event, events.StageReached)]

    def of(self, kind: type[events.Event]) -> list[events.Event]:
        return [event for event in self if isinstance(event, kind)]

    def ends(self) -> list[str]:
        return [event.request_id for event in self if isinstance(event, events.RequestEnded)]


@pytest.fixture
def trace() -> Trace:
    return Trace()


@pytest.fixture
def executor() -> SimExecutor:
    return SimExecutor()


@pytest.fixture
def config(trace: Trace) -> Callable[..., EngineConfig]:
    return lambda **changes: EngineConfig(**{"observer": trace.append, "verify": True, **changes})


@asynccontextmanager
async def all_returned(executor: SimExecutor, trace: Trace) -> AsyncIterator[None]:
    """Whatever happens inside: every accepted request ends once, and the device is released last but for channels."""
    try:
        yield
    finally:
        assert not executor.is_open
        assert not executor.outputs
        accepted = [event.request_id for event in trace if isinstance(event, events.RequestAccepted)]
        assert sorted(trace.ends()) == sorted(accepted)
        if "accepting" in trace.stages():
            assert [stage for stage in trace.stages() if stage in TEARDOWN] == TEARDOWN


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


async def test_an_idle_encoder_output_is_freed_after_its_time(executor, config, trace, autojump_clock):
    async with sim_engine(executor, config=config(encoder_idle_seconds=5.0)) as engine:
        await ask(engine, 1)
        assert len(executor.outputs) == 1
        await trio.sleep(6)
        assert not executor.outputs


async def test_a_cache_for_one_output_serves_many_requests(executor, config, trace, autojump_clock):
    settings = config(encoder_cache_bytes=SimModel().encoder_bytes)
    async with all_returned(executor, trace), sim_engine(executor, config=settings) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(ask, engine, number % 4)


async def test_too_few_pages_cost_preemptions_and_no_token(config, trace, autojump_clock):
    executor = SimExecutor(SimModel(pages=16, cross_slots=6))
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(ask, engine, number, 40)
        assert engine.statistics().requests.preemptions > 0


@pytest.mark.parametrize("steps", range(0, 60, 3))
async def test_a_request_cancelled_at_any_moment_gives_everything_back(steps, executor, config, trace, autojump_clock):
    """Cancelled after so many checkpoints of its neighbours; the others get their tokens, nothing stays taken."""
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, 1, 30)
                nursery.start_soon(ask, engine, 2, 30)
                await trio.sleep(steps * 0.015)
                scope.cancel()
        await ask(engine, 2)
        await trio.sleep(1)
        statistics = engine.statistics()
        assert statistics.requests.pages_free == statistics.requests.pages
        assert statistics.requests.cross_slots_used == 0
        assert statistics.encoder_cache.held == 0
        assert statistics.encoder_cache.waiting == 0


@pytest.mark.parametrize("delay", [0.0, 0.5, 1.0, 1.05, 1.2, 1.31, 1.35, 1.4, 1.6, 2.0])
async def test_an_outer_cancellation_at_any_moment_stops_in_order(delay, executor, config, trace, autojump_clock):
    async with all_returned(executor, trace):
        with trio.move_on_after(delay) as scope:
            async with sim_engine(executor, config=config()) as engine, trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(ask, engine, number, 60)
    assert scope.cancelled_caught


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
    assert "drain deadline" not in trace.stages()


async def test_what_is_not_drained_in_time_is_aborted_and_told_so(executor, config, trace, autojump_clock):
    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with all_returned(executor, trace), trio.open_nursery() as nursery:
        async with sim_engine(executor, config=config(drain_seconds=0.1)) as engine:
            nursery.start_soon(outsider, engine)
            await trio.sleep(0.4)
    assert "drain deadline" in trace.stages()


async def test_a_failing_encode_fails_only_its_own_requests(config, trace, autojump_clock):
    broken = content_key(audio(3), "sim")

    def fault(job, argument):
        return RuntimeError("bad input") if job is Job.ENCODE and broken in {j.key for j in argument} else None

    executor = SimExecutor(fault=fault)
    async with (
        all_returned(executor, trace),
        sim_engine(executor, config=config(encode_batch_embeddings=10)) as engine,
        trio.open_nursery() as nursery,
    ):
        for number in (1, 2, 4, 5):
            nursery.start_soon(ask, engine, number)
        with pytest.raises(EncodeFailed, match="bad input"):
            await ask(engine, 3)


async def test_a_request_that_crashes_its_step_fails_alone(config, trace, autojump_clock):
    """S5: one exception in a step ends the request that causes it, nobody else."""

    def fault(job, plan):
        starts = {start.token_ids[1] for start in plan.started} if job is Job.STEP else set()
        return RuntimeError("crash") if prompt(3)[1] in starts else None

    executor = SimExecutor(fault=fault)
    async with all_returned(executor, trace), sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for number in (1, 2, 4, 5):
                nursery.start_soon(ask, engine, number)
            with pytest.raises(PoisonRequest, match="crash"):
                await ask(engine, 3)


async def test_a_free_that_fails_once_starts_the_runner_anew_and_costs_nobody_a_token(config, trace, autojump_clock):
    """The device's state is unknown then. What was computed is gone and computed again; streams show no gap."""
    frees = iter([RuntimeError("for once")])
    executor = SimExecutor(fault=lambda job, _: next(frees, None) if job is Job.FREE else None)
    async with all_returned(executor, trace):
        async with sim_engine(executor, config=config(encoder_cache_bytes=100, encoder_idle_seconds=0.1)) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, engine, number, 30)
    assert [event.generation for event in trace.of(events.RunnerRestarting)] == [1]
    assert Job.RESET in executor.calls


async def test_restarts_too_close_together_end_the_engine(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: RuntimeError("always") if job is Job.FREE else None)
    settings = {"encoder_idle_seconds": 0.1, "restarts": 2, "restart_seconds": 60.0}
    with pytest.raises(RunnerCrashed, match="always"):
        async with sim_engine(executor, config=config(**settings)) as engine:
            for number in range(9):
                await ask(engine, number)
                await trio.sleep(5)
    assert len(trace.of(events.RunnerRestarting)) == 2
    assert not executor.is_open


async def test_restarts_far_apart_are_forgiven(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: RuntimeError("always") if job is Job.FREE else None)
    settings = {"encoder_idle_seconds": 0.1, "restarts": 1, "restart_seconds": 3.0}
    async with sim_engine(executor, config=config(**settings)) as engine:
        for number in range(5):
            await ask(engine, number, 1)
            await trio.sleep(5)
    assert len(trace.of(events.RunnerRestarting)) == 5


async def test_a_device_that_is_lost_is_not_started_anew(config, trace, autojump_clock):
    """A sticky error: nothing in this process can use the device any more."""
    executor = SimExecutor(fault=lambda job, _: DeviceLost("illegal address") if job is Job.STEP else None)
    with pytest.raises(RunnerCrashed, match="illegal address"):
        async with sim_engine(executor, config=config()) as engine:
            await ask(engine, 1)
    assert not trace.of(events.RunnerRestarting)
    assert not executor.is_open


async def test_a_failing_free_stops_the_engine_and_says_so(config, trace, autojump_clock):
    """With no restarts allowed: going on would serve wrong tokens."""
    executor = SimExecutor(fault=lambda job, _: RuntimeError("sticky") if job is Job.FREE else None)
    with pytest.raises(RunnerCrashed, match="sticky"):
        async with sim_engine(executor, config=config(encoder_idle_seconds=1.0, restarts=0)) as engine:
            await ask(engine, 1)
            await trio.sleep(10)
    assert not executor.is_open
    assert trace.stages()[-2:] == ["runner stopped", "channels closed"]


async def test_requests_of_a_crashed_runner_hear_of_it(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: SystemExit("dead") if job is Job.STEP else None)

    async def outsider(engine: Engine) -> None:
        with pytest.raises(RunnerCrashed, match="dead"):
            await ask(engine, 1)

    async with trio.open_nursery() as nursery:
        with pytest.raises(RunnerCrashed, match="dead"):
            async with sim_engine(executor, config=config()) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(10)
    assert not executor.is_open


async def test_a_hung_step_does_not_block_the_way_out(config, trace, autojump_clock):
    worker = SimWorker(hangs=lambda job: job is Job.STEP)
    executor = SimExecutor()
    with pytest.raises(EngineTeardownError, match="abandoned"), trio.fail_after(60):
        async with sim_engine(executor, config=config(stage_seconds=2.0, drain_seconds=1.0), worker=worker) as engine:
            with trio.move_on_after(5):
                await ask(engine, 1)
    assert trace.stages()[-1] == "channels closed"


async def test_a_model_that_does_not_load_raises_its_own_error(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: CheckpointError("no weights") if job is Job.OPEN else None)
    with pytest.raises(CheckpointError, match="no weights"):
        async with sim_engine(executor, config=config()):
            raise AssertionError("never reached")
    assert not executor.is_open


async def test_a_release_that_fails_is_told(config, trace, autojump_clock):
    executor = SimExecutor(fault=lambda job, _: RuntimeError("stuck") if job is Job.CLOSE else None)
    with pytest.raises(EngineTeardownError, match="stuck"):
        async with sim_engine(executor, config=config()) as engine:
            await ask(engine, 1)


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


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ending", ["finished", "encode failed", "cancelled", "stream left early"])
async def test_a_request_dies_with_its_last_user_and_no_collector(
    ending, executor, config, trace, autojump_clock, no_collector
):
    """R1, R4: no reference cycle on the request's path keeps its payload alive, and neither does the runner."""

    payloads: list[weakref.ref[Samples]] = []  # the engine's own copies, seen on their way into the executor

    def watch(job: Job, argument: Any) -> Exception | None:
        if job is not Job.ENCODE:
            return None
        payloads.extend(weakref.ref(encoding.payload) for encoding in argument)
        return RuntimeError("boom") if ending == "encode failed" else None

    async def one(engine: Engine) -> None:
        request = {"prompt_token_ids": prompt(1), "audio": audio(1), "sampling": SamplingParams(max_tokens=20)}
        if ending == "stream left early":
            async with engine.stream(**request) as deltas:
                async for _ in deltas:
                    break
            return
        with trio.move_on_after(0.35 if ending == "cancelled" else math.inf):
            try:
                await engine.generate(**request)
            except EncodeFailed:
                assert ending == "encode failed"

    executor.fault = watch
    async with sim_engine(executor, config=config()) as engine:
        await one(engine)
        await trio.sleep(0.5)
        assert [payload() is None for payload in payloads] == [True]


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


async def test_after_an_actors_crash_nobody_waits_for_the_drain(executor, config, trace, autojump_clock):
    """An outsider's request hears at once that the engine stopped, not after `drain_seconds` of waiting for nothing."""

    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with trio.open_nursery() as nursery:
        with pytest.raises(RunnerCrashed, match="no such key"):
            async with sim_engine(executor, config=config(verify=False)) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(1.0)
                engine.inside.supervisor._to_encoder_cache.send_nowait(Encoded(("no such key",)))
                await trio.sleep(100)
    assert trio.current_time() < 10
    assert not executor.is_open


async def test_with_verify_a_broken_promise_stops_the_engine_and_is_named(
    executor, config, trace, monkeypatch, autojump_clock
):
    """E2 the other way round: bytes that are given back twice, so that there is room for more than there is room for.
    The request that runs hears at once; the device is given back all the same."""
    monkeypatch.setattr(EncoderLedger, "taken", property(lambda _: 0, lambda *_: None))

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


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_running": "8"}, "max_running='8'.*integer"),
        ({"page_size": 2.5}, "page_size=2.5.*integer"),
        ({"drain_seconds": -1}, "drain_seconds=-1.*0 or more"),
        ({"device": None}, "device=None"),
        ({"dtype": "int8"}, "dtype='int8'.*float32"),
        ({"steps_in_flight": 3}, "1 or 2"),
    ],
)
def test_a_setting_out_of_its_range_is_refused(settings, says):
    with pytest.raises(InvalidRequest, match=says):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"max_tokens": 2.5}, "max_tokens=2.5.*integer"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": 2.5}, "top_k=2.5.*integer"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": "hot"}, "temperature='hot'.*number"),
        ({"seed": None}, "seed=None"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
    ],
)
def test_a_sampling_parameter_out_of_its_range_is_refused(params, says):
    with pytest.raises(InvalidRequest, match=says):
        SamplingParams(**params)


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


async def test_an_error_of_the_teardown_is_not_lost_behind_a_cancellation(config, trace, autojump_clock):
    """The body's group of nothing but `Cancelled` counts as one: the outer scope would swallow our error with it."""
    executor = SimExecutor(fault=lambda job, _: RuntimeError("stuck") if job is Job.CLOSE else None)
    with pytest.raises(EngineTeardownError, match="stuck"):
        with trio.move_on_after(2):
            async with sim_engine(executor, config=config()), trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)


async def test_an_observer_that_raises_does_not_stop_the_way_out(executor, autojump_clock):
    def observer(event: events.Event) -> None:
        if isinstance(event, events.StageReached) and event.stage == "intake closed":
            raise ValueError("observer")

    with pytest.raises(RunnerCrashed, match="observer"), trio.fail_after(60):
        async with sim_engine(executor, config=EngineConfig(observer=observer, verify=True)):
            pass
    assert not executor.is_open


async def test_entering_while_cancelled_loads_nothing(executor, config, trace, autojump_clock):
    with trio.CancelScope() as scope:
        scope.cancel()
        async with sim_engine(executor, config=config()):
            raise AssertionError("never reached")
    assert executor.calls == []


async def test_a_kept_encode_error_keeps_no_payload(executor, config, trace, autojump_clock, no_collector):
    """R5: the error's traceback goes through frames that held the whole batch."""
    payloads: list[weakref.ref[Samples]] = []

    def fault(job: Job, argument: Any) -> Exception | None:
        if job is not Job.ENCODE:
            return None
        payloads.extend(weakref.ref(encoding.payload) for encoding in argument)
        return RuntimeError("boom")

    executor.fault = fault
    kept: list[Exception] = []

    async def fail(engine: Engine, number: int) -> None:
        try:
            await ask(engine, number)
        except EncodeFailed as error:
            error.__traceback__ = None  # the caller's own frames are the caller's business
            kept.append(error)

    async with sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(fail, engine, number)
        assert len(kept) == 4
        assert len(payloads) == 4 + 4 + 4  # all together, in halves, alone
        assert all(payload() is None for payload in payloads)


@pytest.mark.parametrize("hung", [Job.OPEN, Job.STEP])
def test_an_abandoned_call_that_returns_late_harms_nobody(hung):
    """The real worker: the call returns after the engine has gone; the program's loop goes on, the device is freed."""
    release, closed = threading.Event(), threading.Event()

    def fault(job: Job, _: object) -> None:
        if job is hung:
            release.wait(30)
        if job is Job.CLOSE:
            closed.set()

    async def main() -> None:
        executor = SimExecutor(fault=fault)
        engine = Engine.from_parts(
            lambda: executor, ThreadWorker, config=EngineConfig(verify=True, stage_seconds=0.05, drain_seconds=0.05)
        )
        with contextlib.suppress(EngineTeardownError), trio.move_on_after(0.2):
            async with engine:
                await ask(engine, 1)
        release.set()
        assert await trio.to_thread.run_sync(closed.wait, 30)
        await trio.sleep(0.01)

    trio.run(main)
