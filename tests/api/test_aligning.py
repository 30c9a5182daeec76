"""`Engine.align` on every host, over a simulated model."""

from __future__ import annotations

from typing import Any

import pytest

from triolet import ContextLengthExceeded, InvalidRequest, Word
from triolet.actors.worker import Job
from triolet.api.inputs.audio import content_key
from triolet.core.request import Alignment
from triolet.testing.sim import SimExecutor
from triolet.testing.sim_model import START, expected_alignment

from .hosts import Bench, audio, on_bench, on_threads_too
from .sim_aligner import FRAMES, SECONDS, AligningModel

pytestmark = pytest.mark.real_time

TEXT = " one 22 three, four"


def aligned(number: int) -> tuple[Word, ...]:
    """The words of `TEXT` in `audio`, if the engine does nothing else."""
    alignment = Alignment(start=1, frames=FRAMES)
    answer = expected_alignment([START, 5, 8, 6], content_key(audio(number), "sim"), alignment)
    one, three, four, end = (round(SECONDS * frame, 3) for frame in answer.frames)
    return (
        Word(text=" one", start=one, end=three, probability=0.5),
        Word(text=" 22", start=three, end=three, probability=0.0),
        Word(text=" three,", start=three, end=four, probability=0.5),
        Word(text=" four", start=four, end=end, probability=0.5),
    )


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.executor = SimExecutor(AligningModel())
    return bench


async def ask(engine: Any, number: int) -> None:
    assert await engine.align(audio(number), TEXT, "English") == aligned(number)


@on_threads_too
@on_bench
async def test_every_task_gets_the_words_of_its_own_text(bench: Bench) -> None:
    async with bench.engine() as engine, bench.host.group() as group:
        for number in range(12):
            group.start(ask, engine, number % 5)
    assert bench.outcomes() == ["finished"] * 12


@on_bench
async def test_a_cancelled_alignment_is_aborted_and_others_go_on(bench: Bench) -> None:
    hold = bench.hold(Job.STEP)
    async with bench.engine() as engine, bench.host.group() as group:
        handle = group.start(ask, engine, 1)
        await hold.reached.wait()
        other = group.start(ask, engine, 2)
        handle.cancel()
        await handle.ended()
        bench.worker.end_hold(hold)
        await other.ended()
    assert handle.cancelled
    assert sorted(bench.outcomes()) == ["aborted", "finished"]


@on_threads_too
@on_bench
async def test_what_cannot_be_aligned_is_refused_by_name(bench: Bench) -> None:
    async with bench.engine() as engine:
        assert await engine.align(audio(1), " \n") == ()
        (word,) = await engine.align(audio(1), "123")
        assert (word.text, word.start, word.end, word.probability) == ("123", 0.0, 0.1, 0.0)
        for text, language, message in (
            (3, None, "text=3"),
            (TEXT, "klingon", "klingon"),
            (TEXT, "de", "allowed: 'en'"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await engine.align(audio(1), text, language)
        with pytest.raises(ContextLengthExceeded, match="positions"):
            await engine.align(audio(1), "a " * 64)


@on_threads_too
@on_bench
async def test_a_model_that_aligns_nothing_says_so(bench: Bench) -> None:
    bench.executor = SimExecutor()
    async with bench.engine() as engine:
        with pytest.raises(InvalidRequest, match="allowed: Qwen3-ForcedAligner"):
            await engine.align(audio(1), TEXT)
