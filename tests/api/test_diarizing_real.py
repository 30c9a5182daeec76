"""A tiny checkpoint of a diarizer through the whole engine: its turns are those of transformers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import trio

from triolet import Engine, EngineConfig, InvalidRequest, SamplingParams, Turn, demo
from triolet.models.blueprints.estimate import estimate

CONFIG = EngineConfig(dtype="float32", device="cpu", verify=True)
LENGTHS = (0.05, 0.8, 0.805, 1.12, 1.13, 6.4, 7.77)  # seconds: less than a chunk, whole chunks, and with some ahead
STREAMING = "low_latency"


@pytest.fixture(scope="module")
def folder(made: Callable[[str], Path]) -> Path:
    return made("nemotron3_diarization")


@cache
def sound(seconds: float, seed: int = 0) -> Any:
    """Noise with tones that come and go."""
    times = np.arange(round(seconds * 16_000)) / 16_000
    noise = np.random.default_rng(seed).normal(0, 0.05, len(times)) * (1.5 + np.sin(3 * times))
    tone = np.sin(2000 * times * (1 + np.floor(times + seed) % 3)) * (np.sin(2.3 * times + seed) > 0)
    return (noise + 0.3 * tone).astype(np.float32)


def turns_of(processor: Any, logits: Any, frames: int) -> tuple[Turn, ...]:
    """The turns of transformers' processor, with speakers named by their first turns."""
    (found,) = processor.extract_speaker_dict(logits[:, :frames])
    order = list(dict.fromkeys(one["Speaker"] for one in sorted(found, key=lambda one: (one["Start"], one["End"]))))
    turns = [(one["Start"], one["End"], one["Speaker"]) for one in found]
    return tuple(Turn(start=start, end=end, speaker="ABC"[order.index(one)]) for start, end, one in sorted(turns))


def whole(folder: Path, samples: Any) -> tuple[Turn, ...]:
    processor, model = opened(folder)
    with torch.no_grad():
        logits = model(**processor(samples, sampling_rate=16_000)).logits
    return turns_of(processor, logits, len(samples) // 160)


def streamed(folder: Path, samples: Any) -> tuple[Turn, ...]:
    """Chunk by chunk, as the model's documentation feeds a stream."""
    processor, model = opened(folder)
    logits, frame, state, last = [], 0, None, False
    while not last:
        start = max(processor.audio_chunk_start(frame), 0)
        stop = 160 * (frame + processor.num_mel_frames_per_audio_chunk - 1) + 256
        last = stop > len(samples)
        flags = {"is_streaming": True, "is_first_audio_chunk": not frame, "is_last_audio_chunk": last}
        inputs = processor(samples[start:stop], sampling_rate=16_000, **flags)
        with torch.no_grad():
            output = model(**{"num_lookahead_frames": 0, **inputs}, speaker_cache=state)
        logits.append(output.logits)
        state, frame = output.speaker_cache, frame + processor.num_mel_frames_per_step
    return turns_of(processor, torch.cat(logits, 1), len(samples) // 160)


@cache
def opened(folder: Path) -> tuple[Any, Any]:
    processor: Any = transformers.AutoProcessor.from_pretrained(folder)
    processor.set_streaming_mode(STREAMING)
    load: Any = transformers.AutoModelForAudioFrameClassification
    return processor, load.from_pretrained(folder, dtype=torch.float32).eval()


async def test_turns_are_those_of_transformers_alone_and_together(folder: Path) -> None:
    """The cache of the model is full after some chunks, and the engine's holds few of its outputs."""
    found: dict[tuple[int, str | None], Any] = {}
    engine = Engine(folder, config=CONFIG)

    async def ask(index: int, mode: str | None) -> None:
        found[index, mode] = await engine.diarize(sound(LENGTHS[index], index), mode=mode)

    async with engine, trio.open_nursery() as nursery:
        for index in range(len(LENGTHS)):
            nursery.start_soon(ask, index, None)
            nursery.start_soon(ask, index, STREAMING)
    for index, seconds in enumerate(LENGTHS):
        samples = sound(seconds, index)
        assert found[index, None] == whole(folder, samples)
        assert found[index, STREAMING] == streamed(folder, samples)
    assert {turn.speaker for turn in found[len(LENGTHS) - 1, None]} == {*"ABC"}
    assert any(one.end > two.start for one, two in zip(found[6, None], found[6, None][1:], strict=False))


async def test_audio_that_was_diarized_before_is_not_encoded_again_and_nothing_is_left_of_a_cancelled_call(
    folder: Path,
) -> None:
    samples = sound(6.4)
    async with Engine(folder, config=CONFIG) as engine:
        expected = await engine.diarize(samples)
        encoded = engine.statistics().encoder_cache.encoded
        assert encoded == 8
        assert await engine.diarize((samples, 16_000)) == expected
        assert engine.statistics().encoder_cache.encoded == encoded
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.diarize, sound(7.77))
            while engine.statistics().encoder_cache.encoded == encoded:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        assert await engine.diarize(samples) == expected
        statistics = engine.statistics()
        assert (statistics.requests.running, statistics.encoder_cache.held) == (0, 0)
        held = statistics.device.by_owner
        await engine.sleep()
        await engine.wake()
        assert await engine.diarize(samples) == expected
    thought = estimate(folder, CONFIG).by_owner
    assert 0.8 * held["weights"] <= thought["weights"] - (1 << 20) <= 1.2 * held["weights"]
    assert thought["encoder_outputs"] == CONFIG.encoder_cache_bytes >= held["encoder_outputs"] > 0


async def test_an_engine_is_a_diarizer_of_another_and_its_model_can_be_sent(folder: Path) -> None:
    samples = sound(6.4)
    async with Engine(folder, config=CONFIG) as diarizer, Engine(demo.checkpoint()) as engine:
        turns = await diarizer.diarize(samples)
        transcript = await engine.transcribe(samples, diarizer=diarizer)
        assert transcript.turns == turns
        assert transcript == await engine.transcribe(samples, diarizer=turns)
        sent = pickle.loads(pickle.dumps(diarizer.model.diarizer))
        with pytest.raises(InvalidRequest, match="cannot find speakers"):
            await engine.transcribe(samples, diarizer=engine)
    assert next(sent.read("offline", print)) == (0, 18_016)


async def test_what_it_cannot_do_is_refused_by_name(folder: Path) -> None:
    async with Engine(folder, config=CONFIG) as engine:
        with pytest.raises(InvalidRequest, match=r"use engine\.diarize"):
            await engine.generate("hello", sampling=SamplingParams(max_tokens=1))
        with pytest.raises(InvalidRequest, match="no vectors"):
            await engine.embed("hello")
        with pytest.raises(InvalidRequest, match="cannot transcribe"):
            await engine.transcribe(sound(1.13))
        with pytest.raises(InvalidRequest, match="mode='fast'; allowed: 'offline', 'low_latency'"):
            await engine.diarize(sound(1.13), mode="fast")
        with pytest.raises(InvalidRequest, match="threshold=2"):
            await engine.diarize(sound(1.13), threshold=2)
    with pytest.raises(InvalidRequest, match="allowed: "):
        async with Engine(folder, config=EngineConfig(device="cpu", part="encoder")):
            raise AssertionError("it opened")
