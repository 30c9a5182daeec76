"""Stop strings and several completions on all hosts: what a caller gets, and what is left when it goes."""

from __future__ import annotations

from typing import Any

import pytest

from triolet import Completion, Engine, FinishReason, InvalidRequest, SamplingParams, Structure
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimTokenizer

from ..actors.shared import TextModel
from .hosts import (
    Bench,
    ask,
    expected,
    on_bench,
    query,
)

pytestmark = pytest.mark.real_time

LENGTH = 20


@pytest.fixture
def texts(bench: Bench) -> Bench:
    bench.executor = SimExecutor(TextModel())
    return bench


NUMBER = next(number for number in range(40) if len(expected(number, LENGTH)) == LENGTH)
TEXT = SimTokenizer().decode(expected(NUMBER, LENGTH))
STOP = TEXT[6:9]


async def generate(engine: Engine, **sampling: Any) -> Completion:
    params = SamplingParams(**{"max_tokens": LENGTH, **sampling})
    return await engine.generate(**{**query(NUMBER), "sampling": params})


@on_bench
async def test_a_stop_string_ends_completions_and_streams_and_several_come_in_one(texts: Bench) -> None:
    async with texts.engine() as engine:
        completion = await generate(engine, stop=STOP)
        assert (completion.text, completion.finish_reason) == (TEXT[:6], FinishReason.STOP)
        sampling = SamplingParams(max_tokens=LENGTH, stop=STOP)
        async with engine.stream(**{**query(NUMBER), "sampling": sampling}) as deltas:
            parts = [delta async for delta in deltas]
            assert "".join(part.text for part in parts) == TEXT[:6]
            assert parts[-1].finish_reason is FinishReason.STOP
            await ask(engine, NUMBER)  # while the block of the stream is open
        several = await generate(engine, n=3)
        assert [one.text for one in (several, *several.alternatives)] == [TEXT] * 3
        assert engine.inside.pending == 0
    assert texts.outcomes() == ["finished"] * 6


@on_bench
async def test_a_caller_of_several_that_is_cancelled_withdraws_them_all(texts: Bench) -> None:
    """The host sees its own cancellation, and no group of the other side's."""
    held = texts.hold(after=4)
    async with texts.engine() as engine, texts.host.group() as group:
        victim = group.start(lambda: generate(engine, n=3))
        await held.reached.wait()
        victim.cancel()
        await victim.ended()
        texts.worker.end_hold(held)  # not before: else the device may be done with them sooner
        assert victim.cancelled
        await ask(engine, NUMBER)
        assert engine.inside.pending == 0
    assert sorted(texts.outcomes()) == ["aborted"] * 3 + ["finished"]


@on_bench
async def test_what_cannot_be_followed_is_refused_before_there_is_a_request(texts: Bench) -> None:
    async with texts.engine() as engine:
        with pytest.raises(InvalidRequest, match="unclosed"):
            await generate(engine, structure=Structure(kind="regex", text="(["))
        with pytest.raises(InvalidRequest, match="generate"):
            async with engine.stream(**{**query(NUMBER), "sampling": SamplingParams(n=2)}):
                raise AssertionError("entered")
        await ask(engine, NUMBER)
    assert texts.outcomes() == ["finished"]
