"""Schedules reach the orders that trio's own cannot, replay exactly, and shrink to what matters."""

from __future__ import annotations

import gc

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import find, settings

from triolet_testing.trio_tools.schedules import Batches, Deadlock, Listed, Pct, Schedule, Uniform, run_scheduled

NAMES = "abcd"
BAD_ORDER = "dacb"  # one of 24


async def four_tasks() -> str:
    """Four tasks, each of which writes its name once."""
    order: list[str] = []

    async def write(name: str) -> None:
        await trio.lowlevel.checkpoint()
        order.append(name)

    async with trio.open_nursery() as nursery:
        for name in NAMES:
            nursery.start_soon(write, name)
    return "".join(order)


async def slow_and_fast() -> bool:
    """Whether the fast task took four steps before the slow one took its first: never in trio's own batches."""
    steps = 0

    async def fast() -> None:
        nonlocal steps
        for _ in range(6):
            await trio.lowlevel.checkpoint()
            steps += 1

    overtaken = False

    async def slow() -> None:
        nonlocal overtaken
        await trio.lowlevel.checkpoint()
        overtaken = steps >= 4

    async with trio.open_nursery() as nursery:
        nursery.start_soon(slow)
        nursery.start_soon(fast)
    return overtaken


@pytest.mark.parametrize("kind", [Batches, Uniform, Pct])
def test_the_same_seed_gives_the_same_run(kind):
    runs = [run_scheduled(four_tasks, schedule=kind(seed)) for seed in (*range(20), *range(20))]
    assert runs[:20] == runs[20:]
    assert len(set(runs)) > 5


def test_a_planted_bug_in_one_of_24_orders_is_found_within_300_examples_and_shrunk():
    """By seeds, and by sampled choices that Hypothesis shrinks to the shortest list that still fails."""
    by_seed = [seed for seed in range(300) if run_scheduled(four_tasks, schedule=Uniform(seed)) == BAD_ORDER]
    assert by_seed
    choices = st.lists(st.integers(0, 4), max_size=24).map(Listed)
    found = find(
        choices,
        lambda schedule: run_scheduled(four_tasks, schedule=schedule) == BAD_ORDER,
        settings=settings(max_examples=300, derandomize=True, database=None),
    )
    print(f"\nfound by {len(by_seed)} of 300 seeds, first by seed {by_seed[0]}; shrunk to {found!r}")  # noqa: T201
    assert run_scheduled(four_tasks, schedule=found) == BAD_ORDER
    assert len(found.choices) <= 12


@pytest.mark.parametrize(("kind", "finds"), [(Batches, False), (Uniform, True), (Pct, True)])
def test_only_one_task_a_tick_lets_a_task_fall_behind(kind, finds):
    """trio's own batches give every task its turn, so a whole family of orders never happens under them."""
    assert any(run_scheduled(slow_and_fast, schedule=kind(seed)) for seed in range(60)) is finds


@pytest.mark.parametrize("schedule", [Batches(1), Uniform(1), Pct(1), Listed((1,))])
def test_a_deadlock_is_told_with_the_tree_of_tasks(schedule: Schedule):
    """It does not spin, and what the program cleans up is cleaned up."""
    cleaned = []

    async def waits_for_nobody() -> None:
        send, receive = trio.open_memory_channel[int](0)
        with send, receive:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever, name="sleeper")
                try:
                    await receive.receive()
                finally:
                    cleaned.append("channel")

    with pytest.raises(Deadlock, match=r"(?s)main.*waits_for_nobody.*\n.*sleeper"):
        run_scheduled(waits_for_nobody, schedule=schedule)
    assert cleaned == ["channel"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it is left where it stands
def test_a_program_that_does_not_even_end_when_cancelled_is_told():
    async def shielded() -> None:
        with trio.CancelScope(shield=True):
            await trio.sleep_forever()

    with pytest.raises(Deadlock, match="although it was cancelled"):
        run_scheduled(shielded)
    gc.collect()


def test_errors_and_results_come_through():
    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        run_scheduled(fails)
    assert repr(Uniform(3)) == "Uniform(seed=3)"
    assert repr(Pct(1)) == "Pct(seed=1, depth=3, ticks=400)"
