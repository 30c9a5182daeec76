"""What watchers are told, as values: nothing of what was said, nothing lost without a word, and always the truth."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from triolet.api.engines import ModelStatistics
from triolet.core import events as e
from triolet.core.config import EngineConfig
from triolet.core.overview import Overview
from triolet.core.residency import ModelState
from triolet.server.problems import Refusal
from triolet.server.view.messages import Message, engine_figures, message, model_figures, public_error, state_message
from triolet.server.view.watchers import MOST_WATCHERS, Watcher, Watchers
from triolet_testing.sim import sim_engine

from ..actors.shared import ask

OUTCOMES = ("finished", "failed", "aborted")


def heard(*happened: e.Event) -> tuple[Watchers, list[Message]]:
    """What a watcher is told of ``happened``."""
    watchers = Watchers()
    with watchers.joined() as watcher:
        for event in happened:
            watchers.hear("m", event)
        return watchers, watcher.take()[1]


# -- the words ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "public"),
    [
        ("PoisonRequest: it crashed twice", "PoisonRequest: it crashed twice"),
        ("EncodeFailed: the encoder\nfailed", "EncodeFailed: the encoder failed"),
        ("InvalidRequest: the prompt 'my secret' is too long", "InvalidRequest"),
        ("KeyError: 'my secret'", "KeyError"),
        ("TypeError", "TypeError"),
    ],
)
def test_a_callers_error_is_told_without_its_text_which_may_quote_the_caller(error: str, public: str) -> None:
    assert public_error(error) == public


def test_a_request_is_told_stage_by_stage_to_its_end() -> None:
    _, changes = heard(
        e.RequestQueued("r", time=1.0),
        e.RequestStarted("r", 3, time=2.0),
        e.StepBegun(0, ("r",), (), (), 1, ("r",)),
        e.StepEnded(0, ok=True, time=3.0),
        e.RequestEnded("r", "failed", "PoisonRequest: boom", time=4.0),
    )
    assert [(one["stage"], one["at"], one["tokens"]) for one in changes] == [
        ("queued", 1.0, 0),
        ("reading", 2.0, 0),
        ("decoding", 3.0, 1),
        ("failed", 4.0, 1),
    ]
    assert changes[-1] == {
        "request": "r", "model": "m", "stage": "failed", "at": 4.0, "tokens": 1, "error": "PoisonRequest: boom",
    }  # fmt: skip


def test_an_encoder_output_is_told_with_its_bytes() -> None:
    _, [change] = heard(e.EntryReserved("k", 3, time=1.0))
    assert change == {"entry": "k", "model": "m", "state": "reserved", "at": 1.0, "bytes": 3}


@pytest.mark.parametrize(
    ("event", "public"),
    [
        (e.RunnerRestarting(1, "OSError: /srv/models/m: Input/output error", time=2.0), "restart 1: OSError"),
        (
            e.RunnerRestarting(1, "DeviceLost: the device is gone", time=2.0),
            "restart 1: DeviceLost: the device is gone",
        ),
        (e.EncodeBroke(("k",), "RuntimeError: /srv/x", time=2.0), "encode of 1: RuntimeError"),
        (e.StepEnded(7, ok=False, error="RuntimeError: boom", time=2.0), "step 7: RuntimeError"),
    ],
)
def test_what_failed_is_told_without_the_server_s_files(event: e.Event, public: str) -> None:
    _, changes = heard(event)
    assert [one for one in changes if "failure" in one] == [{"failure": public, "model": "m", "at": 2.0}]


def test_an_error_of_a_load_is_told_by_its_type() -> None:
    """As `Server.use` does not tell it either."""
    failed = ModelStatistics(
        state=ModelState.FAILED,
        users=0,
        waiting=0,
        bytes=0,
        loads=0,
        load_seconds=0.0,
        last_used=None,
        last_error="CheckpointError: /srv/models/m/model.safetensors: no such file",
        engine=None,
        description=None,
    )
    assert model_figures(failed, Overview(), {}, None)["error"] == "CheckpointError"


# -- the queue of a watcher --------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=20), st.integers(1, 8))
def test_a_slow_watcher_loses_the_oldest_and_is_told_how_many(moves: list[int | None], most: int) -> None:
    """``None``: the watcher takes what there is. All that was put is taken or counted as lost, in order."""
    watcher, put, seen, lost = Watcher(most), 0, [], 0
    for move in [*moves, None]:
        if move is None:
            missing, changes = watcher.take()
            assert missing == 0 or len(changes) == most
            assert [one["number"] for one in changes] == list(range(put - len(changes), put))
            seen += changes
            lost += missing
            assert len(seen) + lost == put
        for _ in range(move or 0):
            watcher.put({"number": put})
            put += 1


def test_while_nobody_watches_no_change_is_made() -> None:
    """The state is kept, so that the next watcher gets it."""
    watchers = Watchers()
    watchers.hear("m", e.RequestQueued("r", time=1.0))
    assert watchers.states["m"].changed is None
    with watchers.joined() as watcher:
        watchers.hear("other", e.RequestQueued("s", time=1.0))
        watchers.hear("m", e.RequestStarted("r", 3, time=2.0))
        assert [one["request"] for one in watcher.take()[1]] == ["s", "r"]
    assert all(state.changed is None for state in watchers.states.values())


def test_too_many_watchers_are_refused() -> None:
    watchers = Watchers()
    with watchers.joined():
        joined = [watchers.joined() for _ in range(MOST_WATCHERS - 1)]
        for one in joined:
            one.__enter__()
        with pytest.raises(Refusal, match="pages watch; close one"), watchers.joined():
            pass
        joined.pop().__exit__(None, None, None)
        with watchers.joined():
            pass


# -- the truth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.7, 1.5])
async def test_the_state_and_the_changes_since_make_the_state_of_later(moment: float, autojump_clock: Any) -> None:
    """Whenever one joins, under pressure and with withdrawals: requests and encoder outputs are those of the engine."""
    watchers = Watchers()
    config = EngineConfig(observer=lambda event: watchers.hear("m", event), encoder_cache_bytes=200, verify=True)
    async with sim_engine(config=config) as engine:
        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(leave_early if number % 3 == 2 else ask, engine, number % 5)
            await trio.sleep(moment)
            with watchers.joined() as watcher:
                picture = Picture(state_message(watchers.states, 1, trio.current_time()))
                for _ in range(40):
                    await trio.sleep(0.07)
                    picture.take(watcher.take()[1])
                    now = Picture(state_message(watchers.states, 1, trio.current_time()))
                    assert (picture.requests, picture.entries) == (now.requests, now.entries)
                    taken = engine.statistics().encoder_cache.taken
                    assert sum(one["bytes"] for one in picture.entries.values()) == taken
                await trio.sleep(20.0)
                picture.take(watcher.take()[1])
    assert (picture.requests, [one["state"] for one in picture.entries.values() if one["state"] != "idle"]) == ({}, [])


async def leave_early(engine: Any, number: int) -> None:
    with trio.move_on_after(0.4):
        await ask(engine, number)


class Picture:
    """What a page knows."""

    def __init__(self, state: Message) -> None:
        self.requests: dict[str, Message] = {one["request"]: _plain(one) for one in state["requests"]}
        self.entries: dict[str, Message] = {one["entry"]: one for one in state["entries"]}

    def take(self, changes: list[Message]) -> None:
        for change in changes:
            if "request" in change:
                self.requests[change["request"]] = _plain(change)
                if change["stage"] in OUTCOMES:
                    del self.requests[change["request"]]
            else:
                self.entries[change["entry"]] = change
                if change["state"] == "absent":
                    del self.entries[change["entry"]]


def _plain(request: Message) -> Message:
    """Without what is not told with each change: tokens are told with the figures."""
    return {name: request[name] for name in ("request", "model", "stage", "at")}


async def test_all_that_is_told_is_json(autojump_clock: Any) -> None:
    state = Overview()
    async with sim_engine(config=EngineConfig(observer=state)) as engine:
        await ask(engine, 1)
        figures = engine_figures(engine.statistics(), state, encodes=True)
    assert json.loads(json.dumps(message("figures", 1.00006, models=figures), allow_nan=False))["now"] == 1.0001
