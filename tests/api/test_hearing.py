"""Speech is found ahead of a transcription: each span when it is final, out of bounded memory, whoever asks how."""

from __future__ import annotations

import io
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import trio
import trio.testing

from triolet.api.inputs.audio import Samples
from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import Hearing
from triolet.api.speech.plan import CutRules, Plan
from triolet.api.speech.voice import Probabilities, SpanRules, SpeechSpan
from triolet.core.errors import InvalidRequest

from .speech import PaperListener, PaperVoice
from .test_recording import sparse_wav

RATE, FRAME = 1_000, 100
ATTRIBUTES = {"sampling_rate": RATE, "frame_samples": FRAME}
RULES = SpanRules(min_speech=0, min_silence=0.4, padding=0.2)


def loud() -> PaperVoice:
    return PaperVoice(RATE, FRAME)


def spoken(*parts: tuple[float, float]) -> Samples:
    """Silence and speech in turns, in seconds."""
    turns = [turn for silence, speech in parts for turn in ((silence, 0), (speech, 0.5))]
    return np.concatenate([np.full(round(seconds * RATE), level, np.float32) for seconds, level in turns])


def wav(samples: Samples) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


TALK = spoken((20, 3), (15, 4), (0.3, 2), (9, 0))
SPANS = [SpeechSpan(19_800, 23_200), SpeechSpan(37_800, 44_500)]


async def all_spans(hearing: Hearing) -> list[SpeechSpan]:
    await hearing.hear(2**40)
    assert hearing.ended
    return [SpeechSpan(start, stop) for start, stop in hearing.spans]


@pytest.mark.parametrize("source", [TALK, wav(TALK)], ids=["an array", "a file"])
async def test_speech_is_known_as_far_as_anybody_asked(source: Samples | bytes) -> None:
    """No more of the recording is heard than was asked for, rounded up to what one call of a thread hears."""
    detector = loud()
    async with Recording(source, sampling_rate=RATE) as recording:
        hearing = Hearing(recording, detector, RULES)
        assert (detector.heard, hearing.heard, hearing.spans) == (0, 0, [])
        await hearing.hear(20_500)
        assert hearing.heard == detector.heard == 24_000
        assert hearing.spans == [(19_800, 23_200)]
        assert 23_200 <= hearing.settled <= 24_000
        assert await all_spans(hearing) == SPANS
        assert hearing.settled == hearing.heard == detector.heard == len(TALK)
        assert detector.listeners == 1


async def test_speech_that_goes_on_is_told_before_it_ends() -> None:
    """Who transcribes need not wait for the end of a long sentence to begin with it."""
    detector = loud()
    async with Recording(spoken((1, 300)), sampling_rate=RATE) as recording:
        hearing = Hearing(recording, detector, SpanRules())
        await hearing.hear(2_000)
        assert detector.heard == 8_000
        assert hearing.settled == 700
        ((start, stop),) = hearing.spans
        assert start == 700
        assert stop >= 8_000


async def test_an_hour_of_silence_takes_no_memory(tmp_path: Path) -> None:
    """Whoever looks for the next speech lets the silence before it go."""
    path = sparse_wav(tmp_path / "silence.wav", 3_600, RATE, 1)
    most = 0

    class Watching(PaperListener):
        def hear(self, samples: Samples) -> Probabilities:
            nonlocal most
            most = max(most, recording.held)
            return PaperListener.hear(self, samples)

    async with Recording(path, sampling_rate=RATE) as recording:
        voice = loud()
        hearing = Hearing(recording, SimpleNamespace(**ATTRIBUTES, listen=lambda: Watching(voice)), RULES)
        rules = CutRules(window=30 * RATE, gap=3 * RATE, padding=RATE, earliest=20 * RATE)
        assert await Plan(rules, ((0, math.inf),), hearing).next(0) is None
        assert hearing.settled == 3_600 * RATE
    assert most <= 60 * RATE


async def test_tasks_may_ask_at_once_and_nothing_is_heard_twice() -> None:
    detector = loud()
    async with Recording(TALK, sampling_rate=RATE) as recording:
        hearing = Hearing(recording, detector, RULES)
        async with trio.open_nursery() as nursery:
            for until in (10_000, 50_000, 30_000):
                nursery.start_soon(hearing.hear, until)
        assert await all_spans(hearing) == SPANS
    assert detector.heard == len(TALK)


async def test_a_cancelled_caller_loses_nothing() -> None:
    """Wherever it is cancelled, the next one finds the same spans."""
    for steps in range(12):
        async with Recording(wav(TALK), sampling_rate=RATE) as recording:
            hearing = Hearing(recording, loud(), RULES)
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_after, scope, steps)
                    await hearing.hear(2**40)
            assert await all_spans(hearing) == SPANS


async def cancel_after(scope: trio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_what_a_broken_recording_has_before_its_end_is_found() -> None:
    async with Recording(wav(TALK)[: -2 * 14_000], sampling_rate=RATE) as recording:
        spans = await all_spans(Hearing(recording, loud(), RULES))
        assert spans == [SPANS[0], SpeechSpan(37_800, recording.length or 0)]
        assert recording.broken is not None


async def test_a_detector_is_never_asked_about_no_samples() -> None:
    """What its end says is asked of `end` alone."""

    class Particular(PaperListener):
        def hear(self, samples: Samples) -> Samples:
            assert np.abs(samples).max() >= 0, "which no array has that is empty"
            return super().hear(samples)

    detector = SimpleNamespace(**ATTRIBUTES, listen=lambda: Particular(loud()))
    async with Recording(TALK[:-50], sampling_rate=RATE) as recording:
        assert await all_spans(Hearing(recording, detector, RULES)) == SPANS


@pytest.mark.parametrize("answer", [None, 0.5, [[0.5]], [0.5, 0.5]])
async def test_an_end_that_is_no_probability_is_refused(answer: object) -> None:
    def listen() -> SimpleNamespace:
        return SimpleNamespace(hear=PaperListener(loud()).hear, end=lambda: answer)

    async with Recording(TALK, sampling_rate=RATE) as recording:
        with pytest.raises(InvalidRequest, match=r"the voice activity detector returned .*; allowed: 0 prob"):
            await all_spans(Hearing(recording, SimpleNamespace(**ATTRIBUTES, listen=listen), RULES))


async def test_a_detector_of_another_rate_is_refused() -> None:
    async with Recording(TALK, sampling_rate=RATE) as recording:
        with pytest.raises(InvalidRequest, match="the voice activity detector has 16000 Hz; allowed: 1000 Hz"):
            Hearing(recording, PaperVoice(), RULES)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            np.zeros(3, np.float32),
            r"float32 of shape \(3,\); allowed: 80 probabilities \(floats from 0 to 1\), one for each frame of 100",
        ),
        (np.zeros((80, 1), np.float32), r"shape \(80, 1\); allowed: 80"),
        (np.zeros(80, np.int64), r"int64 of shape \(80,\); allowed"),
        (np.full(80, np.nan), r"floats from 0 to 1"),
        (np.full(80, 1.5), r"floats from 0 to 1"),
    ],
)
async def test_answers_that_are_no_probabilities_are_refused(answer: Probabilities, message: str) -> None:
    """A detector of somebody's own may be wrong: nothing is lost without a word."""

    wrong = SimpleNamespace(**ATTRIBUTES, listen=lambda: SimpleNamespace(hear=lambda _: answer))
    async with Recording(TALK, sampling_rate=RATE) as recording:
        with pytest.raises(InvalidRequest, match=message):
            await Hearing(recording, wrong, RULES).hear(1)
