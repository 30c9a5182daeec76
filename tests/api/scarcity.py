"""Engines with too little of everything: all clients ask, until a request was preempted."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

import triolet
from triolet.actors.statistics import EngineStatistics

ROUNDS = 5
"""Who meets whom depends on threads. Where the most urgent come last, a round without a preemption is rare, and another
one follows it."""

_Ask = TypeVar("_Ask")


async def ask_until_preempted(
    engine: triolet.Engine,
    asks: Sequence[_Ask],
    answer: Callable[[_Ask], Awaitable[triolet.Completion]],
    tokens: Callable[[_Ask], tuple[int, ...]],
    *,
    at_once: int,
) -> list[triolet.Completion]:
    """The answers of the last round, in the order of ``asks``. In every round each has the ``tokens`` of its ask."""
    completions: list[triolet.Completion] = []
    for _ in range(ROUNDS):
        completions = await _round(asks, answer, at_once)
        for index, (ask, completion) in enumerate(zip(asks, completions, strict=True)):
            assert completion.token_ids == tokens(ask), f"request {index}: {ask}"
        if engine.statistics().requests.preemptions:
            break
    return completions


async def _round(
    asks: Sequence[_Ask], answer: Callable[[_Ask], Awaitable[triolet.Completion]], at_once: int
) -> list[triolet.Completion]:
    """``at_once`` clients ask together, and each other one when another has been answered."""
    ended = [trio.Event() for _ in asks]
    completions: dict[int, triolet.Completion] = {}

    async def client(index: int) -> None:
        if index >= at_once:
            await ended[index - at_once].wait()
        completions[index] = await answer(asks[index])
        ended[index].set()

    async with trio.open_nursery() as nursery:
        for index in range(len(asks)):
            nursery.start_soon(client, index)
    return [completions[index] for index in range(len(asks))]


async def settled(engine: triolet.Engine) -> EngineStatistics:
    """The books when the last step is answered and what it used is given back."""
    with trio.fail_after(300):
        while True:
            books = engine.statistics()
            requests, cache = books.requests, books.encoder_cache
            if not (requests.leaving or requests.steps_in_flight or cache.held or cache.waiting):
                return books
            await trio.sleep(0.001)
