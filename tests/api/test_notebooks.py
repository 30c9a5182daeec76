"""Engines across the cells of a notebook: each cell is a task of its own, in one loop of asyncio, as in Jupyter."""

from __future__ import annotations

import asyncio
import atexit
import types
from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from triolet import EngineClosed, EngineStateError, RunnerCrashed, SyncEngine
from triolet.actors.worker import Job
from triolet_testing.sim import SimExecutor, SimWorker

from .hosts import (
    AsyncioHost,
    Bench,
    ask,
    crash,
    expected,
    on_bench,
    query,
)
from .threads import PATIENCE, SyncBench, loops

pytestmark = pytest.mark.real_time


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config, user_module=types.ModuleType("notebook"))
    yield shell
    shell.atexit_operations()
    atexit.unregister(shell.atexit_operations)


@pytest.fixture
def asyncio_bench() -> Bench:
    return Bench(AsyncioHost())


async def cell(shell: InteractiveShell, code: str) -> Any:
    """Runs a cell as Jupyter's kernel does. What it shows: its last value, formatted; or raises its error."""
    running = shell.run_cell_async(code, transformed_cell=shell.transform_cell(code), store_history=False)
    done = await asyncio.create_task(running)
    done.raise_error()
    return None if done.result is None else shell.display_formatter.format(done.result)[0]


# -- in IPython ------------------------------------------------------------------------------------------------------


@on_bench
async def test_an_engine_of_one_cell_is_used_in_others_and_closed_in_the_last(
    asyncio_bench: Bench, shell: InteractiveShell
) -> None:
    shell.user_ns |= {"engine": asyncio_bench.engine(), "query": query}
    await cell(shell, "await engine.open()")
    await cell(shell, "whole = await engine.generate(**query(1))")
    await cell(shell, "async with engine.stream(**query(2)) as deltas:\n    parts = [delta async for delta in deltas]")
    shown = await cell(shell, "engine.statistics()")
    assert "<th" in shown["text/html"]
    assert "EngineStatistics(" in shown["text/plain"]
    shown = await cell(shell, "engine")
    assert "&lt;Engine of parts of its maker&#x27;s on sim: open&gt;" in shown["text/html"]
    await cell(shell, "await engine.aclose()")
    shown = await cell(shell, "engine")
    assert shown == {"text/plain": "<Engine of parts of its maker's on sim: closed>"}
    assert shell.user_ns["whole"].token_ids == expected(1)
    assert tuple(token for part in shell.user_ns["parts"] for token in part.token_ids) == expected(2)


def test_an_engine_of_threads_needs_no_await(shell: InteractiveShell) -> None:
    bench = SyncBench()

    async def main() -> None:
        shell.user_ns |= {"engine": bench.engine(), "query": query}
        await cell(shell, "engine.open()")
        await cell(shell, "whole = engine.generate(**query(1))")
        shown = await cell(shell, "engine")
        assert "&lt;SyncEngine of " in shown["text/html"]
        await cell(shell, "engine.close()")
        shown = await cell(shell, "engine")
        assert shown == {"text/plain": "<SyncEngine of parts of its maker's on sim: closed>"}
        assert shell.user_ns["whole"].token_ids == expected(1)

    bench.run(lambda: asyncio.run(main()))


def test_the_table_tells_the_figures_that_the_model_has() -> None:
    with SyncEngine.from_parts(SimExecutor, lambda: SimWorker(dict.fromkeys(Job, 0.0))) as engine:
        before = dict(engine.statistics().rows())
        engine.generate(**query(1))
        after = dict(engine.statistics().rows())
    assert before["power"] == "awake"
    assert "committed" not in before["requests"]
    assert f"tokens committed {len(expected(1))}" in after["requests"]
    assert "encoder cache" not in before
    assert after["encoder cache"].startswith("acquires 1, encoded 1, ")
    assert after["memory on sim"].endswith("MiB")


# -- on all hosts ----------------------------------------------------------------------------------------------------


def test_without_a_block_it_lives_on_asyncio_and_is_refused_on_trio(bench: Bench) -> None:
    async def main() -> None:
        engine = bench.engine()
        if bench.host.name == "trio":
            with pytest.raises(
                EngineStateError, match=r"open\(\) was called under trio.*use async with Engine.*SyncEngine"
            ):
                await engine.open()
            async with engine:
                await ask(engine, 1)
            return
        await engine.open()
        with pytest.raises(EngineStateError, match="open, and an engine can be entered only once"):
            await engine.open()
        with pytest.raises(EngineStateError, match="open, and an engine can be entered only once"):
            async with engine:
                raise AssertionError("entered")
        await ask(engine, 1)
        await engine.aclose()
        await engine.aclose()
        with pytest.raises(EngineStateError, match=r"closed: its block has ended or aclose\(\) was called. Open a new"):
            await ask(engine, 1)

    bench.run(main)


@on_bench
async def test_a_cancelled_aclose_ends_the_drain_and_not_the_order(asyncio_bench: Bench) -> None:
    held = asyncio_bench.hold(until_teardown=False)
    closing, hurried = asyncio_bench.stage("intake closed"), asyncio_bench.stage("drain deadline")
    engine = asyncio_bench.engine(drain_seconds=1e6)

    async def refused() -> None:
        with pytest.raises(EngineClosed):
            await ask(engine, 1)

    await engine.open()
    call = asyncio.create_task(refused())
    await held.reached.wait()
    ending = asyncio.create_task(engine.aclose())
    await closing.wait()
    ending.cancel()
    await hurried.wait()
    asyncio_bench.worker.end_hold(held)
    await asyncio.wait([ending, call])
    assert ending.cancelled()
    assert not loops()
    assert asyncio_bench.outcomes() == ["aborted"]


@on_bench
async def test_a_crash_cancels_nobody(asyncio_bench: Bench) -> None:
    """Not even the task that opened the engine, though it still runs."""
    asyncio_bench.executor.fault = crash

    closed = asyncio_bench.stage("channels closed")
    engine = asyncio_bench.engine()
    await engine.open()
    with pytest.raises(RunnerCrashed):
        await ask(engine, 1)
    await closed.wait()
    for thread in loops():
        thread.join(PATIENCE)
    with pytest.raises(EngineStateError, match=r"closed: it failed \(RunnerCrashed: .*dead"):
        await ask(engine, 1)
    with pytest.raises(RunnerCrashed, match="dead"):
        await engine.aclose()
    await engine.aclose()
