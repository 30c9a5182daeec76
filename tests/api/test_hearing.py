"""Speech is found ahead of a transcription: each span when it is final, out of bounded memory, whoever asks how."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
import trio
import trio.testing
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.inputs.audio import Samples
from triolet.api.inputs.recording import Recording
from triolet.api.speech.hearing import SpeechFinder, speech_spans
from triolet.api.speech.spans import SpanRules, SpeechSpan
from triolet.api.speech.voice import Probabilities
from triolet.core.errors import InvalidRequest

from .test_recording import sparse_wav

RATE, FRAME = 1_000, 100
RULES = SpanRules(min_speech=0, min_silence=0.4, padding=0.2, longest=10)


@define
class Loud:
    """Voice activity of loud samples: a frame is speech if its mean is above 0.1. It counts what it hears."""

    sampling_rate: int = RATE
    frame_samples: int = FRAME
    heard: int = 0
    listeners: list[LoudListener] = field(factory=list)

    def listen(self) -> LoudListener:
        self.listeners.append(LoudListener(self))
        return self.listeners[-1]


@define
class LoudListener:
    detector: Loud
    rest: Samples = field(factory=lambda: np.zeros(0, np.float32))

    def hear(self, samples: Samples) -> Probabilities:
        self.detector.heard += len(samples)
        whole = np.concatenate([self.rest, samples])
        count = len(whole) // FRAME
        self.rest = whole[count * FRAME :]
        return (whole[: count * FRAME].reshape(count, FRAME).mean(axis=1) > 0.1).astype(np.float32)

    def end(self) -> Probabilities:
        return self.hear(np.zeros(FRAME - len(self.rest), np.float32)) if len(self.rest) else self.rest


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


@pytest.mark.parametrize("source", [TALK, wav(TALK)], ids=["an array", "a file"])
async def test_spans_come_in_order_and_as_soon_as_they_are_final(source: Samples | bytes) -> None:
    """The first is told before the second was heard."""
    detector = Loud()
    async with Recording(source, sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, detector, RULES)
        assert detector.heard == 0, "nobody has asked"
        assert await finder.next_span() == SPANS[0]
        assert detector.heard == 24_000
        assert 23_200 <= finder.settled <= 24_000
        assert await finder.next_span() == SPANS[1]
        assert await finder.next_span() is None
        assert await finder.next_span() is None
        assert finder.settled == len(TALK)
        assert len(detector.listeners) == 1


async def test_a_generator_gives_the_same_spans() -> None:
    async with Recording(TALK, sampling_rate=RATE) as recording:
        assert [span async for span in speech_spans(recording, Loud(), RULES)] == SPANS


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_speech_is_found_from_wherever_one_looks(parts: list[tuple[int, int]], data: st.DataObject) -> None:
    """`speech_from` and `within` say what the spans say, asked at any samples in any order."""
    samples = spoken(*((silence / 10, speech / 10) for silence, speech in parts))
    if len(samples) < 20:
        return
    places = st.integers(0, len(samples) + 500)
    asked = data.draw(st.lists(st.tuples(places, places, st.booleans()), min_size=1, max_size=6))

    async def check() -> None:
        async with Recording(samples, sampling_rate=RATE) as recording:
            spans = [span async for span in speech_spans(recording, Loud(), RULES)]
            finder = SpeechFinder(recording, Loud(), RULES)
            for sample, other, from_here in asked:
                if from_here:
                    assert await finder.speech_from(sample) == first_from(spans, sample)
                    continue
                start, stop = sorted((sample, other))
                found = await finder.within(start, stop)
                assert found == [
                    SpeechSpan(max(span.start, start), min(span.stop, stop))
                    for span in spans
                    if span.stop > start and span.start < stop
                ]

    trio.run(check)


def first_from(spans: Sequence[SpeechSpan], sample: int) -> int | None:
    return next((max(span.start, sample) for span in spans if span.stop > sample), None)


async def test_speech_that_goes_on_is_told_before_it_ends() -> None:
    """Who transcribes need not wait for the end of a long sentence to begin with it."""
    detector = Loud()
    async with Recording(spoken((1, 300)), sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, detector, SpanRules(longest=None))
        assert await finder.speech_from(0) == 700
        assert detector.heard <= 8_000
        assert await finder.speech_from(100_000) == 100_000
        assert detector.heard <= 108_000


async def test_a_stretch_is_known_when_it_was_heard() -> None:
    """A window that ends early: is there speech behind its last word? No more of the recording is read for it."""
    detector = Loud()
    async with Recording(TALK, sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, detector, RULES)
        assert await finder.within(0, 10_000) == []
        assert detector.heard == 16_000
        assert await finder.within(22_000, 40_000) == [SpeechSpan(22_000, 23_200), SpeechSpan(37_800, 40_000)]
        assert detector.heard == 40_000
        assert await finder.within(10_000, 20_000) == [SpeechSpan(19_800, 20_000)]
        assert await finder.within(40_000, 99_000) == [SpeechSpan(40_000, 44_500)]
        assert await finder.within(44_500, 99_000) == []


async def test_an_hour_of_silence_takes_no_memory(tmp_path: Path) -> None:
    """Behind whoever forgets: the samples go as they are settled, for spans and for places alike."""
    path = sparse_wav(tmp_path / "silence.wav", 3_600, RATE, 1)
    for question in ("next_span", "speech_from"):
        most = 0

        class Watching(Loud):
            def listen(self) -> LoudListener:
                return WatchingListener(self)

        class WatchingListener(LoudListener):
            def hear(self, samples: Samples) -> Probabilities:
                nonlocal most
                most = max(most, recording.held)
                return super().hear(samples)

        async with Recording(path, sampling_rate=RATE) as recording:
            finder = SpeechFinder(recording, Watching(), RULES, forgets=True)
            found = await (finder.next_span() if question == "next_span" else finder.speech_from(0))
            assert found is None
            assert finder.settled == 3_600 * RATE
        assert most <= 12 * RATE


async def test_samples_of_a_span_stay_until_the_next_one_is_asked_for() -> None:
    async with Recording(wav(TALK), sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, Loud(), RULES, forgets=True)
        while (span := await finder.next_span()) is not None:
            window = await recording.window(span.start, span.stop - span.start)
            assert window.mean() > 0.2
        with pytest.raises(AssertionError, match="forgotten"):
            await recording.window(SPANS[0].start, 10)


async def test_without_forgetting_everything_can_be_read_again() -> None:
    async with Recording(wav(TALK), sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, Loud(), RULES)
        await finder.next_span()
        np.testing.assert_allclose(await recording.window(0, 1_000), TALK[:1_000])


async def test_tasks_may_ask_at_once_and_nothing_is_heard_twice() -> None:
    detector = Loud()
    found: list[SpeechSpan | None] = []

    async def ask(finder: SpeechFinder) -> None:
        found.append(await finder.next_span())

    async with Recording(TALK, sampling_rate=RATE) as recording:
        finder = SpeechFinder(recording, detector, RULES)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask, finder)
    assert sorted(map(str, found)) == sorted(map(str, [*SPANS, None]))
    assert detector.heard == len(TALK)


async def test_a_cancelled_caller_loses_nothing() -> None:
    """Wherever it is cancelled, the next one finds the same spans."""
    for steps in range(12):
        async with Recording(wav(TALK), sampling_rate=RATE) as recording:
            finder = SpeechFinder(recording, Loud(), RULES)
            found: list[SpeechSpan] = []
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(cancel_after, scope, steps)
                    while (span := await finder.next_span()) is not None:
                        found.append(span)
            while (span := await finder.next_span()) is not None:
                found.append(span)
            assert found == SPANS


async def cancel_after(scope: trio.CancelScope, steps: int) -> None:
    for _ in range(steps):
        await trio.lowlevel.checkpoint()
    scope.cancel()


async def test_what_a_broken_recording_has_before_its_end_is_found() -> None:
    async with Recording(wav(TALK)[: -2 * 14_000], sampling_rate=RATE) as recording:
        spans = [span async for span in speech_spans(recording, Loud(), RULES)]
        assert spans == [SPANS[0], SpeechSpan(37_800, recording.length or 0)]
        assert recording.broken is not None


async def test_a_detector_of_another_rate_is_refused() -> None:
    async with Recording(TALK, sampling_rate=RATE) as recording:
        with pytest.raises(InvalidRequest, match="voice activity at 16000 Hz; allowed: 1000 Hz, the recording's"):
            SpeechFinder(recording, Loud(sampling_rate=16_000), RULES)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros(3, np.float32), r"float32 of shape \(3,\); allowed: 80 probabilities for 80 frames of 100 samples"),
        (np.zeros((80, 1), np.float32), r"shape \(80, 1\); allowed: 80"),
        (np.zeros(80, np.int64), r"int64 of shape \(80,\); allowed"),
        (np.full(80, np.nan), r"floats from 0 to 1"),
        (np.full(80, 1.5), r"floats from 0 to 1"),
    ],
)
async def test_answers_that_are_no_probabilities_are_refused(answer: Probabilities, message: str) -> None:
    """A detector of somebody's own may be wrong: nothing is lost without a word."""

    class Wrong(Loud):
        def listen(self) -> LoudListener:
            return WrongListener(self)

    class WrongListener(LoudListener):
        def hear(self, samples: Samples) -> Probabilities:
            return answer

    async with Recording(TALK, sampling_rate=RATE) as recording:
        with pytest.raises(InvalidRequest, match=message):
            await SpeechFinder(recording, Wrong(), RULES).next_span()
