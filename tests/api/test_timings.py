"""How long a request took, what it costs its reader to wait, and what the engine says to those who read too early."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import trio

from triolet import Engine, EngineConfig, EngineStateError, InvalidRequest, SamplingParams, Timings
from triolet.actors.messages import Finished
from triolet.api.outputs.streams import FAIR, Deltas, Mailbox
from triolet.api.outputs.text import Output, StopStrings
from triolet.core.plan import SampledToken
from triolet.core.request import FinishReason
from triolet_testing.sim import sim_engine

from .hosts import HOSTS, Bench, SpeakingModel, audio, query

ZERO = Timings(queued=0.0, encoder_wait=0.0, first_token=None, total=0.0)


@pytest.fixture(params=HOSTS, ids=lambda host: host.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(request.param)


def assert_told(timings: Timings | None) -> None:
    assert timings is not None
    assert 0 <= timings.encoder_wait <= timings.queued <= timings.total
    assert timings.first_token is None or timings.queued <= timings.first_token <= timings.total


# -- timings ---------------------------------------------------------------------------------------------------------


def test_results_and_their_streams_tell_how_long_they_took(bench: Bench) -> None:
    bench.executor.model = SpeakingModel()

    async def main() -> None:
        async with bench.engine() as engine:
            several = await engine.generate(**{**query(1), "sampling": SamplingParams(max_tokens=3, n=2)})
            for one in (await engine.generate(**query(1)), several, *several.alternatives):
                assert_told(one.timings)
            assert_told((await engine.transcribe(audio(1), temperature=0.0)).timings)
            for block in (engine.stream(**query(2)), engine.stream_transcription(audio(2), temperature=0.0)):
                async with block as parts:
                    assert parts.timings is None
                    async for _ in parts:
                        pass
                    assert_told(parts.timings)
                assert_told(parts.timings)

    bench.run(main)


async def test_the_wait_at_the_door_is_part_of_the_timings(autojump_clock: object) -> None:
    async with sim_engine(config=EngineConfig(max_pending=1)) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(_ask, engine)
        await trio.testing.wait_all_tasks_blocked()
        began = trio.current_time()
        completion = await engine.generate(**query(2))
        took = trio.current_time() - began
    assert completion.timings is not None
    assert completion.timings.queued > 0
    assert completion.timings.total <= took


async def _ask(engine: Engine) -> None:
    await engine.generate(**query(1))


# -- wakes -----------------------------------------------------------------------------------------------------------


class Wakes(trio.abc.Instrument):
    """How often each task was woken, by its name."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.counts[task.name] = self.counts.get(task.name, 0) + 1


async def _read_all(engine: Engine) -> None:
    async with engine.stream(**query(3)) as deltas:
        async for _ in deltas:
            pass


async def test_a_completion_is_woken_at_its_end_and_a_reader_once_for_each_step(autojump_clock: object) -> None:
    wakes = Wakes()
    async with sim_engine() as engine:
        trio.lowlevel.add_instrument(wakes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_ask, engine, name="completion")
            nursery.start_soon(_read_all, engine, name="reader")
        trio.lowlevel.remove_instrument(wakes)
    assert wakes.counts["completion"] == 3, "its start, its way through the door, and its end"
    assert wakes.counts["reader"] <= 2 + 21, "one for each of its tokens, and their end"


def _deltas() -> tuple[Mailbox, Deltas]:
    mailbox = Mailbox(lambda: None)
    output = Output(prompt_tokens=1, stop_ids=frozenset(), texts=None, stops=StopStrings(()), tops=False)
    return mailbox, Deltas(mailbox, output)


async def test_a_burst_wakes_its_reader_once_and_a_long_one_lets_others_have_their_turns() -> None:
    mailbox, deltas = _deltas()
    got: list[int] = []
    wakes = Wakes()

    async def read() -> None:
        async for delta in deltas:
            got.extend(delta.token_ids)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, name="reader")
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(wakes)
        mailbox.put(tuple(SampledToken(token_id=token) for token in range(3 * FAIR)))
        mailbox.end(Finished(FinishReason.LENGTH, ZERO))
    trio.lowlevel.remove_instrument(wakes)
    assert got == list(range(3 * FAIR))
    assert wakes.counts["reader"] == 1 + 3


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    mailbox, deltas = _deltas()
    with trio.CancelScope() as scope:
        scope.cancel()
        await anext(deltas)
    assert scope.cancelled_caught
    mailbox.put((SampledToken(token_id=7),))
    mailbox.end(Finished(FinishReason.LENGTH, ZERO))
    assert [delta.token_ids async for delta in deltas] == [(7,), ()]
    with pytest.raises(StopAsyncIteration):
        await anext(deltas)


# -- misuse ----------------------------------------------------------------------------------------------------------


def test_a_stream_that_is_read_unopened_says_how_to_open_it(bench: Bench) -> None:
    async def main() -> None:
        async with bench.engine() as engine:
            unopened: Any = engine.stream(**query(1))
            with pytest.raises(EngineStateError, match=r"async with engine\.stream\(\.\.\.\) as"):
                async for _ in unopened:
                    raise AssertionError("read")
            with pytest.raises(EngineStateError, match=r"async with engine\.stream_transcription"):
                await engine.stream_transcription(audio(1))  # type: ignore[misc]

    bench.run(main)


@pytest.mark.parametrize("priority", [101, 1.5, True])
async def test_a_priority_that_cannot_be_is_refused_wherever_it_enters(priority: Any, autojump_clock: object) -> None:
    async with sim_engine() as engine:
        for call in (partial(engine.generate, **query(1)), partial(engine.transcribe, audio(1))):
            with pytest.raises(InvalidRequest, match="priority="):
                await call(priority=priority)
        for open_ in (partial(engine.stream, **query(1)), partial(engine.stream_transcription, audio(1))):
            with pytest.raises(InvalidRequest, match="priority="):
                async with open_(priority=priority):
                    raise AssertionError("opened")


@pytest.mark.parametrize("model", [3, None, b"folder"])
def test_a_model_that_is_no_name_is_refused(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"model=.*allowed: the folder of a checkpoint, or a hub id"):
        Engine(model)
