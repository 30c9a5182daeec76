"""No word ends after the audio, whoever finds its time: cross-attention, frames, positions, or a live session."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import soundfile

from triolet import Engine, EngineConfig, demo
from triolet.api.outputs.results import Word

CPU = EngineConfig(dtype="float32", device="cpu")


def lies_within(words: list[Word], seconds: float) -> bool:
    found = [0.0, *(time for word in words for time in (word.start, word.end)), seconds]
    return all(first <= second for first, second in pairwise(found))


def spoken(seconds: float) -> tuple[Any, int]:
    """The beginning of a sentence, cut within a word and within a frame."""
    path = next(sample.path for sample in demo.samples() if "de-command" in str(sample.path))
    samples, rate = soundfile.read(str(path), dtype="float32")
    return samples[: round(seconds * rate)], rate


async def test_words_of_whisper_end_with_the_audio_at_any_cut() -> None:
    """In the recording as it was, a word that goes on at the cut ended a step after it."""
    async with Engine(demo.checkpoint(), config=CPU) as engine:
        lasts = list[float]()
        for cut in range(9):
            samples, rate = spoken(1.2 + 0.257 * cut)
            found = await engine.transcribe(samples, sampling_rate=rate, timestamps="word", parallel=cut % 2 == 1)
            words = [word for segment in found.segments for word in segment.words or ()]
            assert lies_within(words, found.duration)
            assert all(segment.end <= found.duration for segment in found.segments)
            lasts += [found.duration - word.end for word in words[-1:]]
    assert min(lasts) == 0.0, "no word reaches the end, so this shows nothing"


async def test_words_of_a_live_session_end_with_the_audio_at_any_cut() -> None:
    async with Engine(demo.checkpoint(), config=CPU) as engine:
        for cut in range(5):
            samples, rate = spoken(1.3 + 0.457 * cut)
            words = list[Word]()
            async with engine.live(rate=rate) as session:
                await session.feed(samples)
                await session.finish()
                async for update in session:
                    words += update.words
            assert lies_within(words, len(samples) / rate)


@pytest.mark.parametrize("family", ["parakeet_tdt", "kyutai_speech_to_text"])
async def test_words_by_frames_and_positions_end_with_the_audio(family: str, made: Callable[[str], Path]) -> None:
    """Models of random weights write something wherever they hear."""
    async with Engine(made(family), config=CPU) as engine:
        for seconds in (0.53, 1.011, 1.487):
            samples, rate = spoken(seconds)
            found = await engine.transcribe(samples, sampling_rate=rate, voice_activity="off", timestamps="word")
            words = [word for segment in found.segments for word in segment.words or ()]
            assert lies_within(words, found.duration)
            assert all(segment.end <= found.duration for segment in found.segments)
