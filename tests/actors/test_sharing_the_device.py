"""Encode launches and steps share the device by time, not by turns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from triolet import Engine, EngineError, SamplingParams
from triolet.actors.worker import Job
from triolet.core.share import STEPS_PER_ENCODE, TimeShare
from triolet_testing.sim import SECONDS, SimExecutor, SimWorker, sim_engine
from triolet_testing.sim_model import SimModel

from .shared import audio, prompt

LAUNCH, STEP = 1.0, 0.02  # seconds
SETTINGS = {"encode_batch_embeddings": 10}  # one clip a launch


class Timed:
    """Remembers when calls of the device ended."""

    def __init__(self, fails: Sequence[Job] = ()) -> None:
        self.fails = list(fails)  # once each
        self.ends: list[tuple[Job, float]] = []
        model = SimModel(max_positions=800, pages=2000, vocabulary_size=20_000, cross_slots=16)
        self.executor = SimExecutor(model, fault=self.tell)
        self.worker = SimWorker(duration=lambda job, _: {**SECONDS, Job.ENCODE: LAUNCH, Job.STEP: STEP}[job])

    def tell(self, job: Job, _: object) -> Exception | None:
        self.ends.append((job, trio.current_time()))
        if job not in self.fails:
            return None
        self.fails.remove(job)
        return MemoryError("no room")

    def of(self, job: Job) -> list[float]:
        return [at for kind, at in self.ends if kind is job]


async def ask(engine: Engine, number: int, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens)
    await engine.generate(prompt_token_ids=prompt(number), audio=audio(number), sampling=sampling)


async def test_a_stream_decodes_between_two_encode_launches(config, trace, autojump_clock):
    """It never stands still for more than one launch, and the launches have their share all the same."""
    device = Timed()
    async with sim_engine(device.executor, config=config(**SETTINGS), worker=device.worker) as engine:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine, 0, 600)
            await trio.sleep(2.0)
            for number in range(1, 6):
                nursery.start_soon(ask, engine, number, 2)
    assert max(later - one for one, later in pairwise(device.of(Job.STEP))) < LAUNCH + 3 * STEP
    launches = device.of(Job.ENCODE)[1:]
    assert len(launches) == 5
    steps = [sum(one < at < later for at in device.of(Job.STEP)) for one, later in pairwise(launches)]
    assert min(steps) >= STEPS_PER_ENCODE * LAUNCH / STEP - 3, "the steps have their share"
    assert launches[-1] - launches[0] < 4 * ((1 + STEPS_PER_ENCODE) * LAUNCH + 3 * STEP), "the launches have theirs"


async def test_encodes_wait_for_nobody_where_nothing_decodes(config, trace, autojump_clock):
    """Steps that are idle give their share away at once."""
    device = Timed()
    with trio.fail_after(60):
        async with sim_engine(device.executor, config=config(**SETTINGS), worker=device.worker) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(ask, engine, number, 1)
    launches = device.of(Job.ENCODE)
    assert max(later - one for one, later in pairwise(launches)) < LAUNCH + 3 * STEP


@pytest.mark.parametrize("fails", [False, True])
async def test_a_batch_that_waits_its_turn_does_not_outlive_a_sleep(fails, config, trace, autojump_clock):
    """It is dropped and asked for again, and also where the device could not be given back."""
    device = Timed(fails=[Job.SLEEP] if fails else [])
    with trio.fail_after(60):
        async with sim_engine(device.executor, config=config(**SETTINGS), worker=device.worker) as engine:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, 0, 300)
                await trio.sleep(1.1)
                nursery.start_soon(ask, engine, 1, 2)
                await trio.sleep(0.2)
                assert device.of(Job.ENCODE) == device.of(Job.ENCODE)[:1], "the other batch waits"
                with pytest.raises(EngineError) if fails else nullcontext():
                    await engine.sleep()
                await engine.wake()
    assert not device.executor.misuses, "the device was misused"


def test_a_launch_is_counted_from_the_end_of_the_call_before_it():
    """It is sent while a step runs: what it waited is no time of its own."""
    share = TimeShare(weight=0.5)
    share.encode_sent(10.0)
    share.step_ended(14.0)
    share.encode_ended(15.0)
    assert share.steps_turn(15.4)
    assert not share.steps_turn(15.5)


@given(
    st.lists(st.tuples(st.floats(0.001, 5.0), st.floats(0.001, 2.0), st.floats(0.0, 10.0)), min_size=1, max_size=20),
    st.floats(0.1, 4.0),
)
def test_no_lane_starves_and_none_banks_what_it_left_unused(rounds, weight):
    """Whatever launches and steps last: after a launch of t seconds steps have ``weight * t``, and then no more than
    the one that runs; a pause gives nobody more than that."""
    share, now = TimeShare(weight=weight), 0.0
    for launch, step, pause in rounds:
        share.encode_sent(now)
        now += launch
        share.encode_ended(now)
        begun = now
        while share.steps_turn(now):
            now += step
            share.step_ended(now)
        assert now - begun >= weight * launch - 1e-6
        assert now - begun <= weight * launch + step + 1e-6
        now += pause
        assert not share.steps_turn(now)
