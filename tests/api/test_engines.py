"""Several models under one budget: which are loaded, who waits for whom, what an end leaves.

On virtual time, with simulated devices. What holds on every host is in test_engines_hosts.py, real checkpoints are in
test_engines_real.py.
"""

from __future__ import annotations

import contextvars
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from triolet import (
    CheckpointError,
    DeviceOutOfMemory,
    Engine,
    EngineClosed,
    EngineConfig,
    EngineError,
    Engines,
    EngineStateError,
    EngineTeardownError,
    InvalidRequest,
    InvariantViolation,
    ModelSpec,
    ModelTooLarge,
    UnknownModel,
)
from triolet.actors.worker import Job
from triolet.api.residents import RETRY_SECONDS
from triolet.core.errors import TrioletError
from triolet_testing.sim import SimWorker

from ..actors.shared import ask
from .fleet import CLOSE, OPEN, Fleet, crowd, later, settle, states

TWO = {"a": 2000, "b": 2000}
THREE = {"a": 2000, "b": 2000, "c": 2000}


def fails(job: Job, *errors: BaseException | None) -> Any:
    """A fault of the calls of ``job``, one after another; then there is none. The list tells how many are left."""
    left = list(errors)
    return lambda called, _: left.pop(0) if called is job and left else None


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, logger="triolet.engines")
    return lambda: [
        (record.levelname, record.getMessage()) for record in caplog.records if record.name == "triolet.engines"
    ]


# -- loading ---------------------------------------------------------------------------------------------------------


async def test_the_first_use_loads_a_model_and_the_next_ones_find_it(autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines(specs={"a": {"aliases": ("whisper-1", "speech")}}) as engines:
        assert states(engines) == "aa"
        assert list(engines.models) == ["a", "b"]
        async with engines.use("a") as engine:
            assert trio.current_time() == pytest.approx(OPEN)
            assert isinstance(engine, Engine)
            await ask(engine, 1)
            assert states(engines) == "ra"
        async with engines.use("speech") as again:
            assert again is engine
        found = engines.statistics()["a"]
        assert (found.loads, found.users, found.waiting, found.bytes) == (1, 0, 0, 2000)
        assert found.engine is not None
        assert found.engine.device.total >= 1000
    fleet.check()


async def test_models_that_fit_load_at_the_same_time_and_uses_of_a_ready_one_take_no_time(autojump_clock):
    async with crowd(Fleet(THREE), memory_budget=6000) as (engines, users):
        await engines.load("a")
        await users.come("b1")
        await users.come("c1")
        before = trio.current_time()
        async with engines.use("a"):
            assert states(engines) == "rll"
            assert trio.current_time() == before
        await later(OPEN)
        assert sorted(users.order) == ["b1", "c1"]


async def test_preloading_begins_with_the_block_is_not_waited_for_and_may_fail(autojump_clock):
    fleet = Fleet(THREE, faults={"a": fails(Job.OPEN, CheckpointError("gone"))})
    async with fleet.engines(specs={"a": {"preload": True}, "c": {"preload": True}}) as engines:
        assert trio.current_time() == 0
        await settle()
        assert states(engines) == "lal"
        await later(OPEN + CLOSE)
        assert states(engines) == "far"
        assert engines.statistics()["a"].last_error == "CheckpointError: gone"
        assert engines.statistics()["c"].last_used == pytest.approx(CLOSE, abs=0.01)
        await engines.load("b")
    fleet.check()


async def test_load_and_unload_do_what_they_say_and_return_when_it_is_done(autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines() as engines:
        await engines.load("a")
        await engines.load("a")
        assert (states(engines), fleet.loads) == ("ra", "a")
        await engines.unload("a")
        assert (states(engines), fleet.open) == ("aa", "")
        assert trio.current_time() == pytest.approx(OPEN + CLOSE)
        await engines.unload("a")
        assert trio.current_time() == pytest.approx(OPEN + CLOSE)


async def test_the_engine_does_not_live_in_the_context_of_the_use_that_loads_it(autojump_clock):
    """Else what a request keeps in its context would live as long as the engine."""
    request = contextvars.ContextVar[str]("request", default="none")
    seen: list[str] = []
    fleet = Fleet(TWO, settings={"observer": lambda _: seen.append(request.get())})
    async with fleet.engines() as engines:
        request.set("mine")
        await engines.load("a")
    assert set(seen) == {"none"}


# -- room ------------------------------------------------------------------------------------------------------------


async def test_models_that_swap_serve_in_one_turn_all_that_wait_for_them(autojump_clock):
    """Requests for a, b, a, b, a, b, 10 ms apart: two loads in place of six, and nobody waits for a second turn."""
    fleet = Fleet(TWO)
    async with crowd(fleet, memory_budget=3000) as (_engines, users):
        for who in ("a1", "b1", "a2", "b2", "a3", "b3"):
            await users.come(who)
            await later(0.01)
        await later(OPEN)
        assert sorted(users.order) == ["a1", "a2", "a3"]
        await users.come("a4")  # the turn has begun: it waits behind b1
        for who in ("a1", "a2", "a3"):
            await users.go(who)
        await later(CLOSE + OPEN)
        assert sorted(users.order[3:]) == ["b1", "b2", "b3"]
        assert fleet.loads == "ab"


async def test_a_turn_that_others_wait_for_serves_no_more_than_its_bound(autojump_clock, monkeypatch):
    monkeypatch.setattr("triolet.core.residency.MOST_IN_TURN", 2)
    fleet = Fleet(TWO)
    async with crowd(fleet, memory_budget=3000) as (_engines, users):
        for who in ("a1", "b1", "a2", "a3"):
            await users.come(who)
        await later(OPEN)
        assert sorted(users.order) == ["a1", "a2"]


@pytest.mark.parametrize(
    ("thought", "told", "loads"), [(9000, "is estimated to need", "a"), (1000, "was loaded and needs", "ba")]
)
async def test_a_model_larger_than_the_budget_is_refused_with_the_figures(thought, told, loads, autojump_clock):
    """By its estimate, or when it is found out; then it is given back."""
    fleet = Fleet({"a": 2000, "b": 9000})
    async with fleet.engines(memory_budget=4000, thought={"b": thought}) as engines:
        with pytest.raises(ModelTooLarge, match=rf"'b' {told} .*memory_budget=4000.*max_positions") as caught:
            await engines.load("b")
        assert caught.value.http_status == 507
        assert (states(engines), fleet.open) == ("af", "")
        await engines.load("a")
    assert fleet.loads == loads
    fleet.check()


# -- uses within uses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["use", "load", "unload"])
@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_task_that_uses_a_model_may_ask_for_none_before_it_has_left(ask, name, autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines() as engines:
        for _ in range(2):
            async with engines.use("a"):
                with pytest.raises(
                    EngineStateError, match=r"by a task that already uses 'a'.*Leave the use of 'a' first"
                ):
                    if ask == "use":
                        async with engines.use(name):
                            pass
                    else:
                        await getattr(engines, ask)(name)
                assert states(engines) == "ra"
        await engines.load("b")
    fleet.check()


async def test_tasks_of_one_parent_use_models_at_the_same_time(autojump_clock):
    async with crowd(Fleet(TWO)) as (engines, users), engines.use("a"):
        await users.come("a1")
        await users.come("b1")
        await later(OPEN)
        assert users.order == ["a1", "b1"]


# -- idle models -----------------------------------------------------------------------------------------------------


async def test_an_idle_model_is_unloaded_after_its_time_and_a_use_begins_it_anew(autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines(idle_seconds=60) as engines:
        await engines.load("a")
        await later(59)
        async with engines.use("a"):
            await later(1000)
        await later(59)
        assert states(engines) == "ra"
        assert engines.statistics()["a"].last_used == pytest.approx(59, abs=0.1)
        await later(1 + 2 * CLOSE)
        assert states(engines) == "aa"
        assert engines.statistics()["a"].last_used == pytest.approx(60 + 2 * CLOSE, abs=0.1)
        async with engines.use("a"):
            assert engines.statistics()["a"].last_used == 0
    assert fleet.loads == "aa"
    fleet.check()


@pytest.mark.parametrize("never", [None, math.inf])
async def test_without_a_time_an_idle_model_stays(never, autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines(idle_seconds=never) as engines:
        await engines.load("a")
        await trio.sleep(80_000)
        assert states(engines) == "ra"


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "kind", "told"),
    [
        (CheckpointError("no weights"), CheckpointError, "no weights"),
        (LookupError("a bug"), EngineError, "LookupError: a bug"),
    ],
)
async def test_a_load_that_fails_is_told_to_all_who_wait_each_by_an_error_of_its_own(fault, kind, told, autojump_clock):
    """One that is not ours is the cause of one of ours."""
    fleet = Fleet(TWO, faults={"a": fails(Job.OPEN, fault)})
    async with crowd(fleet) as (engines, users):
        for who in ("a1", "a2", "b1"):
            await users.come(who)
        await later(OPEN + CLOSE)
        one, other = users.errors["a1"], users.errors["a2"]
        assert type(one) is type(other) is kind
        assert str(one) == str(other) == told
        assert one is not other
        assert kind is CheckpointError or isinstance(one.__cause__, LookupError)
        assert users.order == ["b1"]
        assert states(engines) == "fr"


async def test_a_use_soon_after_a_failed_load_gets_the_same_error_and_a_later_one_or_a_load_tries_again(autojump_clock):
    fleet = Fleet(TWO, faults={"a": fails(Job.OPEN, DeviceOutOfMemory("full"), DeviceOutOfMemory("full still"))})
    async with fleet.engines() as engines:
        for wait, told, loads in (
            (0, r"^full$", "a"),
            (RETRY_SECONDS / 2, r"^full; this was \d\.\d s ago. The model can be loaded again in \d\.\d s$", "a"),
            (RETRY_SECONDS / 2, r"^full still$", "aa"),
        ):
            await later(wait)
            with pytest.raises(DeviceOutOfMemory, match=told):
                async with engines.use("a"):
                    pass
            assert fleet.loads == loads
        await engines.load("a")
        assert engines.statistics()["a"].last_error == "DeviceOutOfMemory: full still"
    assert fleet.loads == "aaa"
    fleet.check()


async def test_what_ends_the_worker_while_it_loads_ends_the_block(autojump_clock):
    fleet = Fleet(TWO, faults={"a": fails(Job.OPEN, SystemExit("dead"))})
    with pytest.raises(SystemExit, match="dead"):
        async with fleet.engines() as engines:
            await engines.load("b")
            await engines.load("a")
    fleet.check()


async def test_an_engine_that_fails_before_its_user_hears_of_it_is_not_handed_out(autojump_clock):
    fleet = Fleet(TWO)
    async with crowd(fleet) as (engines, users):
        await engines.load("a")
        engine = engines._residents.by_name["a"].engine
        assert engine is not None
        users.begin("a1")
        engine.inside.backend._body.cancel()  # type: ignore[union-attr]
        await settle()
        await later(3)
        assert users.order == ["a1"]


async def test_a_broken_promise_leaves_the_block(autojump_clock):
    fleet = Fleet(TWO)
    with pytest.raises(InvariantViolation):
        async with fleet.engines() as engines:
            async with engines.use("a") as engine:
                violation = InvariantViolation("books balance", "they do not")
                emit = engine.inside.backend._emit  # type: ignore[union-attr]

                def checker(_: object) -> None:
                    raise violation

                emit.checker = checker  # type: ignore[assignment]
                with pytest.raises(TrioletError):
                    await ask(engine, 1)
            await later(1)
    fleet.check()


async def test_an_unload_that_goes_wrong_is_told_to_who_ordered_it(log, autojump_clock):
    fleet = Fleet(TWO, faults={"a": fails(Job.CLOSE, RuntimeError("stuck"))})
    async with fleet.engines() as engines:
        await engines.load("a")
        with pytest.raises(EngineTeardownError, match="stuck"):
            await engines.unload("a")
        assert log()[-1][1].startswith("a: unloaded (as ordered), but not well: EngineTeardownError: ")
        assert states(engines) == "aa"
        await engines.load("a")
    fleet.check()


async def test_an_engine_that_ends_badly_with_the_block_is_told_and_the_others_end_well(autojump_clock):
    stuck = fails(Job.CLOSE, RuntimeError("stuck"))
    fleet = Fleet(THREE, faults={"a": stuck, "c": fails(Job.CLOSE, RuntimeError("so am I"))})
    with pytest.raises(EngineTeardownError) as caught:
        async with fleet.engines() as engines:
            for name in ("a", "b", "c"):
                await engines.load(name)
    told = " ".join([str(caught.value), *caught.value.__notes__])
    assert "stuck" in told
    assert "so am I" in told
    fleet.check()


# -- cancellation ----------------------------------------------------------------------------------------------------


async def test_a_use_that_is_cancelled_already_loads_nothing(autojump_clock):
    fleet = Fleet(TWO)
    async with fleet.engines() as engines:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with engines.use("a"):
                raise AssertionError("it began")
        await settle()
        assert states(engines) == "aa"
    assert not fleet.devices


async def test_an_order_to_unload_that_is_cancelled_is_withdrawn(autojump_clock):
    async with crowd(Fleet(TWO)) as (engines, users):
        await users.come("a1")
        await later(OPEN)
        with trio.move_on_after(1):
            await engines.unload("a")
        await users.come("a2")
        assert users.order == ["a1", "a2"]


# -- the end ---------------------------------------------------------------------------------------------------------


async def test_the_end_drains_all_engines_at_the_same_time(autojump_clock):
    fleet = Fleet(THREE)
    ended: dict[str, float] = {}

    async def client(engines: Engines, name: str) -> None:
        async with engines.use(name) as engine:
            await ask(engine, 1)
            ended[name] = trio.current_time()

    async with trio.open_nursery() as nursery:
        async with fleet.engines() as engines:
            for name in ("a", "b", "c"):
                await engines.load(name)
                nursery.start_soon(client, engines, name)
            await settle()
            began = trio.current_time()
    assert set(ended) == {"a", "b", "c"}
    assert trio.current_time() - began < 2 * (max(ended.values()) - began) + CLOSE
    fleet.check()


async def client(engines: Engines, told: list[str], name: str = "a") -> None:
    """A request, and what became of it."""
    try:
        async with engines.use(name) as engine:
            await ask(engine, 1)
            told.append("served")
    except EngineError as error:
        told.append(type(error).__name__)


@asynccontextmanager
async def busy(fleet: Fleet, nursery: trio.Nursery) -> AsyncIterator[tuple[Engines, list[str]]]:
    """Engines while a request runs, and what became of it."""
    told: list[str] = []
    async with fleet.engines() as engines:
        for name in fleet.sizes:
            await engines.load(name)
        nursery.start_soon(client, engines, told)
        await settle()
        yield engines, told


@pytest.mark.parametrize("how", ["raises", "is cancelled"])
async def test_a_body_that_does_not_end_well_has_requests_aborted_at_once(how, autojump_clock):
    fleet = Fleet(TWO)
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope, suppress(KeyError):
            async with busy(fleet, nursery) as (_, told):
                if how == "raises":
                    raise KeyError("mine")
                scope.cancel()
                await later(1)
        assert scope.cancelled_caught == (how == "is cancelled")
    assert told == ["EngineClosed"]
    fleet.check()


async def test_uses_that_wait_at_the_end_are_told_and_loads_are_given_up(autojump_clock):
    fleet = Fleet(TWO)
    async with trio.open_nursery() as nursery:
        async with fleet.engines(memory_budget=3000) as engines:
            for name in fleet.sizes:
                nursery.start_soon(expect_closed, engines, name)
                await settle()
            assert states(engines) == "la"
    assert trio.current_time() == pytest.approx(OPEN + CLOSE), "the load was waited for, and given back"
    fleet.check()


async def test_a_load_that_hangs_does_not_hold_up_the_end(autojump_clock):
    fleet = Fleet(
        TWO, make_worker=lambda: SimWorker(hangs=lambda job: job is Job.OPEN), settings={"stage_seconds": 5.0}
    )
    async with trio.open_nursery() as nursery:
        async with fleet.engines() as engines:
            nursery.start_soon(expect_closed, engines, "a")
            await later(100)
        assert trio.current_time() == pytest.approx(105, abs=0.1)


async def expect_closed(engines: Engines, name: str) -> None:
    with pytest.raises(EngineClosed, match="the block of these engines is ending"):
        await engines.load(name)


@pytest.mark.parametrize(("drain", "ends"), [(0, "EngineClosed"), (0.1, "EngineClosed"), (60.0, "served")])
async def test_aclose_gives_requests_so_many_seconds_and_the_body_goes_on(drain, ends, autojump_clock):
    fleet = Fleet(TWO, settings={"drain_seconds": 0.0 if drain else math.inf})
    async with trio.open_nursery() as nursery, busy(fleet, nursery) as (engines, told):
        await engines.aclose(drain=drain)
        assert (states(engines), fleet.open) == ("aa", "")
        await expect_closed(engines, "a")
        await engines.aclose()
        await settle()
        assert told == [ends]


@pytest.mark.parametrize("shielded", [None, False, True], ids=["at the end", "in aclose", "in a shield"])
async def test_cancelling_the_surroundings_ends_the_drain(shielded, autojump_clock):
    worker = partial(SimWorker, duration=lambda job, _: 1000.0 if job is Job.STEP else 1.0)
    fleet = Fleet(TWO, settings={"drain_seconds": math.inf}, make_worker=worker)
    async with trio.open_nursery() as nursery:
        with trio.move_on_after(20) as scope:
            async with busy(fleet, nursery) as (engines, told):
                if shielded is not None:
                    with trio.CancelScope(shield=shielded):
                        await engines.aclose()
        assert scope.cancelled_caught
    assert told == ["EngineClosed"]
    fleet.check()


async def test_a_body_that_is_cancelled_can_use_its_engine_in_its_clean_up(autojump_clock):
    fleet = Fleet(TWO)
    with trio.move_on_after(5) as scope:
        async with fleet.engines() as engines, engines.use("a") as engine:
            try:
                await trio.sleep(math.inf)
            finally:
                with trio.CancelScope(shield=True):
                    await ask(engine, 1)
    assert scope.cancelled_caught
    fleet.check()


async def test_a_use_may_outlast_the_block(autojump_clock):
    fleet = Fleet(TWO)
    async with trio.open_nursery() as nursery:
        async with fleet.engines() as engines:

            async def client() -> None:
                async with engines.use("a"):
                    await later(100)

            nursery.start_soon(client)
            await later(2)
        assert trio.current_time() < 10
        fleet.check()


# -- misuse ----------------------------------------------------------------------------------------------------------


async def test_engines_are_used_inside_their_block_and_entered_once(autojump_clock):
    engines = Fleet(TWO).engines()
    for use in (lambda: engines.use("a"), engines.statistics):
        with pytest.raises(EngineStateError, match="not entered yet"):
            use()
    async with engines:
        with pytest.raises(EngineStateError, match="entered only once"):
            async with engines:
                pass
    for use in (lambda: engines.use("a"), engines.statistics):
        with pytest.raises(EngineStateError, match="closed"):
            use()
    with pytest.raises(EngineStateError, match="entered only once"):
        async with engines:
            pass


async def test_a_name_that_no_model_has_is_refused_with_those_there_are(autojump_clock):
    async with Fleet(TWO).engines() as engines:
        for wrong in ("c", 3):
            with pytest.raises(UnknownModel, match=r"allowed: a, b") as caught:
                engines.use(wrong)  # type: ignore[arg-type]
            assert caught.value.http_status == 404


def test_values_that_cannot_work_are_refused_with_what_is_allowed():
    for wrong in ({}, ["a"], None):
        with pytest.raises(InvalidRequest, match="a mapping of names"):
            Engines(wrong)  # type: ignore[arg-type]
    for models in ({"": "x"}, {3: "x"}):
        with pytest.raises(InvalidRequest, match="not blank"):
            Engines(models)  # type: ignore[arg-type]
    for models in ({"a": ""}, {"a": 3}):
        with pytest.raises(InvalidRequest, match="model="):
            Engines(models)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="given to the models 'a' and 'b'"):
        Engines({"a": "x", "b": ModelSpec("y", aliases=("a",))})
    with pytest.raises(InvalidRequest, match="memory_budget=0"):
        Engines({"a": "x"}, memory_budget=0)
    with pytest.raises(InvalidRequest, match="idle_seconds=-1"):
        Engines({"a": "x"}, idle_seconds=-1)
    for changes in ({"config": 3}, {"aliases": "name"}, {"aliases": 3}, {"preload": 1}):
        with pytest.raises(InvalidRequest, match=next(iter(changes))):
            ModelSpec("x", **changes)
    assert repr(Engines({"a": "x", "b": "y"})) == "<Engines of a, b>"
    assert repr(Engine("openai/whisper-base")) == "<Engine of openai/whisper-base on auto: not entered yet>"
    assert ModelSpec("x", config=EngineConfig(dtype="bfloat16")).config.dtype == "bfloat16"


# -- the log ---------------------------------------------------------------------------------------------------------


async def test_the_log_tells_of_loads_and_why_models_go(log, autojump_clock):
    fleet = Fleet({"a": 1001 << 20, "b": 1001 << 20}, faults={"b": fails(Job.OPEN, CheckpointError("torn"))})
    async with fleet.engines(memory_budget=1500 << 20, idle_seconds=50) as engines:
        await engines.load("a")
        with pytest.raises(CheckpointError):
            await engines.load("b")
        await engines.load("b")
        await later(100)
        await engines.load("a")
    levels, lines = zip(*log(), strict=True)
    assert levels == ("INFO", "INFO", "WARNING", "INFO", "INFO", "INFO", "INFO")
    assert lines[0].startswith("a: loaded in 1.0 s: 1001.0 MiB: ")
    assert lines[0].endswith("all models count 1001.0 MiB of 1500.0 MiB")
    assert lines[1] == "a: unloaded, 1001.0 MiB given back: b needs the room"
    assert lines[2] == "b: not loaded: CheckpointError: torn"
    assert lines[4] == "b: unloaded, 1001.0 MiB given back: idle for 50 s"
    assert lines[6] == "a: unloaded, 1001.0 MiB given back: the block ends"


async def test_a_handler_of_the_log_that_raises_ends_no_engine_and_leaves_the_block(caplog, autojump_clock):
    caplog.set_level(logging.INFO, logger="triolet.engines")

    def refuse(_: logging.LogRecord) -> bool:
        raise ValueError("no line for me")

    logger = logging.getLogger("triolet.engines")
    logger.addFilter(refuse)
    fleet = Fleet(TWO)
    try:
        with pytest.raises(ValueError, match="no line for me"):
            async with fleet.engines() as engines:
                async with engines.use("a") as engine:
                    await ask(engine, 1)
    finally:
        logger.removeFilter(refuse)
    fleet.check()
