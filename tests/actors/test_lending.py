"""Engines that lend to engines that borrow: the real actors over simulated devices, with losses, on virtual time."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial

import pytest
import trio
from attrs import evolve

from triolet import EncodeFailed, EngineConfig
from triolet.actors.worker import Job
from triolet.core import events
from triolet.testing.sim import SimExecutor

from .shared import Trace, all_returned, ask
from .sim_lenders import SimLender, SimLenders, sim_borrower


def settings(trace: Trace, **changes: object) -> EngineConfig:
    return EngineConfig(**{"observer": trace.append, "verify": True, "encoder_idle_seconds": 5.0, **changes})


class Pair:
    """Lenders, which a test may kill, and what they told."""

    def __init__(self, nursery: trio.Nursery, count: int = 1, *, seed: int = 0) -> None:
        self.nursery, self.chance = nursery, random.Random(seed)
        self.traces = [Trace() for _ in range(count)]
        self.all = [SimLender(settings(trace)) for trace in self.traces]

    async def start(self) -> None:
        for lender in self.all:
            await self.nursery.start(lender.run)

    def end(self) -> None:
        for lender in self.all:
            lender.kill()

    def lenders(self, name: str = "x") -> SimLenders:
        return SimLenders(name, self.nursery, self.all, self.chance)


@pytest.fixture
async def pair(nursery: trio.Nursery) -> Pair:
    """One that has started."""
    made = Pair(nursery)
    await made.start()
    return made


async def many(engine, numbers, *, errors: tuple[type[Exception], ...] = ()) -> list[Exception]:
    """Asks at once; the tokens must be right, or the error one of ``errors``."""
    failed: list[Exception] = []

    async def one(number: int) -> None:
        try:
            await ask(engine, number)
        except errors as error:
            failed.append(error)

    async with trio.open_nursery() as nursery:
        for number in numbers:
            nursery.start_soon(one, number)
    return failed


async def test_what_is_encoded_there_is_decoded_here(executor, trace, autojump_clock, nursery):
    pair = Pair(nursery, 2)
    await pair.start()
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=settings(trace)) as engine:
        await many(engine, [number % 6 for number in range(24)])
        told = engine.statistics().encoder_cache
        there = [lender.supervisor.statistics().encoder_cache for lender in pair.all]
    assert (told.encoded, told.borrowed) == (0, 6), "encode once: there, and not here"
    assert sum(one.encoded for one in there) == 6
    assert sum(one.loans for one in there) == 6
    assert Job.ENCODE not in executor.calls
    assert not trace.of(events.EncodeDispatched)


async def test_two_borrowers_share_what_a_lender_encodes_once(autojump_clock, nursery):
    pair, traces = Pair(nursery), (Trace(), Trace())
    await pair.start()
    first, second = (
        sim_borrower(pair.lenders(name), SimExecutor(), config=settings(trace))
        for name, trace in zip("xy", traces, strict=True)
    )
    async with first, second, trio.open_nursery() as both:
        both.start_soon(many, first, range(5))
        both.start_soon(many, second, range(5))
    told = pair.all[0].supervisor.statistics().encoder_cache
    assert (told.encoded, told.loans) == (5, 10)
    assert told.bytes_by_state["lent"] == 0, "all loans are back"


@pytest.mark.parametrize("after", [0.02, 0.1, 0.3, 0.4, 0.45, 0.6])
async def test_every_acquire_is_answered_when_the_lender_dies(executor, trace, autojump_clock, pair, after):
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=settings(trace)) as engine:
        async with trio.open_nursery() as inner:
            inner.start_soon(many, engine, range(8))
            await trio.sleep(after)
            pair.end()
        await many(engine, range(8, 12))
        assert engine.statistics().encoder_cache.encoded >= 4, "what no lender gives is encoded here"


async def test_without_an_encoder_the_next_lender_is_asked_and_at_last_the_request_is_refused(
    executor, trace, autojump_clock, nursery
):
    pair = Pair(nursery, 2)
    await pair.start()
    borrower = sim_borrower(pair.lenders(), executor, config=settings(trace), encodes=False)
    async with all_returned(executor, trace), borrower as engine:
        async with trio.open_nursery() as inner:
            inner.start_soon(many, engine, range(8))
            await trio.sleep(0.3)
            pair.all[0].kill()
        pair.all[1].kill()
        await trio.sleep(10)  # what was borrowed is not kept
        failed = await many(engine, range(20, 22), errors=(EncodeFailed,))
    assert len(failed) == 2
    assert "no lender" in str(failed[0])
    assert Job.ENCODE not in executor.calls


async def test_a_loan_of_a_borrower_that_died_is_free_after_its_term(executor, trace, autojump_clock, pair):
    silent = pair.lenders()
    silent.returns = False
    async with sim_borrower(silent, executor, config=settings(trace)) as engine:
        await many(engine, range(3))
    lender = pair.all[0].supervisor
    assert lender.statistics().encoder_cache.bytes_by_state["lent"] > 0
    await trio.sleep(29)
    assert len(pair.all[0].executor.outputs) == 3, "no free while lent"
    await trio.sleep(10)
    assert not pair.all[0].executor.outputs, "always freed eventually"


async def test_a_borrower_that_stops_waits_for_no_lender(executor, trace, autojump_clock, nursery):
    pair = Pair(nursery)
    begun = trio.current_time()
    await pair.start()
    lenders = pair.lenders()
    lenders.answers = False
    async with all_returned(executor, trace):
        async with sim_borrower(lenders, executor, config=settings(trace, drain_seconds=1.0)) as engine:
            with trio.move_on_after(2.0):
                await ask(engine, 1)
    assert trio.current_time() - begun < 10
    assert trace.of(events.BorrowBroke)
    assert lenders.withdrawn == {1}


async def test_a_borrower_whose_runner_starts_anew_borrows_again(trace, autojump_clock, pair):
    once = iter([RuntimeError("sticky")])
    executor = SimExecutor(fault=lambda job, _: next(once, None) if job is Job.FREE else None)
    config = settings(trace, encoder_idle_seconds=0.05)
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=config) as engine:
        for number in range(4):
            await many(engine, range(number, number + 4))
            await trio.sleep(0.06)
    assert trace.of(events.RunnerRestarting)
    assert Job.ENCODE not in executor.calls


async def test_a_lender_whose_runner_starts_anew_encodes_again_what_is_lent(executor, trace, autojump_clock, nursery):
    pair = Pair(nursery)
    once = iter([RuntimeError("sticky")])
    pair.all[0].executor.fault = lambda job, _: next(once, None) if job is Job.FREE else None
    pair.all[0].config = evolve(pair.all[0].config, encoder_idle_seconds=0.05)
    await pair.start()
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=settings(trace)) as engine:
        for number in range(0, 16, 4):
            await many(engine, range(number, number + 4))
            await trio.sleep(0.06)
    assert pair.traces[0].of(events.RunnerRestarting)


async def test_an_item_that_the_lender_cannot_encode_fails_its_request_alone(executor, trace, autojump_clock, nursery):
    pair = Pair(nursery)
    pair.all[0].executor.fault = lambda job, _: RuntimeError("bad item") if job is Job.ENCODE else None
    await pair.start()
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=settings(trace)) as engine:
        failed = await many(engine, [1, 2], errors=(EncodeFailed,))
    assert len(failed) == 2
    assert Job.ENCODE not in executor.calls, "its failure is its own: it is not tried here"


async def test_what_cannot_be_put_in_is_encoded_here(trace, autojump_clock, pair):
    executor = SimExecutor(fault=lambda job, _: MemoryError("full") if job is Job.PUT_IN else None)
    async with all_returned(executor, trace), sim_borrower(pair.lenders(), executor, config=settings(trace)) as engine:
        await many(engine, range(3))
        assert engine.statistics().encoder_cache.encoded == 3


@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_of_losses_changes_no_token(seed, autojump_clock, nursery):
    """Lenders die and others come; small caches; two borrowers, one of which may not encode, and whose runners start
    anew, some of them while an output is on its way. What three lenders were lost with, this one refuses."""
    chance, dice = random.Random(seed), random.Random(seed)
    pair, traces = Pair(nursery, 2, seed=seed), (Trace(), Trace())

    def fault(job: Job, _: object) -> Exception | None:
        return next(restarts, None) if job is Job.FREE and dice.random() < 0.3 else None

    restarts = iter([RuntimeError("sticky"), RuntimeError("sticky")])
    executors = SimExecutor(fault=fault), SimExecutor(fault=fault)
    size = executors[0].model.describe().encoder_bytes
    for lender in pair.all:
        lender.config = evolve(lender.config, encoder_cache_bytes=chance.choice((1, 2, 5)) * size)
    await pair.start()
    over = trio.Event()

    async def losses() -> None:
        while not over.is_set():
            await trio.sleep(chance.random())
            lender = SimLender(settings(Trace(), encoder_cache_bytes=2 * size))
            pair.all.pop(0).kill()
            pair.all.append(lender)
            await nursery.start(lender.run)

    engines = [
        sim_borrower(
            pair.lenders(name),
            executor,
            config=settings(trace, encoder_cache_bytes=chance.choice((2, 3)) * size),
            encodes=encodes,
        )
        for name, executor, trace, encodes in zip("xy", executors, traces, (True, False), strict=True)
    ]
    nursery.start_soon(losses)
    async with (
        all_returned(executors[0], traces[0]),
        all_returned(executors[1], traces[1]),
        engines[0],
        engines[1],
        trio.open_nursery() as both,
    ):
        for _ in range(3):
            for engine, errors in zip(engines, ((), (EncodeFailed,)), strict=True):
                both.start_soon(partial(many, engine, [chance.randrange(6) for _ in range(8)], errors=errors))
            await trio.sleep(chance.random())
    over.set()
    broken = Counter(key for event in traces[1].of(events.BorrowBroke) for key in event.keys)
    assert all(broken[event.key] >= 3 for event in traces[1].of(events.EntryRefused)), "each was asked for three times"
    assert not traces[0].of(events.EntryRefused), "what this one cannot borrow it encodes"
