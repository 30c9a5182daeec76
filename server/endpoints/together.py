"""Several calls of one engine at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio
from attrs import evolve

from ...api.engine import Engine
from ...api.hosts.alternatives import run_together
from ...api.inputs.prompts import Query
from ...api.outputs.results import Delta, Usage
from ...core.request import Request
from ...core.timings import Timings


async def streams_together(
    engine: Engine, queries: list[Query], tell: Callable[[int, Delta], Awaitable[None]], *, counts: bool = False
) -> tuple[list[Usage], Timings | None]:
    """Streams the ``n`` answers to each of ``queries``. Each delta is passed to ``tell`` as it comes, with the index of
    its answer. The answers to the first query have the first indexes. All answers to a query share one reading of its
    prompt. If one answer fails, all are ended. Returns the usage of each answer, and the timings of the first one.
    ``counts``: each delta has the usage so far.
    """
    send, receive = trio.open_memory_channel[tuple[int, Delta]](0)
    asked = trio.current_time()

    async def follow(request: Request, index: int) -> tuple[Usage | None, Timings | None]:
        usage, written, before = None, 0, 0
        async with engine.inside.follow(request, asked, wait=True) as deltas:
            async for delta in deltas:
                written, before = written + len(delta.token_ids), before + delta.reasoning_tokens
                told = {"completion_tokens": written, "reasoning_tokens": before}
                usage = delta.usage or Usage(prompt_tokens=len(request.prompt_token_ids), **told)
                await send.send((index, evolve(delta, usage=usage) if counts else delta))
            return usage, deltas.timings

    async def answer(place: int) -> list[tuple[Usage | None, Timings | None]]:
        requests = await engine.inside.requests_of(queries[place])
        first = place * len(requests)
        return await run_together([partial(follow, one, first + number) for number, one in enumerate(requests)])

    async def answer_all() -> list[list[tuple[Usage | None, Timings | None]]]:
        async with send:
            return await run_together([partial(answer, place) for place in range(len(queries))])

    async def relay() -> list[list[tuple[Usage | None, Timings | None]]]:
        async with receive:
            async for index, delta in receive:
                await tell(index, delta)
        return []

    _, answers = await run_together([relay, answer_all])
    ends = [end for several in answers for end in several]
    return [usage for usage, _ in ends if usage is not None], ends[0][1]
