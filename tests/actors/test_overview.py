"""What an `Overview` knows of an engine by its events: requests by stage, and the encoder cache by state."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from triolet import Engine, EngineConfig
from triolet.core import events as e
from triolet.core.overview import FREEING, HELD, IDLE, RESERVED, Overview, RequestLine
from triolet_testing.sim import sim_engine

from .shared import ask

QUEUED = e.RequestQueued("r", time=1.0)
STARTED = e.RequestStarted("r", 3, time=3.0)


def fed(*told: e.Event) -> Overview:
    state = Overview()
    for event in told:
        state(event)
    return state


def line_of(*told: e.Event) -> RequestLine:
    state = fed(*told)
    (line,) = (*state.running.values(), *state.waiting.values())
    return line


# -- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([], "queued"),
        ([e.EntryAcquired("k", "r/0"), e.EntryReserved("k", 3), e.EncodeDispatched(("k",), 1)], "encoding"),
        ([e.EntryAcquired("k", "r/0"), e.EntryRefused("k", "r/0"), e.EncodeDispatched(("k",), 1)], "queued"),
        ([e.EncoderWaitOver("r")], "ready"),
        ([STARTED, e.RequestPreempted("r", "other"), e.EncoderWaitOver("r")], "preempted"),
        ([STARTED], "reading"),
        ([e.StepBegun(0, ("r",), (), (), 1)], "reading"),
        ([STARTED, e.FirstToken("r", time=4.0)], "decoding"),
        ([STARTED, e.RequestPreempted("r", "other")], "preempted"),
        ([STARTED, e.RequestSuspected("r")], "suspected"),
        ([STARTED, e.StepRetried(0, ("r",))], "queued"),
        ([STARTED, e.StepsLost(1)], "queued"),
        ([STARTED, e.RequestPreempted("r", "other"), STARTED], "reading"),
    ],
)
def test_the_stage_of_a_request_is_what_the_events_say(told: list[e.Event], expected: str) -> None:
    assert line_of(QUEUED, *told).stage == expected


def test_a_line_knows_how_many_tokens_were_written() -> None:
    """Tokens are counted by good steps that sample; one that reads the prompt gives none, and a failed one neither."""
    told = [QUEUED, STARTED]
    for number, ok in enumerate((True, True, True, False, True)):
        begun = e.StepBegun(number, ("r",), (), (), 1, ("r",) if number else ())
        told += [begun, e.StepEnded(number, ok=ok, error="" if ok else "E: x", time=3.0 + number)]
    assert line_of(*told).tokens == 3


def test_a_beam_search_writes_from_its_first_step_on() -> None:
    """Its tokens are committed at its end; each of its steps is one of them until then."""
    told = [QUEUED, STARTED]
    for number in range(3):
        told += [e.StepBegun(number, ("r",), (), (), 5, ("r",)), e.StepEnded(number, ok=True, time=4.0)]
    line = line_of(*told)
    assert (line.stage, line.tokens) == ("decoding", 3)


def test_those_that_run_and_those_that_wait_are_apart_and_the_ended_are_gone() -> None:
    told = [e.RequestQueued(name, time=0.0) for name in "abc"]
    last: list[Any] = []
    state = fed(*told, e.RequestStarted("c", 3, time=1.0))
    state.changed = last.append
    state(e.RequestEnded("a", "failed", "E: x", time=2.0))
    assert (list(state.running), list(state.waiting)) == (["c"], ["b"])
    assert state.ended == {"failed": 1}
    assert [(line.request_id, line.stage, line.stage_at, line.error) for line in last] == [("a", "failed", 2.0, "E: x")]


def test_failures_are_counted_and_the_last_one_is_known() -> None:
    state = fed(
        *(e.StepBegun(0, (), (), (), 0), e.StepBegun(1, (), (), (), 0)),
        *(e.StepEnded(0, ok=False, error="RuntimeError: bo\nom"), e.StepEnded(1, ok=False, skipped=True)),
    )
    assert (state.failures, state.last_failure) == (1, "step 0: RuntimeError: bo om")
    state(e.RunnerRestarting(2, "RuntimeError: boom"))
    assert (state.failures, state.last_failure) == (2, "restart 2: RuntimeError: boom")


def test_of_an_engine_that_failed_nothing_is_left() -> None:
    """Nobody frees its entries."""
    told = [QUEUED, e.EntryAcquired("k", "r/0"), e.EntryReserved("k", 3), e.StepBegun(0, ("r",), (), (), 1)]
    end = [e.ActorFailed("runner", "E: x"), e.RequestEnded("r", "failed"), e.StageReached("channels closed")]
    state = fed(*told, *end)
    assert (state.failures, state.last_failure) == (1, "runner: E: x")
    assert_nothing_is_left(state)


# -- the encoder cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 5])
async def test_bytes_by_state_are_those_of_the_books(places: int, autojump_clock: Any) -> None:
    """Under pressure, with withdrawals; whenever somebody looks, and at the end nothing is left."""
    state = Overview()
    seen: set[str] = set()
    config = EngineConfig(observer=state, encoder_cache_bytes=100 * places, verify=True)
    async with sim_engine(config=config) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(leave_early if number % 3 == 2 else ask, engine, number % 5)
            for _ in range(100):
                await trio.sleep(0.05)
                books = engine.statistics().encoder_cache
                assert sum(state.bytes_in.values()) == books.taken
                assert min(state.bytes_in.values(), default=0) >= 0
                assert (state.bytes_in[IDLE] > 0) == (books.idle > 0)
                seen |= {name for name, count in state.bytes_in.items() if count}
    assert {HELD, IDLE} <= seen
    assert_nothing_is_left(state)


def assert_nothing_is_left(state: Overview) -> None:
    assert +state.bytes_in == {}
    left = (state._entries, state._wanted, state._steps, state.running, state.waiting)
    assert not any(left)


async def leave_early(engine: Engine, number: int) -> None:
    with trio.move_on_after(0.4):
        await ask(engine, number)


def test_an_output_goes_through_its_states() -> None:
    told = [e.EntryAcquired("k", "r/0"), e.EntryReserved("k", 3), e.EncodeDispatched(("k",), 1), e.EncodeDone(("k",))]
    held = [e.EntryHeld("k", "r/0"), e.EntryHeld("k", "s/0")]
    assert +fed(*told, *held, e.EntryReleased("k", "r/0")).bytes_in == {HELD: 3}
    idle = [*told, *held, e.EntryReleased("k", "r/0"), e.EntryReleased("k", "s/0")]
    assert +fed(*idle).bytes_in == {IDLE: 3}
    assert +fed(*idle, e.FreeSent(("k",))).bytes_in == {FREEING: 3}
    assert +fed(*idle, e.FreeSent(("k",)), e.EntryFreed(("k",))).bytes_in == {}
    lost = [*told, *held, e.OutputsLost(1), e.EntryReleased("k", "r/0"), e.EntryReleased("k", "s/0")]
    assert +fed(*lost).bytes_in == {RESERVED: 3}
