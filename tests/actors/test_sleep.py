"""Sleep: the device is given back, nobody loses a token, and nothing but a wish takes it again."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given, settings

from triolet import (
    DeviceLost,
    Engine,
    EngineAsleep,
    EngineClosed,
    EngineConfig,
    EngineError,
    EngineStateError,
    RunnerCrashed,
)
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.power import Power
from triolet_testing.clients import Client, Scenario
from triolet_testing.sim import SimExecutor, SimWorker, sim_engine
from triolet_testing.simulation import simulate
from triolet_testing.trio_tools.schedules import Uniform, run_scheduled

from ..heap import assert_none, garbage
from ..heap import expected as expected_error
from .shared import ask


@pytest.mark.parametrize(("keeps", "held"), [(True, {"parked_weights": 1000}), (False, {})])
async def test_asleep_the_device_holds_nothing_but_parked_weights(keeps, held, executor, config, autojump_clock):
    async with sim_engine(executor, config=config(sleep_keeps_weights=keeps)) as engine:
        await ask(engine, 1)
        await engine.sleep()
        books = engine.statistics()
        assert (books.power, books.device.by_owner, books.encoder_cache.taken) == (Power.ASLEEP, held, 0)
        await engine.wake()
        assert engine.statistics().power is Power.AWAKE
        await ask(engine, 1)
    assert not executor.is_open
    assert executor.calls.count(Job.ENCODE) == 2  # the output did not survive


async def test_an_idle_engine_dozes_and_the_next_request_wakes_it(executor, config, trace, autojump_clock):
    async with sim_engine(executor, config=config(idle_sleep=5.0, while_asleep="refuse")) as engine:
        await ask(engine, 1)
        await trio.sleep(4.9)
        assert not executor.is_asleep
        await ask(engine, 2)
        await trio.sleep(5.1)
        assert executor.is_asleep
        await ask(engine, 1)
        await trio.sleep(4.9)
        assert not executor.is_asleep
    assert sum(isinstance(event, events.RunnerAwake) for event in trace) == 1


async def test_a_running_request_is_no_idleness(executor, config, autojump_clock):
    slow = SimWorker(seconds={**SimWorker().seconds, Job.STEP: 3.0})
    async with sim_engine(executor, config=config(idle_sleep=1.0), worker=slow) as engine:
        await ask(engine, 1)
        assert Job.SLEEP not in executor.calls


async def test_a_doze_that_was_ordered_on_ends_by_order_alone(executor, config, autojump_clock):
    async with sim_engine(executor, config=config(idle_sleep=1.0)) as engine, trio.open_nursery() as nursery:
        await trio.sleep(2)
        assert executor.is_asleep
        await engine.sleep()
        nursery.start_soon(ask, engine, 1)
        await trio.sleep(50)
        assert executor.is_asleep
        await engine.wake()


async def test_a_device_that_cannot_be_taken_again_is_asked_again(config, autojump_clock):
    """Ordered: who orders it hears why, the others wait on."""
    fails = [MemoryError("taken by somebody else")]
    executor = SimExecutor(fault=lambda job, _: fails.pop() if job is Job.WAKE and fails else None)
    async with sim_engine(executor, config=config()) as engine, trio.open_nursery() as nursery:
        await engine.sleep()
        nursery.start_soon(ask, engine, 1)
        with pytest.raises(EngineAsleep, match="taken by somebody else") as caught:
            await engine.wake()
        assert isinstance(caught.value.__cause__, MemoryError)
        await trio.sleep(10)
        assert engine.statistics().requests.waiting == 1
        await engine.wake()


async def test_requests_that_cannot_wake_the_engine_hear_why_and_the_next_one_may(config, autojump_clock):
    fails = [MemoryError("taken by somebody else")]
    executor = SimExecutor(fault=lambda job, _: fails.pop() if job is Job.WAKE and fails else None)
    errors: list[EngineAsleep] = []

    async def refused(number: int) -> None:
        with pytest.raises(EngineAsleep, match="taken by somebody else") as caught:
            await ask(engine, number)
        errors.append(caught.value)

    async with sim_engine(executor, config=config(idle_sleep=1.0)) as engine:
        await trio.sleep(2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, 1)
            nursery.start_soon(refused, 2)
        assert errors[0] is not errors[1], "two tasks must not raise the same object"
        await ask(engine, 1)


async def test_the_last_order_counts(executor, config, autojump_clock):
    outcomes: dict[str, str] = {}

    async def order(name: str, what: Callable[[], object]) -> None:
        try:
            await what()
            outcomes[name] = "done"
        except EngineStateError as error:
            outcomes[name] = str(error)

    async with sim_engine(executor, config=config()) as engine:
        async with trio.open_nursery() as nursery:
            for name, what in (("sleep", engine.sleep), ("wake", engine.wake), ("sleep again", engine.sleep)):
                nursery.start_soon(order, name, what)
                await trio.testing.wait_all_tasks_blocked()
        assert executor.is_asleep
        assert outcomes["sleep"] == outcomes["sleep again"] == "done"
        assert "put to sleep again" in outcomes["wake"]
        async with trio.open_nursery() as nursery:
            for name, what in (("wake", engine.wake), ("sleep", engine.sleep), ("wake again", engine.wake)):
                nursery.start_soon(order, name, what)
                await trio.testing.wait_all_tasks_blocked()
        assert not executor.is_asleep
        assert outcomes["wake"] == outcomes["wake again"] == "done"
        assert "woken before" in outcomes["sleep"]


async def test_orders_for_what_is_so_already_return_at_once(executor, config, autojump_clock):
    async with sim_engine(executor, config=config()) as engine:
        begun = trio.current_time()
        await engine.wake()
        assert trio.current_time() == begun
        await engine.sleep()
        begun = trio.current_time()
        await engine.sleep()
        assert trio.current_time() == begun


async def test_leaving_asleep_does_not_wait_for_a_drain_that_cannot_be(executor, config, trace, autojump_clock):
    """Requests that wait for a wake hear at once that none comes."""
    async with trio.open_nursery() as outside:

        async def closed() -> None:
            with pytest.raises(EngineClosed):
                await ask(engine, 1)

        async with sim_engine(executor, config=config(drain_seconds=1000)) as engine:
            await engine.sleep()
            outside.start_soon(closed)
            await trio.sleep(1)
            begun = trio.current_time()
        assert trio.current_time() - begun < 1
    assert not executor.is_open
    assert "drain deadline" not in [e.stage for e in trace if isinstance(e, events.StageReached)]


async def test_leaving_while_it_falls_asleep_or_wakes_answers_the_order(executor, config, autojump_clock):
    async def closed(what: Callable[[], object]) -> None:
        with pytest.raises(EngineClosed):
            await what()

    for asleep in (False, True):
        async with trio.open_nursery() as outside:
            async with sim_engine(executor, config=config()) as engine:
                if asleep:
                    await engine.sleep()
                outside.start_soon(closed, engine.wake if asleep else engine.sleep)
                await trio.testing.wait_all_tasks_blocked()
        assert not executor.is_open
        with pytest.raises(EngineStateError):
            await engine.sleep()


async def test_from_the_order_to_sleep_on_no_step_is_begun(executor, config, trace, autojump_clock):
    async with sim_engine(executor, config=config()) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine, 1)
        await trio.sleep(0.335)
        nursery.start_soon(engine.sleep)
        await trio.testing.wait_all_tasks_blocked()
        told = len(trace)
        await trio.sleep(10)
        begun = [event for event in trace[told:] if isinstance(event, events.StepBegun)]
        assert not begun, f"StepBegun after the order to sleep: {begun}"
        await engine.wake()


async def test_what_waits_for_the_device_does_not_outlive_it(executor, config, autojump_clock):
    """An output is to be freed, and waits for the batch that is being encoded when the order to sleep comes."""
    async with sim_engine(executor, config=config(encoder_idle_seconds=0.1)) as engine, trio.open_nursery() as nursery:
        await ask(engine, 1, 1)
        nursery.start_soon(ask, engine, 2)
        await trio.sleep(0.2)
        assert executor.outputs, "it is freed already"
        await engine.sleep()
        await engine.wake()
    assert not executor.misuses, f"misused: {executor.misuses}"


def stuck() -> ExceptionGroup:
    """A release that has failed."""
    release = RuntimeError("boom")
    release.add_note("while releasing 'cross_kv'")
    return ExceptionGroup("some resources could not be released", [release])


@pytest.mark.parametrize(
    ("error", "told"),
    [(stuck(), "while releasing 'cross_kv': RuntimeError: boom"), (DeviceLost("an illegal address"), "an illegal")],
)
async def test_a_release_that_fails_on_the_way_to_sleep_ends_the_engine(error, told, config, autojump_clock):
    """Nobody knows what the device still holds: no restart may go on from there."""
    executor = SimExecutor(fault=lambda job, _: error if job is Job.SLEEP else None)
    with pytest.raises(RunnerCrashed, match=told):
        async with sim_engine(executor, config=config()) as engine:
            with trio.CancelScope(shield=True), pytest.raises(EngineClosed):
                await engine.sleep()
            await trio.sleep_forever()
    assert Job.RESET not in executor.calls
    assert not executor.is_open


async def test_weights_that_find_no_room_on_the_host_leave_the_engine_awake(config, autojump_clock):
    """Who ordered it hears why; running requests lose no token."""
    fails = [MemoryError("no room")]
    executor = SimExecutor(fault=lambda job, _: fails.pop() if job is Job.SLEEP and fails else None)
    async with sim_engine(executor, config=config()) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(ask, engine, 1)
        await trio.sleep(0.4)
        with pytest.raises(EngineError, match=r"still held.*no room"):
            await engine.sleep()
        fails.append(MemoryError("still none"))
        with garbage() as found:
            with expected_error(EngineError):
                await engine.sleep()
        assert_none(found)
        assert engine.statistics().power is Power.AWAKE
        await ask(engine, 2)
        await engine.sleep()
        assert executor.is_asleep
        await engine.wake()


async def test_a_caller_that_leaves_its_order_does_not_withdraw_it(executor, config, autojump_clock):
    async with sim_engine(executor, config=config()) as engine:
        with trio.move_on_after(0.01):
            await engine.sleep()
        await trio.sleep(1)
        assert executor.is_asleep
        await engine.wake()


@settings(max_examples=60)
@given(
    naps=st.lists(st.integers(1, 120), min_size=1, max_size=6),
    arrivals=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    idle=st.sampled_from([0.05, 0.3, 1e9]),
    seed=st.integers(0, 10**6),
)
def test_whenever_it_sleeps_everybody_gets_their_tokens(naps, arrivals, idle, seed):
    """Any times of sleeping and waking, by order and for want of work; the last order is one to wake."""
    times = [sum(naps[: number + 1]) / 50 for number in range(len(naps))]
    if len(times) % 2:
        times.append(times[-1] + 0.3)
    clients = tuple(Client(audio=n % 2, arrives=at / 50, max_tokens=4) for n, at in enumerate(arrivals))
    scenario = Scenario(name="naps", clients=clients, naps=tuple(times), config={"idle_sleep": idle})
    assert set(simulate(scenario, Uniform(seed)).ends) == {"finished"}


def test_orders_of_many_tasks_are_all_answered():
    """Nobody waits for ever, whatever the schedule."""

    async def main() -> None:
        async with sim_engine(SimExecutor(), config=EngineConfig(verify=True)) as engine:
            async with trio.open_nursery() as nursery:
                for number in range(12):
                    nursery.start_soon(_obey, engine, number)
            await engine.wake()

    for seed in range(20):
        run_scheduled(main, schedule=Uniform(seed))


async def _obey(engine: Engine, number: int) -> None:
    try:
        await (engine.sleep() if number % 2 else engine.wake())
    except EngineStateError as error:
        assert "before it" in str(error)  # noqa: PT017
