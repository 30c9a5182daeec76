"""Smaller promises of the engine, each under its own name."""

from __future__ import annotations

import math
from itertools import accumulate
from types import SimpleNamespace

import pytest
import trio
import trio.testing

from triolet import (
    Engine,
    EngineClosed,
    EngineConfig,
    EngineTeardownError,
    InvariantViolation,
    RunnerCrashed,
)
from triolet.actors.messages import Failed, OrderPower, Submit
from triolet.actors.supervisor import Supervisor, leaving
from triolet.core import events
from triolet.core.ledger import EncoderLedger
from triolet.core.planning.planner import Planner
from triolet.core.power import Order
from triolet.core.request import EncoderItem, Request
from triolet.core.trace import TraceChecker
from triolet_testing.clients import SCENARIOS
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.simulation import Outcome, simulate
from triolet_testing.trio_tools.schedules import Batches, Pct, Schedule, Uniform, run_scheduled

from .shared import Reader, ask

SCHEDULES: tuple[Schedule, ...] = (Batches(), Uniform(1), Pct(1), Pct(2))


def test_one_encode_batch_is_in_flight_and_two_steps_are_while_requests_decode():
    """What arrives meanwhile makes the next batch. The device never waits for Python, but for a sequence with draft
    tokens, whose next step depends on which of them were accepted."""
    for scenario in SCENARIOS.values():
        for schedule in SCHEDULES:
            outcome = simulate(scenario, schedule)
            batches = most_at_once(outcome, events.EncodeDispatched, (events.EncodeDone, events.EncodeBroke))
            assert batches <= 1, f"{batches} encode batches at once in {scenario.name!r}"
            if set(outcome.ends) <= {"left", scenario.refusal} or "speculation" in scenario.config:
                continue
            steps = most_at_once(outcome, events.StepBegun, (events.StepEnded,))
            assert steps == scenario.config.get("steps_in_flight", 2), f"{steps} steps at once in {scenario.name!r}"


def most_at_once(outcome: Outcome, begins: type[events.Event], ends: tuple[type[events.Event], ...]) -> int:
    """Most ``begins`` that were not ended by one of ``ends`` yet."""
    return max(accumulate(isinstance(event, begins) - isinstance(event, ends) for event in outcome.trace), default=0)


async def test_an_idle_output_is_kept_for_its_idle_time(autojump_clock):
    executor = SimExecutor()
    async with sim_engine(executor, config=EngineConfig(encoder_idle_seconds=5.0)) as engine:
        await trio.sleep(20)
        await ask(engine, 1)
        await trio.sleep(4)
        assert executor.outputs, "an idle output is freed before its time"
        await trio.sleep(2)
        assert not executor.outputs, "an idle output outlives its time"


async def test_a_more_patient_stop_does_not_prolong_an_impatient_one(autojump_clock):
    async def outsider(engine: Engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with trio.open_nursery() as nursery:
        async with sim_engine(SimExecutor(), config=EngineConfig(drain_seconds=math.inf)) as engine:
            nursery.start_soon(outsider, engine)
            await trio.sleep(0.4)
            nursery.start_soon(engine.aclose, 0.1)
            await trio.sleep(0.05)
            begun = trio.current_time()
            await engine.aclose(30.0)
            assert trio.current_time() - begun < 0.5, "the earlier deadline holds"


async def test_an_abort_after_the_end_is_no_error(autojump_clock):
    """`Supervisor.abort` never raises: it is called while leaving, also long after the engine has gone. Then nobody is
    told of it."""
    told: list[events.Event] = []
    async with sim_engine(SimExecutor(), config=EngineConfig(observer=told.append)) as engine:
        supervisor = engine.inside.backend
    assert told[-1] == events.StageReached("channels closed"), "the engine has gone"
    before = len(told)
    supervisor.abort("no such request")
    await trio.testing.wait_all_tasks_blocked()
    assert told[before:] == [], "somebody was told of an abort after the end"


async def test_messages_behind_the_one_that_breaks_the_scheduler_are_answered(autojump_clock):
    """They were taken from the inbox together; their clients, in tasks outside the block, must not wait for ever."""
    submit = Planner.submit

    def breaking(self: Planner, request: Request) -> None:
        if request.id == "breaks":
            raise ZeroDivisionError("planted")
        submit(self, request)

    readers = {name: Reader() for name in ("before", "breaks", "behind", "last")}
    ordered: list[Exception | None] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RunnerCrashed, match="planted"):
        patch.setattr(Planner, "submit", breaking)
        async with sim_engine(SimExecutor(), config=EngineConfig(verify=True)) as engine:
            for name, reader in readers.items():  # without a checkpoint, so that they are read together
                request = Request(id=name, prompt_token_ids=(1,), max_tokens=5)
                engine.inside.backend._to_scheduler.send_nowait(Submit(request, reader))
            engine.inside.backend._to_scheduler.send_nowait(
                OrderPower(Order.SLEEP, SimpleNamespace(put=ordered.append))
            )
            await trio.sleep_forever()
    for name, reader in readers.items():
        assert isinstance(reader.told, Failed), f"{name} waits for ever"
        assert isinstance(reader.told.error, EngineClosed)
    assert [type(error) for error in ordered] == [EngineClosed], "who ordered sleep waits for ever"


def every_ask_is_heard_twice(monkeypatch) -> None:
    """Breaks "every acquire is answered" as soon as a request asks: the checker hears every ask twice."""
    wanted = TraceChecker.__call__

    def twice(checker: TraceChecker, event: events.Event) -> None:
        wanted(checker, event)
        if isinstance(event, events.EntryAcquired):
            wanted(checker, event)

    monkeypatch.setattr(TraceChecker, "__call__", twice)


@pytest.mark.parametrize("raises", [True, False])
def test_a_broken_promise_ends_the_block_before_all_else_and_the_observer_hears_the_end(monkeypatch, raises):
    """The body's error may well come of it; it is the violation's cause. Monitoring does not go blind."""
    every_ask_is_heard_twice(monkeypatch)
    trace: list[events.Event] = []

    async def main() -> None:
        async with sim_engine(SimExecutor(), config=EngineConfig(verify=True, observer=trace.append)) as engine:
            with trio.CancelScope(shield=True), pytest.raises(EngineClosed):
                await ask(engine, 1)
            if raises:
                raise ValueError("the body's own")
            await trio.sleep(60)
            raise TimeoutError("nobody woke it")

    with pytest.raises(InvariantViolation, match="every acquire is answered") as caught:
        run_scheduled(main, schedule=Batches())
    assert isinstance(caught.value.__cause__, ValueError if raises else type(None))
    assert isinstance(caught.value.history[-1], events.EntryAcquired)
    assert trace[-1] == events.StageReached("channels closed")


def test_with_verify_a_teardown_that_leaves_a_stage_out_is_told(monkeypatch):
    """`TraceChecker.end` runs in production too: nothing else would notice what does not happen."""
    tell = TraceChecker.__call__

    def deaf(checker: TraceChecker, event: events.Event) -> None:
        if event != events.StageReached("scheduler stopped"):
            tell(checker, event)

    monkeypatch.setattr(TraceChecker, "__call__", deaf)

    async def main() -> None:
        async with sim_engine(SimExecutor(), config=EngineConfig(verify=True)) as engine:
            await ask(engine, 1)

    with pytest.raises(InvariantViolation, match=r"never reached \['scheduler stopped'\]"):
        run_scheduled(main, schedule=Batches())


@pytest.mark.parametrize("body", [trio.Cancelled, GeneratorExit])
def test_what_went_wrong_in_the_engine_does_not_hide_behind_what_nobody_will_see(body):
    """A cancellation is caught by its scope, and `GeneratorExit` by the generator that is closed."""
    error = EngineTeardownError("a release failed")
    assert leaving(body.__new__(body), error, trio.Cancelled) is error
    assert leaving(ValueError(), error, trio.Cancelled).__notes__ == [
        "the engine's end failed too: EngineTeardownError: a release failed"
    ]


def test_an_output_is_to_come_until_it_is_there():
    """One that is being encoded, one that is not yet, and one that has no room: routers are told of all."""
    ledger = EncoderLedger(2)
    books = SimpleNamespace(_ledger=ledger)
    for key in "abc":
        ledger.acquire(f"reader of {key}", EncoderItem(key=key, payload=None, embeddings=1, size=1))
    ledger.take_encode_batch(1)
    assert Supervisor.held_keys(books) == ("a", "b")
    assert Supervisor.keys_to_come(books) == {"a", "b", "c"}
    ledger.encoded(["a"], now=0.0)
    assert Supervisor.keys_to_come(books) == {"b", "c"}
    assert ledger.release("reader of a", "a", now=0.0).free == ["a"]
    ledger.acquire("late", EncoderItem(key="a", payload=None, embeddings=1, size=1))
    assert Supervisor.keys_to_come(books) == {"a", "b", "c"}, "what is being freed is encoded anew"
