"""Smaller promises, each under its own name. Most were found missing by a mutant that lived: see `mutants`."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest
import trio
from hypothesis import settings
from hypothesis.stateful import precondition, rule

from triolet import EngineClosed, EngineConfig, SamplingParams
from triolet.actors.worker import Job
from triolet.api.audio import Samples
from triolet.core import events
from triolet.core.errors import RunnerCrashed
from triolet.core.ledger import EncoderLedger, State
from triolet.core.plan import StepPlan
from triolet.core.planner import Planner
from triolet.core.request import EncoderItem, Request
from triolet.core.sequence import AcquireItem, Fail, Finish, PlannerLimits, ReleaseItem
from triolet.testing.schedule import Batches, Pct, Schedule, Uniform, run_scheduled
from triolet.testing.sim import SimExecutor, SimModel, sim_engine
from triolet.testing.simulation import SCENARIOS, Fault, FaultKind, Outcome, simulate

from .test_ledger import LedgerMachine
from .test_planner import PlannerMachine

SCHEDULES: tuple[Schedule, ...] = (Batches(), Uniform(1), Pct(1), Pct(2))

# -- the ledger ------------------------------------------------------------------------------------------------------


class DeepLedgerMachine(LedgerMachine):
    """The same promises, deeper: no step is taken that does nothing, a lost generation is rare, the close comes last.

    `LedgerMachine` closes its ledger after a few steps, mostly, and then hardly anything can happen to it any more.
    """

    def close(self) -> None:
        """No rule here: the end comes with `teardown`."""
        super().close()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        super().release(data)

    @precondition(lambda self: self.open_asks)
    @rule(data=st.data(), really=st.sampled_from((False, False, True)))
    def withdraw(self, data: st.DataObject, really: bool) -> None:
        if really:
            super().withdraw(data)

    @precondition(lambda self: self.ledger._reserved)
    @rule(budget=st.integers(1, 3))
    def dispatch(self, budget: int) -> None:
        super().dispatch(budget)

    @precondition(lambda self: self.encoding)
    @rule(well=st.sampled_from((True, True, False)))
    def device_answers(self, well: bool) -> None:
        if well:
            super().device_encodes()
        else:
            super().device_fails_to_encode()

    def device_encodes(self) -> None:
        """See `device_answers`."""
        super().device_encodes()

    def device_fails_to_encode(self) -> None:
        """See `device_answers`."""
        super().device_fails_to_encode()

    @precondition(lambda self: self.freeing)
    @rule()
    def device_frees(self) -> None:
        super().device_frees()

    @precondition(lambda self: self.device or self.encoding)
    @rule(really=st.sampled_from((False, False, True)))
    def device_is_lost(self, really: bool) -> None:
        if really:
            super().device_is_lost()

    @precondition(lambda self: self.ledger.oldest_idle is not None)
    @rule(seconds=st.sampled_from((0.0, 1.0, 9.0, 10.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        super().time_passes(seconds)


TestDeepLedger = DeepLedgerMachine.TestCase
TestDeepLedger.settings = settings(stateful_step_count=50)


def resident(ledger: EncoderLedger, key: str, *, now: float, size: int = 1) -> None:
    """``key`` is encoded for a holder of its own, who leaves at ``now``."""
    ledger.acquire(f"first of {key}", key, size=size, embeddings=1, payload=key)
    ledger.take_encode_batch(1)
    ledger.encoded([key], now=now)
    ledger.release(f"first of {key}", key, now=now)


def test_an_item_that_just_fits_is_not_refused():
    decisions = EncoderLedger(100).acquire("r", "k", size=100, embeddings=1, payload=None)
    assert decisions.reserved == (("k", 100),), "an item as large as the cache fits it"


def test_a_waiting_request_evicts_no_more_than_it_needs():
    """What is on its way back already counts as room to come."""
    ledger = EncoderLedger(3)
    for key in "abc":
        resident(ledger, key, now=0.0)
    assert ledger.acquire("r", "d", size=1, embeddings=1, payload=None).free == ("a",)
    again = ledger.acquire("s", "e", size=1, embeddings=1, payload=None)
    assert again.free == (), "nothing more is evicted for the one that waits in front"


def test_the_entry_that_is_idle_for_the_longest_time_is_evicted_first():
    ledger = EncoderLedger(3)
    for now, key in enumerate("bca"):
        resident(ledger, key, now=float(now))
    freed = ledger.acquire("r", "d", size=2, embeddings=1, payload=None).free
    assert freed == ("b", "c"), "the oldest go first"


def test_an_idle_entry_is_kept_for_its_time_since_its_last_use():
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=1.0)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=None)
    ledger.release("r", "a", now=50.0)
    assert not ledger.evict_idle(now=55.0, idle_seconds=10.0).free, "its time runs from the last use"
    assert ledger.evict_idle(now=60.0, idle_seconds=10.0).free == ("a",), "when its time is over it goes"


def test_an_encode_batch_keeps_its_budget_of_embeddings():
    ledger = EncoderLedger(100)
    for key, embeddings in (("a", 10), ("b", 10), ("c", 10), ("d", 40), ("e", 1)):
        ledger.acquire("r" + key, key, size=1, embeddings=embeddings, payload=None)
    batches = [[job.key for job in ledger.take_encode_batch(25)] for _ in range(4)]
    assert batches == [["a", "b"], ["c"], ["d"], ["e"]], "up to 25 embeddings a batch; a larger item goes alone"


def test_an_entry_that_nobody_wants_keeps_no_payload():
    """R4: the samples of an audio window are two megabytes; they die with the last request that wants them encoded."""

    class Payload:
        pass

    ledger, payload = EncoderLedger(3), Payload()
    watched = weakref.ref(payload)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=payload)
    del payload
    ledger.take_encode_batch(1)
    ledger.encoded(["a"], now=0.0)
    ledger.release("r", "a", now=0.0)
    assert watched() is None, "an idle entry keeps its payload"


def test_every_holder_hears_of_a_failed_encoding():
    ledger = EncoderLedger(3)
    for holder in ("r", "s"):
        ledger.acquire(holder, "a", size=1, embeddings=1, payload="a")
    ledger.take_encode_batch(1)
    refused = ledger.encode_failed(["a"], RuntimeError("boom")).refused
    assert [refusal.holder for refusal in refused] == ["r", "s"], "every acquire is answered"
    assert refused[0].error is not refused[1].error, "two tasks must not raise the same error"


def test_an_entry_that_was_idle_can_be_encoded_again_for_who_joins_it():
    """It kept no payload while nobody wanted it: the one who joins brings it back, for a runner that loses all."""
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=0.0)
    ledger.acquire("r", "a", size=1, embeddings=1, payload="the payload")
    ledger.generation_lost()
    (job,) = ledger.take_encode_batch(1)
    assert job.payload == "the payload", "what is dispatched has its payload"


def test_an_output_that_nobody_waits_for_any_more_is_idle():
    """Always freed eventually: its last holder left while it was computed, and nobody will leave it again."""
    ledger = EncoderLedger(3)
    ledger.acquire("r", "a", size=1, embeddings=1, payload="a")
    ledger.take_encode_batch(1)
    ledger.release("r", "a", now=0.0)
    ledger.encoded(["a"], now=0.0)
    assert ledger.state("a") is State.IDLE, "what nobody holds is idle"


def test_who_waits_at_the_close_is_withdrawn():
    """Always freed eventually: what is given back after the close is not taken anew."""
    ledger = EncoderLedger(1)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=None)
    ledger.take_encode_batch(1)
    ledger.acquire("s", "b", size=1, embeddings=1, payload=None)
    ledger.close(now=0.0)
    ledger.encoded(["a"], now=0.0)
    freed = ledger.evict_idle(now=math.inf, idle_seconds=0.0).free or ("a",)
    assert not ledger.freed(freed).reserved, "nothing is reserved after the close"
    assert ledger.drained


# -- pages and planner -----------------------------------------------------------------------------------------------


class TidyPlannerMachine(PlannerMachine):
    """Where every request has ended, nobody remembers any."""

    def teardown(self) -> None:
        """See the class."""
        super().teardown()
        if not hasattr(self, "planner"):
            return
        for _ in range(4):  # the news travels with a step of its own
            self.plan()
            self.device_steps(broken=False)
        assert not self.executor._records, "the executor remembers a sequence that has ended"
        assert not self.planner._holders, "the planner remembers a holder that has released"
        assert self.planner.next_step() is None, "steps without end for nobody"


TestTidyPlanner = TidyPlannerMachine.TestCase
TestTidyPlanner.settings = settings(max_examples=100, stateful_step_count=50)


def opened(*, pages: int = 64, depth: int = 1, slots: int = 4, running: int = 4) -> tuple[Planner, SimExecutor]:
    """A planner and its device, open."""
    model = SimModel(pages=pages, cross_slots=slots)
    limits = PlannerLimits.of(model.describe(), max_running=running, max_step_tokens=16, steps_in_flight=depth)
    executor = SimExecutor(model)
    executor.open()
    return Planner(limits), executor


def request(name: str, *, prompt: int = 3, max_tokens: int = 5, **more: object) -> Request:
    return Request(id=name, prompt_token_ids=(5,) * prompt, max_tokens=max_tokens, **more)


def test_nothing_is_fed_beyond_the_last_token_that_is_wanted():
    """With two steps in flight too: the last token is drawn, and never fed."""
    planner, executor = opened(depth=2)
    planner.submit(request("r", prompt=3, max_tokens=5))
    flights = []
    while (plan := planner.next_step()) is not None or flights:
        flights += [plan] if plan is not None else []
        if plan is None or len(flights) == 2:
            planner.step_done(executor.step(flights.pop(0)))
    assert planner.statistics().tokens_committed == 5
    assert planner.statistics().tokens_fed == 3 + 5 - 1, "one position for each token but the last"


def test_failures_far_apart_are_forgiven():
    """A request is poison only where it fails alone and again, with no good step between."""
    planner, executor = opened()
    planner.submit(request("r", max_tokens=6))
    ends = []
    for number in range(12):
        plan = planner.next_step()
        if plan is None:
            break
        if number in {1, 4}:
            executor.fault = lambda *_: RuntimeError("a cosmic ray")
        try:
            planner.step_done(executor.step(plan))
        except RuntimeError as error:
            planner.step_failed(plan.step_id, error)
        executor.fault = None
        ends += [action for action in planner.take_actions() if isinstance(action, Finish | Fail)]
    assert [type(end) for end in ends] == [Finish], "two failures with good steps between are no poison"


def test_a_runner_that_is_gone_leaves_nothing_taken():
    planner, _ = opened(depth=2)
    for name in ("r", "s"):
        planner.submit(request(name))
    planner.next_step()
    planner.next_step()
    planner.fail_all(RunnerCrashed("gone"))
    assert planner.idle, "requests are left though the runner is gone"
    assert planner.statistics().pages_free == planner.limits.pages, "pages are left though the runner is gone"


def test_the_youngest_request_gives_way_where_pages_are_short():
    planner, executor = opened(pages=4)
    for name in ("old", "young"):
        planner.submit(request(name, prompt=4, max_tokens=8))
    ends = []
    while (plan := planner.next_step()) is not None:
        planner.step_done(executor.step(plan))
        ends += [action.request_id for action in planner.take_actions() if isinstance(action, Finish)]
    assert planner.statistics().preemptions == 1
    assert ends == ["old", "young"], "the older request must not wait for the younger one"


def run(planner: Planner, executor: SimExecutor) -> list[StepPlan]:
    """Runs steps one by one until there is nothing to do."""
    plans = []
    while (plan := planner.next_step()) is not None:
        plans.append(plan)
        planner.step_done(executor.step(plan))
    return plans


def test_nobody_starts_in_a_step_that_had_to_preempt():
    """It would take the room of the one that had to give way, who came before it."""
    planner, executor = opened(pages=4)
    for name, prompt in (("old", 4), ("young", 8), ("newest", 5)):
        planner.submit(request(name, prompt=prompt, max_tokens=4))
    starts = [start.prompt_length for plan in run(planner, executor) for start in plan.started]
    assert planner.statistics().preemptions == 1
    assert starts == [4, 8, 8, 5], "who was preempted starts again before those who came later"


def test_the_news_of_an_ended_sequence_survives_a_skipped_step():
    planner, executor = opened(depth=2)
    planner.submit(request("short", max_tokens=1))
    planner.submit(request("long", max_tokens=5))
    steps = [planner.next_step(), planner.next_step()]
    planner.step_done(executor.step(steps[0]))
    steps.append(planner.next_step())
    assert steps[2].ended, "the third step carries the news"
    executor.fault = lambda *_: RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom") as caught:
        executor.step(steps[1])
    executor.fault = None
    planner.step_failed(1, caught.value)
    planner.step_failed(2, RuntimeError("skipped"), skipped=True)
    run(planner, executor)
    assert not executor._records, "the executor remembers a sequence that has ended"


def item(key: str) -> EncoderItem:
    return EncoderItem(key=key, payload=key, embeddings=1, size=1)


def asks(planner: Planner) -> list[AcquireItem | ReleaseItem]:
    return [action for action in planner.take_actions() if isinstance(action, AcquireItem | ReleaseItem)]


def test_who_waits_asks_again_where_its_cross_kv_has_lost_its_place():
    """Nobody starves: its key was resident when it came, so it had asked for nothing."""
    planner, executor = opened(slots=1, running=1)
    executor.outputs |= {"a": 1, "b": 1}
    for name, key, priority in (("first", "a", 0), ("waits", "a", 1), ("overtakes", "b", 0)):
        planner.submit(request(name, items=(item(key),), max_tokens=1, priority=priority))
        for ask in asks(planner):
            planner.encoder_ready(ask.holder)
        if name != "waits":
            run(planner, executor)
        if name == "first":
            assert planner.idle
    asked = [ask.holder for ask in asks(planner) if isinstance(ask, AcquireItem)]
    assert asked == ["waits/0"], "it asks as soon as it has something to ask for"


def test_who_finds_its_cross_kv_resident_gives_its_entry_back_at_once():
    """The bytes of an entry are for those who still have to read it."""
    planner, _ = opened()
    for name in ("writes", "joins"):
        planner.submit(request(name, items=(item("a"),)))
    for ask in asks(planner):
        planner.encoder_ready(ask.holder)
    planner.next_step()
    released = [ask.holder for ask in asks(planner)]
    assert released == ["joins/0"], "the one who writes holds it until its step is done, the other one no more"


# -- the actors ------------------------------------------------------------------------------------------------------


def outcomes() -> Iterator[Outcome]:
    """Of every scenario under a few schedules."""
    for scenario in SCENARIOS.values():
        for schedule in SCHEDULES:
            yield simulate(scenario, schedule)


def disturbed(name: str, kind: FaultKind, stride: int = 1) -> Iterator[tuple[Fault, Outcome]]:
    """Of one scenario with a fault at every step, or every ``stride``-th, of every task."""
    for task, steps in simulate(SCENARIOS[name], Batches()).steps.items():
        for step in range(1, steps + 1, stride):
            fault = Fault(kind, task, step)
            yield fault, simulate(SCENARIOS[name], Batches(), fault)


def assert_never_cut_off(outcome: Outcome, fault: Fault | None = None) -> None:
    cut = [e.stage for e in outcome.trace if isinstance(e, events.StageReached) and e.stage.endswith("cut off")]
    assert not cut, f"{cut} in {outcome.scenario!r} with {fault}, though the device answers"


def test_no_stage_of_a_teardown_is_cut_off_while_the_device_answers():
    """A stage that is cut off excuses all that it owed: where the device answers there is nothing to excuse."""
    for outcome in outcomes():
        assert_never_cut_off(outcome)
    for name in ("shutdown while busy", "plain"):
        for fault, outcome in disturbed(name, FaultKind.CANCEL, stride=3):
            assert_never_cut_off(outcome, fault)


def test_no_stage_of_a_teardown_is_cut_off_after_the_runners_crash():
    """What the runner owed is not waited for."""
    trace: list[events.Event] = []

    async def crash() -> None:
        executor = SimExecutor(fault=lambda job, _: SystemExit("dead") if job is Job.STEP else None)
        with pytest.raises(RunnerCrashed):
            async with sim_engine(executor, config=EngineConfig(observer=trace.append)) as engine:
                await ask(engine, 1)

    run_scheduled(crash, schedule=Batches())
    cut = [e.stage for e in trace if isinstance(e, events.StageReached) and e.stage.endswith("cut off")]
    assert not cut, f"{cut}, though the runner's end is known"


def most_at_once(outcome: Outcome, begins: type[events.Event], ends: tuple[type[events.Event], ...]) -> int:
    """Most ``begins`` that were not ended by one of ``ends`` yet."""
    now = most = 0
    for event in outcome.trace:
        now += isinstance(event, begins) - isinstance(event, ends)
        most = max(most, now)
    return most


def test_one_encode_batch_is_in_flight_at_a_time():
    """What arrives meanwhile makes the next batch."""
    for outcome in outcomes():
        most = most_at_once(outcome, events.EncodeDispatched, (events.EncodeDone, events.EncodeBroke))
        assert most <= 1, f"{most} encode batches at once in {outcome.scenario!r}"


def test_two_steps_are_in_flight_while_requests_decode():
    """The device never waits for Python."""
    for outcome in outcomes():
        most = most_at_once(outcome, events.StepBegun, (events.StepEnded,))
        assert most == 2, f"{most} steps at once in {outcome.scenario!r}"


@contextmanager
def misuses() -> Iterator[list[str]]:
    """What a simulated device refuses as misuse: to the engine it is a failure like any other, and retried."""
    refused: list[str] = []

    def watched(call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def watch(*arguments: object) -> object:
            try:
                return call(*arguments)
            except (RuntimeError, MemoryError):  # injected
                raise
            except Exception as error:
                refused.append(f"{type(error).__name__}: {error}")
                raise

        return watch

    with pytest.MonkeyPatch.context() as patch:
        for name in ("encode", "step", "free"):
            patch.setattr(SimExecutor, name, watched(getattr(SimExecutor, name)))
        yield refused


def test_the_device_is_never_misused():
    """Not even where a retry makes it good again."""
    with misuses() as refused:
        for outcome in outcomes():
            assert not refused, f"the device was misused in {outcome.scenario!r}: {refused[0]}"


@pytest.mark.parametrize("kind", [FaultKind.STEP_FAILS, FaultKind.ENCODE_FAILS, FaultKind.CANCEL])
def test_the_device_is_never_misused_after_a_fault(kind):
    with misuses() as refused:
        for fault, outcome in disturbed("preemption", kind, stride=2):
            assert not refused, f"the device was misused in {outcome.scenario!r} with {fault}: {refused[0]}"


async def ask(engine, number: int, max_tokens: int = 5) -> None:
    samples: Samples = np.full(1600, number / 100, np.float32)
    sampling = SamplingParams(max_tokens=max_tokens)
    await engine.generate(prompt_token_ids=[1, 2 + number], audio=samples, sampling=sampling)


def virtual_time(test):
    """An async test, run alone on virtual time; one that deadlocks fails."""

    @functools.wraps(test)
    def run() -> None:
        run_scheduled(test, schedule=Batches())

    return run


@virtual_time
async def test_an_idle_output_is_kept_for_its_idle_time():
    executor = SimExecutor()
    async with sim_engine(executor, config=EngineConfig(encoder_idle_seconds=5.0)) as engine:
        await trio.sleep(20)
        await ask(engine, 1)
        await trio.sleep(4)
        assert executor.outputs, "an idle output is freed before its time"
        await trio.sleep(2)
        assert not executor.outputs, "an idle output outlives its time"


@virtual_time
async def test_the_device_holds_what_the_ledger_says():
    """Books balance: whenever nothing is on its way, the device's bytes are the ledger's."""
    async with sim_engine(SimExecutor(), config=EngineConfig(encoder_idle_seconds=5.0)) as engine:
        for number, expected in ((1, 100), (2, 200)):
            await ask(engine, number)
            await trio.sleep(0.1)
            books = engine.statistics()
            assert books.device.by_owner["encoder_outputs"] == books.encoder_cache.taken == expected, "books balance"
        await trio.sleep(10)
        books = engine.statistics()
        assert books.device.by_owner["encoder_outputs"] == books.encoder_cache.taken == 0, "books balance"


@virtual_time
async def test_a_more_patient_stop_does_not_prolong_an_impatient_one():
    async def outsider(engine) -> None:
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


@virtual_time
async def test_a_drain_ends_at_once_where_the_surroundings_are_cancelled():
    async def outsider(engine) -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1, 60)

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with sim_engine(SimExecutor(), config=EngineConfig(drain_seconds=math.inf)) as engine:
                nursery.start_soon(outsider, engine)
                await trio.sleep(0.4)
                scope.deadline = trio.current_time() + 0.1
        assert trio.current_time() < 2.0, "nobody waits for the drain any more"


@virtual_time
async def test_an_abort_after_the_end_is_no_error():
    """`Supervisor.abort` never raises: it is called while leaving, also long after the engine has gone."""
    async with sim_engine(SimExecutor()) as engine:
        supervisor = engine._supervisor
    supervisor.abort("no such request")
