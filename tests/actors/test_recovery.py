"""The real supervisor and actors over a device that fails: what goes on, what ends, and what is told."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from typing import Any

import pytest
import trio

from triolet import (
    DeviceLost,
    EncodeFailed,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineTeardownError,
    PoisonRequest,
    RunnerCrashed,
    SamplingParams,
)
from triolet.actors.messages import Encoded
from triolet.actors.worker import Job, ThreadWorker
from triolet.api.inputs.audio import Samples
from triolet.core import events
from triolet_testing.sim import SimExecutor, SimWorker, sim_engine
from triolet_testing.sim_model import SimModel

from .shared import all_returned, ask, audio, prompt


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


@pytest.mark.parametrize("error", [DeviceLost("dead"), SystemExit("dead")])
async def test_requests_of_a_crashed_runner_hear_of_it_and_nothing_is_waited_for(error, config, trace, autojump_clock):
    """The device's error is sticky, so that no restart can help. What the runner owed is not waited for."""
    executor = SimExecutor(fault=lambda job, _: error if job is Job.STEP else None)

    async def outsider(engine: Engine) -> None:
        with pytest.raises(RunnerCrashed, match="dead"):
            await ask(engine, 1)

    async with trio.open_nursery() as nursery:
        with pytest.raises(RunnerCrashed, match="dead"):
            async with sim_engine(executor, config=config()) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(10)
    assert not trace.of(events.RunnerRestarting)
    assert not [stage for stage in trace.stages() if stage.endswith("cut off")]
    assert not executor.is_open


async def test_a_hung_step_does_not_block_the_way_out(config, trace, autojump_clock):
    worker = SimWorker(hangs=lambda job: job is Job.STEP)
    executor = SimExecutor()
    with pytest.raises(EngineTeardownError, match="abandoned"), trio.fail_after(60):
        async with sim_engine(executor, config=config(stage_seconds=2.0, drain_seconds=1.0), worker=worker) as engine:
            with trio.move_on_after(5):
                await ask(engine, 1)
    assert trace.stages()[-1] == "channels closed"


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
                engine.inside.backend._to_encoder_cache.send_nowait(Encoded(("no such key",)))
                await trio.sleep(100)
    assert trio.current_time() < 10
    assert not executor.is_open


async def test_an_error_of_the_teardown_is_not_lost_behind_a_cancellation(config, trace, autojump_clock):
    """The body's group of nothing but `Cancelled` counts as one: the outer scope would swallow our error with it."""
    executor = SimExecutor(fault=lambda job, _: RuntimeError("stuck") if job is Job.CLOSE else None)
    with pytest.raises(EngineTeardownError, match="stuck"):
        with trio.move_on_after(2):
            async with sim_engine(executor, config=config()), trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)


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
        assert len(payloads) == 4 + 4 + 4 + 4  # all together, in halves, alone, and alone once more
        assert all(payload() is None for payload in payloads)


@pytest.mark.real_time
@pytest.mark.parametrize("hung", [Job.OPEN, Job.STEP])
def test_an_abandoned_call_that_returns_late_harms_nobody(hung):
    """The real worker: the call returns after the engine has gone; the program's loop goes on, the device is freed."""
    begun, release, closed = threading.Event(), threading.Event(), threading.Event()

    def fault(job: Job, _: object) -> None:
        if job is hung:
            begun.set()
            release.wait()
        if job is Job.CLOSE:
            closed.set()

    async def leave(scope: trio.CancelScope) -> None:
        await trio.to_thread.run_sync(begun.wait)
        scope.cancel()

    async def main() -> None:
        executor = SimExecutor(fault=fault)
        engine = Engine.from_parts(
            lambda: executor, ThreadWorker, config=EngineConfig(verify=True, stage_seconds=0.05, drain_seconds=0.05)
        )
        async with trio.open_nursery() as nursery:
            with contextlib.suppress(EngineTeardownError), trio.CancelScope() as scope:
                nursery.start_soon(leave, scope)
                async with engine:
                    await ask(engine, 1)
        release.set()
        for thread in threading.enumerate():
            if thread.name == "triolet-runner":
                await trio.to_thread.run_sync(thread.join)
        told = trio.Event()
        trio.lowlevel.current_trio_token().run_sync_soon(told.set)  # behind what the thread has sent
        await told.wait()
        assert closed.is_set()

    trio.run(main)


async def test_one_failure_with_a_step_in_flight_behind_it_accuses_once(config, autojump_clock):
    """The step behind it is skipped: no second crash. On a device that has long gone well, two would be proof."""
    calls = itertools.count()
    executor = SimExecutor(
        SimModel(max_positions=300, pages=300),
        fault=lambda job, _: RuntimeError("for once") if job is Job.STEP and next(calls) == 100 else None,
    )
    async with sim_engine(executor, config=config()) as engine:
        sampling = SamplingParams(max_tokens=150, ignore_eos=True)
        done = await engine.generate(prompt_token_ids=prompt(1), audio=audio(1), sampling=sampling)
    assert len(done.token_ids) == 150
