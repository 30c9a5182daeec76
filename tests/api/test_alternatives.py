"""Several requests for one caller, without an engine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import trio

from triolet.api.hosts.alternatives import run_together


class Held:
    """Something that a run holds."""


@pytest.mark.usefixtures("no_collector")
async def test_runs_that_fail_while_their_caller_is_cancelled_leave_nothing() -> None:
    """Their error is then raised by nobody, and must not live on in a cycle through its own traceback."""
    held: list[weakref.ref[Held]] = []
    scope = trio.CancelScope()

    async def fail(begun: Callable[[], object]) -> None:
        begun()
        mine = Held()
        held.append(weakref.ref(mine))
        scope.cancel()
        raise ValueError("a run's own")

    async def wait(begun: Callable[[], object]) -> None:
        begun()
        await trio.sleep_forever()

    with scope:
        await run_together([fail, wait])
    assert scope.cancelled_caught
    await trio.lowlevel.checkpoint()
    assert [one() for one in held] == [None], "a run's frame lives on"
    assert gc.collect() == 0
