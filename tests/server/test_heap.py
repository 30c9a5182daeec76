"""The memory of a process that is nothing but a server."""

from __future__ import annotations

import gc

import pytest

from triolet import Engine, EngineConfig
from triolet.core.events import Event
from triolet.server.heap import Heap
from triolet_testing import sim_engine

pytestmark = pytest.mark.real_time


async def test_what_is_there_when_a_model_opens_is_no_work_for_the_collector_until_one_closes(autojump_clock) -> None:
    before, counts = gc.get_threshold(), []
    try:
        heap = Heap()

        def observe(event: Event) -> None:
            heap.heard("model", event)

        engine: Engine = sim_engine(config=EngineConfig(observer=observe))
        async with engine:
            counts.append(gc.get_freeze_count())
        counts.append(gc.get_freeze_count())
    finally:
        gc.set_threshold(*before)
    assert counts[0] > 0
    assert counts[1] == 0
