"""Beam search through the real actors, over a simulated device and virtual time: what a caller gets, and when."""

from __future__ import annotations

import re

import pytest
import trio

from triolet import Engine, EngineConfig, FinishReason, InvalidRequest, RequestTooLarge, SamplingParams
from triolet.actors.worker import Job
from triolet.api.inputs.audio import content_key
from triolet.core.plan import Hypothesis, StepPlan
from triolet.core.request import EncoderItem, Request
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_beams import expected_hypotheses
from triolet_testing.sim_model import EOS, SimTokenizer

from .shared import TextModel, Trace, all_returned, audio, prompt

LENGTH = 12


def engine_of(executor: SimExecutor | None = None, **settings: object) -> Engine:
    return sim_engine(executor or SimExecutor(TextModel()), config=EngineConfig(**{"verify": True, **settings}))


def arguments(number: int, **sampling: object) -> dict[str, object]:
    params = SamplingParams(**{"max_tokens": LENGTH, "beam_size": 3, **sampling})
    return {"prompt_token_ids": prompt(number), "audio": audio(number), "sampling": params}


def found_of(number: int, **sampling: object) -> tuple[Hypothesis, ...]:
    ask = arguments(number, **sampling)
    return expected_hypotheses(
        ask["prompt_token_ids"], content_key(audio(number), "sim"), LENGTH, ask["sampling"], TextModel()
    )


def kept(hypothesis: Hypothesis) -> tuple[int, ...]:
    return hypothesis.token_ids[:-1] if hypothesis.token_ids[-1] == EOS else hypothesis.token_ids


def reason(hypothesis: Hypothesis) -> FinishReason:
    return FinishReason.STOP if hypothesis.token_ids[-1] == EOS else FinishReason.LENGTH


async def test_a_completion_is_the_best_hypothesis_and_its_alternatives_are_the_next(autojump_clock):
    trace, executor = Trace(), SimExecutor(TextModel())
    async with all_returned(executor, trace), engine_of(executor, observer=trace.append) as engine:
        for number in range(8):
            completion = await engine.generate(**arguments(number, n=3))
            found = found_of(number, n=3)
            assert len(found) == 3
            for one, true in zip((completion, *completion.alternatives), found, strict=True):
                assert one.token_ids == kept(true)
                assert one.text == SimTokenizer().decode(kept(true))
                assert one.finish_reason is reason(true)
                assert one.logprobs == true.logprobs[: len(kept(true))]
                assert one.score == true.score
                assert one.usage.completion_tokens == len(true.token_ids)
            assert completion.timings.first_token is not None
    assert {reason(found_of(number)[0]) for number in range(8)} == {FinishReason.STOP, FinishReason.LENGTH}


async def test_a_search_is_one_request_however_many_hypotheses_are_told(autojump_clock):
    async with engine_of(max_pending=1) as engine:
        completion = await engine.generate(**arguments(1, n=3))
        assert len(completion.alternatives) == 2
        plain = await engine.generate(**arguments(1, beam_size=1))
        assert plain.score is None


async def test_a_stream_of_a_search_has_one_delta_with_the_whole_output(autojump_clock):
    async with engine_of() as engine:
        async with engine.stream(**arguments(2)) as deltas:
            (delta,) = [delta async for delta in deltas]
        best = found_of(2)[0]
        assert delta.token_ids == kept(best)
        assert delta.text == SimTokenizer().decode(kept(best))
        assert delta.logprobs == best.logprobs[: len(kept(best))]
        assert delta.finish_reason is reason(best)
        assert delta.usage.completion_tokens == len(best.token_ids)
        with pytest.raises(InvalidRequest, match="n=2 for a stream"):
            async with engine.stream(**arguments(2, n=2)):
                pass


async def test_a_transcription_gets_the_best_hypothesis(autojump_clock):
    """Its tokens without the end-of-text, and the log-probabilities of all."""
    async with engine_of() as engine:
        item = EncoderItem(key=content_key(audio(3), "sim"), payload=audio(3), embeddings=10, size=100)
        request = Request(
            id="mine",
            prompt_token_ids=tuple(prompt(3)),
            items=(item,),
            sampling=arguments(3)["sampling"],
            max_tokens=LENGTH,
        )
        generated = await engine.inside._run(request, priority=0, wait=True)
        best = found_of(3)[0]
        assert generated.token_ids == kept(best)
        assert generated.logprobs == best.logprobs
        assert generated.finish_reason is reason(best)


async def test_a_search_that_the_pages_cannot_hold_is_refused_at_once(autojump_clock):
    async with engine_of(max_step_tokens=16) as engine:
        with pytest.raises(RequestTooLarge, match=r"take .* pages of KV; allowed: up to 64"):
            await engine.generate(**arguments(1, beam_size=16, max_tokens=None))
        with pytest.raises(
            RequestTooLarge, match="beam_size=17 needs a token of each beam in one step; allowed: up to 16"
        ):
            await engine.generate(**arguments(1, beam_size=17))
        assert (await engine.generate(**arguments(1, beam_size=4))).score is not None


async def test_a_search_may_take_all_pages_and_all_tokens_of_a_step(autojump_clock):
    ask = arguments(1, beam_size=4)
    async with engine_of(SimExecutor(TextModel(pages=4))) as engine:
        with pytest.raises(RequestTooLarge) as refused:
            await engine.generate(**ask)
    needed = int(re.search(r"take (\d+) pages", str(refused.value))[1])
    async with engine_of(SimExecutor(TextModel(pages=needed)), max_step_tokens=4) as engine:
        assert (await engine.generate(**ask)).token_ids == kept(found_of(1, beam_size=4)[0])
    async with engine_of(SimExecutor(TextModel(pages=needed - 1))) as engine:
        with pytest.raises(RequestTooLarge, match=f"take {needed} pages of KV; allowed: up to {needed - 1}"):
            await engine.generate(**ask)


async def test_a_step_too_large_for_memory_leaves_a_search_a_step_of_its_own(autojump_clock):
    """Beams cannot be divided: where steps shrink below them, they run alone."""

    def fault(job: Job, plan: object) -> Exception | None:
        return MemoryError("full") if isinstance(plan, StepPlan) and plan.tokens > 4 else None

    asks = [arguments(number, beam_size=4 if number % 2 else 1) for number in range(6)]
    async with engine_of(SimExecutor(TextModel(), fault=fault), max_step_tokens=32) as engine:
        results = [None] * len(asks)

        async def ask(number: int) -> None:
            results[number] = await engine.generate(**asks[number])

        async with trio.open_nursery() as nursery:
            for number in range(len(asks)):
                nursery.start_soon(ask, number)
    for number in (1, 3, 5):
        assert results[number].token_ids == kept(found_of(number, beam_size=4)[0])


async def test_a_search_that_does_not_fit_the_memory_fails_and_the_others_go_on(autojump_clock):
    def fault(job: Job, plan: object) -> Exception | None:
        return MemoryError("full") if isinstance(plan, StepPlan) and plan.tokens > 3 else None

    async with engine_of(SimExecutor(TextModel(), fault=fault), max_step_tokens=32) as engine:
        with pytest.raises(Exception, match="crashed its step"):
            await engine.generate(**arguments(1, beam_size=4))
        assert (await engine.generate(**arguments(1, beam_size=3))).token_ids == kept(found_of(1)[0])
