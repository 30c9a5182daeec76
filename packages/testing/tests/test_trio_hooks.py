"""The private hooks into trio work, and one that a release of trio has moved is named."""

from __future__ import annotations

import socket

import pytest
import trio
import trio._core._run as run
import trio.testing
from trio.testing import MockClock

from triolet_testing.trio_tools import hooks as trio_hooks
from triolet_testing.trio_tools.hooks import TrioChanged, leaves_a_nursery
from triolet_testing.trio_tools.schedules import run_scheduled


async def nothing() -> None:
    """The shortest program."""


@pytest.mark.parametrize("name", ["_r", "_ALLOW_DETERMINISTIC_SCHEDULING", "GLOBAL_RUN_CONTEXT", "_autojump"])
def test_a_hook_that_a_release_has_moved_is_named(monkeypatch, name):
    if name == "GLOBAL_RUN_CONTEXT":  # trio itself needs it
        name = "GLOBAL_RUN_CONTEXT_MOVED"
        monkeypatch.setattr(trio_hooks, "_NEEDED", (name,))
    else:
        monkeypatch.delattr(MockClock if name == "_autojump" else run, name)
    with pytest.raises(TrioChanged, match=name):
        run_scheduled(nothing)


@pytest.mark.real_time
def test_a_run_with_one_task_a_tick_hears_of_files_and_of_what_threads_hand_over():
    heard: list[str] = []
    near, far = socket.socketpair()

    async def read() -> None:
        await trio.lowlevel.wait_readable(near)
        heard.append("file")

    async def go_on() -> None:
        for _ in range(20):
            await trio.lowlevel.checkpoint()

    async def main() -> None:
        token = trio.lowlevel.current_trio_token()
        await go_on()
        token.run_sync_soon(heard.append, "handed over")
        await go_on()
        heard.append("then")
        token.run_sync_soon(heard.append, "handed over once", idempotent=True)
        await go_on()
        heard.append("then")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await go_on()
            far.send(b"!")
            await go_on()
            nursery.cancel_scope.cancel()

    with near, far:
        trio.run(main, instruments=[trio_hooks.OneTaskPerTick(lambda _: 0)])
    assert heard == ["handed over", "then", "handed over once", "then", "file"]


def test_the_seeding_leaves_nothing_behind():
    before = run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING
    with trio_hooks.seeded_batches(3):
        assert run._ALLOW_DETERMINISTIC_SCHEDULING
    assert (run._r.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING) == before


async def test_a_task_that_leaves_a_nursery_is_told_from_one_that_waits_within(autojump_clock):
    found = {}

    async def parent() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(parent, name="parent")
        await trio.testing.wait_all_tasks_blocked()
        (task,) = nursery.child_tasks
        found["within"] = leaves_a_nursery(task)
        await trio.sleep(2.0)
        found["at its end"] = leaves_a_nursery(task)
        nursery.cancel_scope.cancel()
    assert found == {"within": False, "at its end": True}
