"""Faults that meet: one is under way when the next one comes. The sweep has one fault a run; these have many."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import trio
from click.testing import CliRunner
from hypothesis import given, settings

from triolet import (
    EngineAsleep,
    EngineConfig,
    EngineTeardownError,
    RunnerCrashed,
    SamplingParams,
    TrioletError,
)
from triolet.actors.worker import Job
from triolet.core.power import Power
from triolet_testing import chaos
from triolet_testing.chaos import main, play
from triolet_testing.clients import audio
from triolet_testing.sim import SECONDS, SimExecutor, SimWorker, sim_engine
from triolet_testing.sim_model import SimModel

from .shared import ask


@settings(max_examples=settings.default.max_examples * 3 // 8)
@given(seed=st.integers(0, 10**9))
def test_whatever_meets_nobody_hangs_and_no_token_is_wrong(seed: int):
    outcome = play(seed)
    assert outcome.broken is None, outcome.error


def test_the_program_tells_how_many_runs_and_what_broke():
    told = CliRunner().invoke(main, ["--runs", "3"])
    assert (told.exit_code, "3 runs, " in told.output) == (0, True), told.output
    assert "0 hangs, 0 violations, 0 wrong tokens, 0 other errors" in told.output


def test_many_runs_that_never_come_into_a_situation_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chaos, "LONG", 3)
    told = CliRunner().invoke(main, ["--runs", "3"])
    assert (told.exit_code, "    NEVER a request is poison" in told.output) == (1, True), told.output


# -- what was found in this way --------------------------------------------------------------------------------------


def once(**errors: Exception) -> Callable[[Job, object], Exception | None]:
    """A fault for the first call of each job that is named."""
    return lambda job, _: errors.pop(job.value, None)


async def test_a_sleep_that_fails_behind_a_free_that_failed(autojump_clock):
    """The runner starts anew while the order to sleep is under way, and that fails too: nobody goes back to an older
    generation, whose messages the runner would drop for ever."""
    executor = SimExecutor(SimModel(cross_slots=1), fault=once(free=RuntimeError("free"), sleep=MemoryError("no room")))
    worker = SimWorker(seconds={**SimWorker().seconds, Job.FREE: 0.5})
    config = EngineConfig(encoder_idle_seconds=0.1, verify=True)
    async with sim_engine(executor, config=config, worker=worker) as engine:
        await ask(engine, 1, 3)
        await trio.sleep(0.2)
        assert Job.FREE not in executor.calls, "the free must be under way"
        with pytest.raises(TrioletError, match="no room"):
            await engine.sleep()
        assert engine.statistics().power is Power.AWAKE
        with trio.fail_after(10):
            await ask(engine, 2, 3)


async def test_a_runner_that_dies_and_whose_release_fails_is_told(autojump_clock):
    """An exit on the worker, and a release that raises behind it."""
    faults = {Job.STEP: SystemExit(3), Job.CLOSE: RuntimeError("a release")}
    executor = SimExecutor(fault=lambda job, _: faults.get(job))
    with pytest.raises(RunnerCrashed, match="SystemExit") as caught, trio.fail_after(100):
        async with sim_engine(executor, config=EngineConfig(verify=True)) as engine:
            await ask(engine, 1)
    assert "a release" in str(getattr(caught.value.__cause__, "__notes__", ""))


@pytest.mark.parametrize(("fits", "length"), [(1, 60), (4, 60)])
async def test_a_long_prompt_gets_through_a_device_that_fits_few_tokens(fits, length, autojump_clock):
    """Steps that grow again and fail must not send it back for ever: it needs more steps than the first patience."""
    executor = SimExecutor(
        SimModel(max_positions=200, pages=200),
        fault=lambda job, plan: MemoryError("full") if job is Job.STEP and plan.tokens > fits else None,
    )
    with trio.fail_after(100):
        config = EngineConfig(verify=True, prefix_caching=False)  # else it would start anew where it was
        async with sim_engine(executor, config=config) as engine:
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            done = await engine.generate(prompt_token_ids=[1] * length, audio=audio(1), sampling=sampling)
    assert len(done.token_ids) == 100


async def test_a_request_that_comes_while_it_wakes_is_refused_where_that_is_asked_for(autojump_clock):
    """Whether the device can be taken is not known yet: nobody is accepted who might wait for ever."""
    executor = SimExecutor(fault=once(wake=MemoryError("taken")))
    async with sim_engine(executor, config=EngineConfig(while_asleep="refuse")) as engine:
        await engine.sleep()
        async with trio.open_nursery() as nursery:

            async def wake() -> None:
                with pytest.raises(EngineAsleep, match="taken"):
                    await engine.wake()

            nursery.start_soon(wake)
            await trio.sleep(0.1)
            with trio.fail_after(10), pytest.raises(EngineAsleep, match=r"engine\.wake\(\)"):
                await ask(engine, 1)
        await engine.wake()
        await ask(engine, 1)


async def test_a_request_that_has_ended_holds_no_place_though_nobody_reads_it(autojump_clock):
    async with sim_engine(SimExecutor(), config=EngineConfig(max_pending=1)) as engine:
        async with engine.stream(prompt_token_ids=[1], audio=audio(1), sampling=SamplingParams(max_tokens=2)):
            await trio.sleep(10)
            with trio.fail_after(10):
                await ask(engine, 2)


async def test_bytes_that_outlive_the_release_are_told(autojump_clock):
    """Somebody else keeps a tensor of the engine's: `close` did its part, and the block says who is left."""

    class Kept(SimExecutor):
        def memory(self):
            held = super().memory()
            return held if self.is_open else type(held)(device="sim", by_owner={"self_kv": 77})

    with pytest.raises(EngineTeardownError, match=r"still holds tensors of the engine.*'self_kv': 77"):
        async with sim_engine(Kept()):
            pass


@pytest.mark.parametrize("after", [0.1, 0.6, 2.0])
async def test_an_error_beside_an_engine_ends_the_block_that_it_leaves_and_no_coroutine(
    executor, autojump_clock, after
):
    """The task that leaves its nursery waits there, in a frame of the error that the cancellations of the engine's
    tasks have for a context. The engine opens, restarts its device, or serves."""
    executor.fault = once(step=RuntimeError("sticky"))
    was_told: list[Exception] = []

    async def use() -> None:
        async with sim_engine(executor, worker=SimWorker(seconds={**SECONDS, Job.OPEN: 0.4})) as engine:
            while True:
                await ask(engine, 1)

    begun = trio.current_time()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(use)
            await trio.sleep(after)
            raise LookupError("the program's own")
    except* LookupError as group:
        was_told += group.exceptions
    await trio.sleep(1)
    assert [str(one) for one in was_told] == ["the program's own"]
    assert trio.current_time() - begun >= after + 1
