"""Memory that does not grow, on the demo checkpoint: nothing is left of a request or an engine that has ended.

As in `test_memory.py`, the garbage collector is off: what dies here dies by reference count. Here with the thread and
the tensors of a real model.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
import trio
import trio.testing

import triolet.demo
from triolet import EncodeFailed, Engine, EngineConfig, Event, InvalidRequest, SamplingParams, UnsupportedAudio
from triolet.api.inputs.audio import Samples
from triolet.models.networks.whisper import WhisperModel
from triolet.testing import live_bytes

from ..heap import Level, assert_none, births, expected, garbage, not_theirs
from ..models.conftest import make_model, save_checkpoint

Ending = Callable[[Engine, int], Awaitable[None]]  # makes requests, the number says which, and lets them end


class Mine(Exception):
    """The user's own."""


# -- requests --------------------------------------------------------------------------------------------------------

EVENTS = trio.lowlevel.ParkingLot()  # every event of an engine wakes who is parked here


def wake(_: Event) -> None:
    EVENTS.unpark_all()


DEMO = EngineConfig(device="cpu", dtype="float32", max_running=8, verify=True, observer=wake)
ALONE = attrs.evolve(DEMO, threads=1)  # the process's threads: for one engine at a time


async def decoding(engine: Engine) -> None:
    """A step is under way."""
    while not engine.statistics().requests.steps_in_flight:
        await EVENTS.park()


async def quiet(engine: Engine) -> None:
    """No request and no step is under way. A checkpoint first: until then trio's loop holds the last message that it
    woke this task with."""
    await trio.lowlevel.checkpoint()
    while (now := engine.statistics().requests).waiting or now.running or now.leaving or now.steps_in_flight:
        await EVENTS.park()


def noise(number: int, seconds: float = 1.0) -> Samples:
    return (0.1 * np.random.default_rng(number).standard_normal(int(seconds * 16_000))).astype(np.float32)


def spoken(engine: Engine) -> list[int]:
    tokens = engine.model.whisper
    assert tokens is not None
    return [tokens.start_id, tokens.language_ids["en"], tokens.task_ids["transcribe"], tokens.no_timestamps_id]


async def decode(engine: Engine, number: int, *, tokens: int = 12) -> tuple[int, ...]:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    done = await engine.generate(prompt_token_ids=spoken(engine), audio=noise(number), sampling=sampling)
    return done.token_ids


async def decode_not_a_number(engine: Engine, number: int) -> None:
    samples = noise(number)
    samples[number] = math.inf
    with expected(InvalidRequest):
        await engine.generate(prompt_token_ids=spoken(engine), audio=samples)


async def encode_crashes(engine: Engine, number: int) -> None:
    def crash(_: object, features: object) -> None:
        raise RuntimeError("boom")

    with pytest.MonkeyPatch.context() as patch, expected(EncodeFailed):
        patch.setattr(WhisperModel, "encode", crash)
        await decode(engine, 1000 + number)  # audio that is not resident


async def decode_left_early(engine: Engine, number: int) -> None:
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    async with engine.stream(prompt_token_ids=spoken(engine), audio=noise(number), sampling=sampling) as deltas:
        async for _ in deltas:
            break


async def decode_cancelled(engine: Engine, number: int) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(decode, engine, number)
        await decoding(engine)
        nursery.cancel_scope.cancel()


async def transcribed(engine: Engine, number: int) -> None:
    """Transcribes a file, which is read in a thread, with detection of the language."""
    clips = sorted(triolet.demo.samples(), key=lambda clip: clip.duration)
    await engine.transcribe(clips[number].path, temperature=0.0)


async def transcription_left_early(engine: Engine, number: int) -> None:
    clip = max(triolet.demo.samples(), key=lambda clip: clip.duration)
    async with engine.stream_transcription(clip.path, language="en", temperature=0.0, seed=number) as segments:
        async for _ in segments:
            break


async def transcription_of_what_is_no_audio(engine: Engine, number: int) -> None:
    """A thread reads it, and finds that out."""
    with expected(UnsupportedAudio):
        await engine.transcribe(b"no audio" * (1000 + number))


REAL_ENDINGS: tuple[Ending, ...] = (
    decode,
    decode_not_a_number,
    encode_crashes,
    decode_left_early,
    decode_cancelled,
    transcribed,
    transcription_left_early,
    transcription_of_what_is_no_audio,
)


async def test_on_a_real_model_requests_make_no_garbage_and_leave_nothing_however_they_end() -> None:
    async with Engine(triolet.demo.checkpoint(), config=ALONE) as engine:
        for ending in REAL_ENDINGS:
            await ending(engine, 1)
            await quiet(engine)
            with births() as born, garbage() as found:
                for number in (2, 3):
                    await ending(engine, number)
                await quiet(engine)
                assert not born.alive, f"still alive: {born.alive}"
            assert_none(found)


# -- lives of engines ------------------------------------------------------------------------------------------------


async def real_left(model: Path) -> None:
    async with Engine(model, config=ALONE) as engine:
        await transcribed(engine, 1)


async def real_left_by_an_error(model: Path) -> None:
    with pytest.RaisesGroup(Mine):
        async with Engine(model, config=ALONE) as engine, trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(decode, engine, number)
            await decoding(engine)
            raise Mine


async def real_left_by_cancellation(model: Path) -> None:
    with trio.CancelScope() as scope:
        async with Engine(model, config=ALONE) as engine, trio.open_nursery() as nursery:
            nursery.start_soon(decode, engine, 1)
            await decoding(engine)
            scope.cancel()


async def real_cancelled_while_it_opens(model: Path) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(real_left, model)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_engines_on_a_real_model_come_and_go_and_leave_no_byte() -> None:
    """No tensor, no thread, no descriptor and no object of ours is left, however the block was left."""
    model = triolet.demo.checkpoint()
    levels: list[Level] = []

    async def one_round() -> None:
        for live in (real_left, real_left_by_an_error, real_left_by_cancellation, real_cancelled_while_it_opens):
            await live(model)
        levels.append(Level.now())

    await one_round()  # torch and transformers are imported and set up
    levels.clear()
    with garbage() as found:
        bytes_before = live_bytes()
        for _ in range(3):
            await one_round()
    assert levels == levels[:1] * 3
    assert levels[0].tensor_bytes == bytes_before
    assert_none(not_theirs(found))


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("other"), make_model(seed=5))


async def decode_all(engine: Engine, texts: dict[tuple[str, int], tuple[int, ...]], name: str) -> None:
    async def one(number: int) -> None:
        texts[name, number] = await decode(engine, number, tokens=30)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(one, number)


async def test_engines_side_by_side_do_not_know_of_one_another(other_model: Path) -> None:
    """Two on one model, one on another, their steps interleaved: each writes what it writes alone, and the end of one
    changes nothing for the others."""
    demo = triolet.demo.checkpoint()
    alone: dict[tuple[str, int], tuple[int, ...]] = {}
    async with Engine(demo, config=DEMO) as engine:
        await decode_all(engine, alone, "first")
        alone |= {("second", number): text for (_, number), text in alone.items()}
    async with Engine(other_model, config=DEMO) as engine:
        await decode_all(engine, alone, "other")
    together: dict[tuple[str, int], tuple[int, ...]] = {}
    async with Engine(demo, config=DEMO) as first, Engine(other_model, config=DEMO) as other:
        async with Engine(demo, config=DEMO) as second, trio.open_nursery() as nursery:
            for name, engine in (("first", first), ("second", second), ("other", other)):
                nursery.start_soon(decode_all, engine, together, name)
        assert together == alone
        before = [engine.statistics().device.by_owner for engine in (first, other)]
        again: dict[tuple[str, int], tuple[int, ...]] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode_all, first, again, "first")
            nursery.start_soon(real_left_by_an_error, demo)
            nursery.start_soon(decode_all, other, again, "other")
        assert again == {key: text for key, text in alone.items() if key[0] != "second"}
        assert [engine.statistics().device.by_owner for engine in (first, other)] == before
