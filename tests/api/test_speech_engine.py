"""Transcriptions by an engine: one encoding for all that is asked of a window, nothing left behind, pieces as one by
one. ``make soak`` runs them at their full size."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import trio
from hypothesis import settings

import triolet.demo
from triolet import Engine, EngineConfig, InvalidRequest
from triolet.api.inputs.audio import Samples, load_audio
from triolet_testing.sim import SimExecutor

from .hosts import Bench, SpeakingModel, TrioHost
from .speech import PaperVoice

RATE = 16_000
FAILS = {"logprob_threshold": 1.0, "no_speech_threshold": None}  # no text is so probable
WHOLE = settings.get_current_profile_name() == "soak"
CONFIG = EngineConfig(device="cpu", dtype="float32", verify=True)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine(triolet.demo.checkpoint(), config=CONFIG) as engine:
        yield engine


def recording(stem: str = "en-command") -> Samples:
    return load_audio(next(sample.path for sample in triolet.demo.samples() if sample.path.stem == stem))


async def test_all_that_is_asked_of_one_clip_encodes_it_once(engine: Engine) -> None:
    """Its language, beams, six temperatures with draws of each, both tasks, and the times of its words, which are
    within the audio, in order, and probable, since the model wrote them."""
    temperatures = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    options: dict[str, Any] = {"temperature": temperatures, "best_of": 5 if WHOLE else 2, **FAILS}
    samples = recording()
    transcript = await engine.transcribe(samples, **options)
    assert transcript.language_probability is not None, "the language was detected"
    await engine.transcribe(samples, task="translate", **options)
    spoken = await engine.transcribe(samples, timestamps="word")
    words = [word for segment in spoken.segments for word in segment.words or ()]
    assert "".join(word.text for word in words) == "".join(segment.text for segment in spoken.segments)
    times = [0.0, *(time for word in words for time in (word.start, word.end)), spoken.duration]
    assert times == sorted(times)
    assert np.mean([word.probability for word in words]) > 0.5
    assert engine.statistics().encoder_cache.encoded == 1
    assert engine.inside.pending == 0


async def test_a_recording_in_parallel_is_its_pieces_one_by_one(engine: Engine) -> None:
    """Texts, tokens and times: each piece stands where it stands, with silence in the place of the others."""
    samples = np.zeros((120 if WHOLE else 45) * RATE, np.float32)
    pieces = []
    short = [sample for sample in triolet.demo.samples() if 1 < sample.duration < 12 and sample.text]
    for start, sample in zip(range(0, len(samples), (20 if WHOLE else 15) * RATE), short, strict=False):
        heard = load_audio(sample.path)
        pieces.append(slice(start, start + len(heard)))
        samples[pieces[-1]] = heard
    options: dict[str, Any] = {"language": "en", "temperature": 0.0, "voice_activity": PaperVoice()}
    whole = await engine.transcribe(samples, parallel=True, **options)
    expected = []
    for piece in pieces:
        alone = np.zeros_like(samples)
        alone[piece] = samples[piece]
        found = await engine.transcribe(alone, **options)
        expected += [(one.start, one.end, one.token_ids) for one in found.segments]
    assert [(one.start, one.end, one.token_ids) for one in whole.segments] == expected
    assert len(pieces) > 2
    assert len(expected) >= len(pieces)


async def test_an_unknown_option_is_refused_before_the_audio_is_read(engine: Engine) -> None:
    wrong: dict[str, Any] = {"beams": 3}
    with pytest.raises(InvalidRequest, match=r"beams= is not an option of a transcription; did you mean beam_size\?"):
        await engine.transcribe("absent.wav", **wrong)
    with pytest.raises(InvalidRequest, match="beam_size"):
        engine.stream_transcription("absent.wav", **wrong)


@pytest.mark.parametrize("seed", range(6 if WHOLE else 3))
def test_a_transcription_that_is_cancelled_leaves_nothing(seed: int) -> None:
    """Whenever it happens: `Bench.run` sees that requests have ended, outputs are freed and no permit is lost."""
    choose = random.Random(seed)
    bench = Bench(TrioHost(), executor=SimExecutor(SpeakingModel()))

    async def ask(engine: Engine, index: int) -> None:
        samples = np.linspace(0.001, 0.002 + index, (95 if WHOLE else 65) * RATE, dtype=np.float32)
        await engine.transcribe(
            samples,
            parallel=choose.random() < 0.5,
            temperature=(0.0, 0.5, 1.0),
            beam_size=choose.choice([1, 2]),
            best_of=3,
            voice_activity=PaperVoice(),
            **FAILS,
        )

    async def main() -> None:
        async with bench.engine(max_pending=choose.choice([2, 64])) as engine:
            async with trio.open_nursery() as nursery:
                scopes = [trio.CancelScope() for _ in range(4)]
                for index, scope in enumerate(scopes):
                    nursery.start_soon(within, scope, engine, index)
                for scope in scopes[1:]:
                    for _ in range(choose.randrange(300)):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert engine.inside.pending == engine.inside.waiting == 0

    async def within(scope: trio.CancelScope, engine: Engine, index: int) -> None:
        with scope:
            await ask(engine, index)

    bench.run(main)
    assert bench.outcomes(), "something was asked"
