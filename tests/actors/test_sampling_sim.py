"""Stop strings and several completions through the real actors, over a simulated device and virtual time.

A token of the simulated device is one character, and what it draws is known (`expected_tokens`).
"""

from __future__ import annotations

import pytest
import trio

from triolet import Engine, EngineConfig, FinishReason, Overloaded, SamplingParams
from triolet.actors.worker import Job
from triolet.core import events
from triolet.core.plan import StepPlan
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.sim_model import SimTokenizer

from .shared import TextModel, Trace, all_returned, audio, expected, prompt

LENGTH = 20


def device(**settings: object) -> SimExecutor:
    return SimExecutor(TextModel(), **settings)


def engine_of(executor: SimExecutor | None = None, **settings: object) -> Engine:
    return sim_engine(executor or device(), config=EngineConfig(**{"verify": True, **settings}))


def text_of(number: int) -> str:
    return SimTokenizer().decode(expected(number, LENGTH))


def stop_of(number: int) -> str:
    """Three characters in the middle of what the device writes for ``number``."""
    text = text_of(number)
    assert len(text) > 10
    return text[6:9]


def arguments(number: int, **sampling: object) -> dict[str, object]:
    params = SamplingParams(**{"max_tokens": LENGTH, **sampling})
    return {"prompt_token_ids": prompt(number), "audio": audio(number), "sampling": params}


def long_one() -> int:
    return next(number for number in range(40) if len(text_of(number)) == LENGTH)


async def test_a_stop_string_ends_the_text_and_the_request_at_once(autojump_clock):
    """No step feeds the request after the one that was on its way when the stop string was read."""
    number, trace, executor = long_one(), Trace(), device()
    async with all_returned(executor, trace), engine_of(executor, observer=trace.append) as engine:
        completion = await engine.generate(**arguments(number, stop=stop_of(number)))
        await trio.sleep(5)
        assert engine.statistics().requests.running == 0
    assert completion.text == text_of(number)[:6]
    assert completion.finish_reason is FinishReason.STOP
    assert completion.token_ids == expected(number, LENGTH)[:9]
    assert len(completion.logprobs) == 9
    assert completion.usage.completion_tokens == 9
    fed = [step for step in trace.of(events.StepBegun) if step.tokens]
    assert len(fed) <= 9 + 2, "two steps may be in flight when the ninth token is read"


@pytest.mark.parametrize("waits", [0, 5])
async def test_a_stream_ends_at_a_stop_string_and_withdraws_its_request_before_it_is_left(waits, autojump_clock):
    """Also where nobody reads it for a while."""
    number, trace = long_one(), Trace()
    async with engine_of(observer=trace.append) as engine:
        async with engine.stream(**arguments(number, stop=("nowhere", stop_of(number)))) as deltas:
            await trio.sleep(waits)
            assert [event.outcome for event in trace.of(events.RequestEnded)] == (["finished"] if waits else [])
            parts = [delta async for delta in deltas]
            await trio.sleep(1)
            assert trace.of(events.RequestEnded), "it still ran in the block"
            assert [delta async for delta in deltas] == []
    assert "".join(part.text for part in parts) == text_of(number)[:6]
    assert [part.finish_reason for part in parts] == [*[None] * (len(parts) - 1), FinishReason.STOP]
    assert tuple(token for part in parts for token in part.token_ids) == expected(number, LENGTH)[:9]


# -- several completions ---------------------------------------------------------------------------------------------


class Starts:
    """Notes when sequences start, and can make the steps fail that start the one after so many."""

    def __init__(self, fails_after: int = 1000) -> None:
        self.seeds: list[int] = []
        self.steps = 0
        self.first_step_of: list[int] = []
        self.fails_after = fails_after

    def __call__(self, job: Job, argument: object) -> Exception | None:
        if not isinstance(argument, StepPlan):
            return None
        self.steps += 1
        for start in argument.started:
            self.seeds.append(start.sampling.seed)
            self.first_step_of.append(self.steps)
        broken = {start.sampling.seed for start in argument.started} - set(self.seeds[: self.fails_after])
        return RuntimeError("crash") if broken else None


async def test_several_completions_of_one_prompt_start_when_the_first_has_its_first_token(autojump_clock):
    starts, trace = Starts(), Trace()
    executor = device(fault=starts)
    async with all_returned(executor, trace):
        async with engine_of(executor, observer=trace.append) as engine:
            completion = await engine.generate(**arguments(long_one(), n=3, seed=5))
    assert [one.token_ids for one in (completion, *completion.alternatives)] == [expected(long_one(), LENGTH)] * 3
    assert [one.alternatives for one in completion.alternatives] == [(), ()]
    sampling = SamplingParams(seed=5, n=3)
    assert starts.seeds[0] == 5
    assert sorted(starts.seeds) == sorted(sampling.sibling(index).seed for index in range(3))
    assert starts.first_step_of[1] > starts.first_step_of[0]
    assert executor.calls.count(Job.ENCODE) == 1
    assert [event.outcome for event in trace.of(events.RequestEnded)] == ["finished"] * 3


async def test_one_that_fails_ends_the_others_and_its_error_comes_alone(autojump_clock):
    starts, trace = Starts(fails_after=1), Trace()
    executor = device(fault=starts)
    async with all_returned(executor, trace):
        async with engine_of(executor, observer=trace.append) as engine:
            with pytest.raises(Exception, match="crash") as caught:
                await engine.generate(**arguments(long_one(), n=3))
            await trio.sleep(5)
            assert engine.statistics().requests.running == 0
    assert not isinstance(caught.value, BaseExceptionGroup)
    assert {event.outcome for event in trace.of(events.RequestEnded)} == {"failed", "aborted"}


@pytest.mark.parametrize("after", [0.1, 0.4])
async def test_cancelling_the_caller_withdraws_all_of_them_and_raises_no_group(after, autojump_clock):
    trace = Trace()
    cancelled = []
    async with engine_of(observer=trace.append) as engine:
        with trio.move_on_after(after) as scope:
            try:
                await engine.generate(**arguments(long_one(), n=3, ignore_eos=True, max_tokens=60))
            except BaseException as error:
                cancelled.append(type(error))
                raise
        assert scope.cancelled_caught
        await trio.sleep(1)
        assert engine.statistics().requests.running == engine.inside.pending == 0
    assert cancelled == [trio.Cancelled]
    assert {event.outcome for event in trace.of(events.RequestEnded)} <= {"aborted"}


async def test_several_completions_wait_for_admission_one_by_one(autojump_clock):
    """A queue with one place serves them one after another; who does not want to wait is refused, and nothing stays."""
    async with engine_of(max_pending=1) as engine:
        completion = await engine.generate(**arguments(long_one(), n=3))
        assert len(completion.alternatives) == 2
        with pytest.raises(Overloaded):
            await engine.generate(**arguments(long_one(), n=3), wait=False)
        await trio.sleep(1)
        assert engine.inside.pending == 0
