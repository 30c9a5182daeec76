"""The private hooks into trio work, and a trio that has moved them is told of by name."""

from __future__ import annotations

import pytest
import trio
import trio._core._run as run
import trio.testing
from trio.testing import MockClock

from triolet.testing.trio_tools import hooks as trio_hooks
from triolet.testing.trio_tools.hooks import TrioChanged, leaves_a_nursery, self_test


def test_the_hooks_do_what_they_promise_with_the_installed_trio():
    self_test()


@pytest.mark.parametrize("name", ["_r", "_ALLOW_DETERMINISTIC_SCHEDULING", "GLOBAL_RUN_CONTEXT"])
def test_a_hook_that_a_release_has_moved_is_named(monkeypatch, name):
    if name == "GLOBAL_RUN_CONTEXT":  # trio itself needs it
        monkeypatch.setattr(trio_hooks, "_NEEDED", ("GLOBAL_RUN_CONTEXT_MOVED",))
        name = "GLOBAL_RUN_CONTEXT_MOVED"
    else:
        monkeypatch.delattr(run, name)
    with pytest.raises(TrioChanged, match=name):
        self_test()


def test_a_run_queue_that_trio_no_longer_asks_is_noticed(monkeypatch):
    monkeypatch.setattr(trio_hooks.OneTaskPerTick, "before_run", lambda _: None)
    with pytest.raises(TrioChanged, match="picked"):
        self_test()


@pytest.mark.parametrize("left_out", ["_waited_for", "_handed_over", "_handed_over_once"])
def test_what_a_run_no_longer_hears_of_is_noticed(monkeypatch, left_out):
    """Deaf to one of those for whose sake the system is asked at all."""
    init = trio_hooks._AsksSeldom.__init__

    def deaf(manager, runner):
        init(manager, runner)
        setattr(manager, left_out, ())

    monkeypatch.setattr(trio_hooks._AsksSeldom, "__init__", deaf)
    with pytest.raises(TrioChanged, match="hears only"):
        self_test()


def test_a_clock_without_autojump_is_noticed(monkeypatch):
    monkeypatch.delattr(MockClock, "_autojump")
    with pytest.raises(TrioChanged, match="_autojump"):
        self_test()


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
