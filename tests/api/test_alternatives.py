"""Several requests for one caller, without an engine."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import trio
import trio.testing

from triolet.api.hosts.alternatives import background, run_together

from ..heap import assert_none, expected, garbage


class Held:
    """Something that a frame holds."""


async def test_a_group_that_a_background_block_raises_leaves_it_whole() -> None:
    """The block's user may have a nursery in it, several of whose tasks fail."""
    group = ExceptionGroup("the user's", [KeyError("a"), ValueError("b")])
    for error in (group, LookupError("alone")):
        with pytest.raises(type(error)) as raised:
            async with background() as start_soon:
                start_soon(trio.sleep_forever)
                raise error
        assert raised.value is error


@pytest.mark.usefixtures("no_collector")
async def test_a_background_block_that_is_cancelled_or_fails_leaves_nothing() -> None:
    held: list[weakref.ref[Held]] = []

    async def block(scope: trio.CancelScope | None) -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        async with background() as start_soon:
            start_soon(trio.sleep_forever)
            if scope is None:
                raise LookupError("the block's own")
            scope.cancel()
            await trio.sleep_forever()

    with trio.CancelScope() as scope:
        await block(scope)
    assert scope.cancelled_caught
    with pytest.raises(LookupError):
        await block(None)
    assert [one() for one in held] == [None, None], "the block's frame lives on"


async def test_a_task_that_is_interrupted_ends_a_background_block() -> None:
    """A ^C may come to any task. It is raised as it is."""

    async def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with background() as start_soon:
            start_soon(interrupted)
            await trio.sleep_forever()


async def test_an_interrupt_that_leaves_a_background_block_dies_with_its_last_user() -> None:
    """A task hears it at the end of the block. The block's frame is in its traceback, and must not name it."""

    async def interrupted() -> None:
        with suppress(trio.Cancelled):
            await trio.sleep_forever()
        raise KeyboardInterrupt

    with garbage() as found:
        with expected(KeyboardInterrupt):
            async with background() as start_soon:
                start_soon(interrupted)
                await trio.testing.wait_all_tasks_blocked()
    assert_none(found)


@pytest.mark.usefixtures("no_collector")
async def test_runs_that_fail_while_their_caller_is_cancelled_leave_nothing() -> None:
    """Their error is then raised by nobody, and must not live on in a cycle through its own traceback."""
    held: list[weakref.ref[Held]] = []
    scope = trio.CancelScope()

    async def fail() -> None:
        mine = Held()
        held.append(weakref.ref(mine))
        scope.cancel()
        raise ValueError("a run's own")

    with scope:
        await run_together([fail, trio.sleep_forever])
    assert scope.cancelled_caught
    await trio.lowlevel.checkpoint()
    assert [one() for one in held] == [None], "a run's frame lives on"
    assert gc.collect() == 0
