"""`Engine.align`, and transcriptions with an aligner, on every host, over a simulated model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest
from attrs import define, field

from triolet import ContextLengthExceeded, InvalidRequest, Word
from triolet.api.inputs.audio import content_key, load_audio
from triolet.api.inputs.sources import with_track
from triolet.core.request import Alignment
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import START, expected_alignment

from .films import film_of_two_tracks
from .hosts import (
    HOSTS,
    PATIENCE,
    Bench,
    Host,
    Signal,
    SpeakingModel,
    ThreadsHost,
    audio,
    cancel_one_of_two,
    on_bench,
    on_threads_too,
)
from .sim_aligner import FRAMES, SECONDS, AligningModel
from .test_hosts import ALL_OF_IT, transcribe
from .threads import Signal as SyncSignal
from .threads import SyncBench

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
    await cancel_one_of_two(bench, ask)
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
async def test_the_track_of_a_film_is_chosen(bench: Bench) -> None:
    film = film_of_two_tracks()
    async with bench.engine() as engine:
        first, second = [await engine.align(load_audio(with_track(film, one)), TEXT) for one in (1, 2)]
        assert first != second
        for track, words in ((None, second), (1, first), ("de", first), ("eng", second)):
            assert await engine.align(film, TEXT, audio_track=track) == words
        with pytest.raises(InvalidRequest, match=r"audio_track=3, but .* has 2 audio tracks"):
            await engine.align(film, TEXT, audio_track=3)
        with pytest.raises(InvalidRequest, match="audio_track=1 is given with an array"):
            await engine.align(audio(1), TEXT, audio_track=1)


@on_threads_too
@on_bench
async def test_a_model_that_aligns_nothing_says_so(bench: Bench) -> None:
    bench.executor = SimExecutor()
    async with bench.engine() as engine:
        with pytest.raises(InvalidRequest, match="allowed: Qwen3-ForcedAligner"):
            await engine.align(audio(1), TEXT)
        with pytest.raises(InvalidRequest, match="allowed: Qwen3-ForcedAligner"):
            await engine.transcribe(audio(1), timestamps="word", aligner=engine)


# -- transcriptions --------------------------------------------------------------------------------------------------


@define(eq=False, slots=False)
class Alike:
    """Gives all words of a text the same time, and notes what it was asked."""

    host: Host
    answer: Callable[[str], Any]
    asked: list[tuple[int, int, str | None]] = field(factory=list)
    began: Signal | None = None
    cancelled: bool = False

    def __attrs_post_init__(self) -> None:
        if self.host.name == "threads":
            self.align = self._plain  # type: ignore[method-assign]

    async def align(self, audio: Any, text: str, language: str | None = None) -> Any:
        if self.began is not None:
            self.began.set()
            try:
                await anyio.sleep_forever()  # fails outside of the caller's loop
            finally:
                self.cancelled = True
        await anyio.lowlevel.checkpoint()
        return self._plain(audio, text, language)

    def _plain(self, audio: Any, text: str, language: str | None = None) -> Any:
        samples, rate = audio
        self.asked.append((len(samples), rate, language))
        return self.answer(text)


def words_of(text: str) -> list[Word]:
    texts = [text] if len(text) < 2 else [text[:1], text[1:]]
    return [Word(text=one, start=0.25, end=0.5, probability=0.5) for one in texts]


def refuse(text: str) -> Any:
    raise InvalidRequest(f"not {text[:0]}today")


SPEECH = np.linspace(0, 0.01, 70 * 16_000, dtype=np.float32)
WORDS: dict[str, Any] = {**ALL_OF_IT, "timestamps": "word"}


@on_threads_too
@on_bench
async def test_an_aligner_hears_the_sound_of_each_segment_and_times_its_words(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    aligner = Alike(bench.host, words_of)
    async with bench.engine() as engine:
        plain = await engine.transcribe(SPEECH, **ALL_OF_IT)
        found, streamed, _ = await transcribe(engine, SPEECH, **WORDS, aligner=aligner)
    assert found.word_times == "aligner"
    assert plain.word_times is None
    assert found.text == plain.text
    assert len(found.segments) > 2
    assert list(found.segments) == streamed
    for segment, whole in zip(found.segments, plain.segments, strict=True):
        assert segment.text == "".join(word.text for word in segment.words)
        first, *rest = segment.words
        start = min(whole.start + 0.25, whole.end)
        assert first.start == pytest.approx(start, abs=1e-3)
        assert segment.start == first.start
        assert segment.end == segment.words[-1].end <= whole.end
        assert all(word.start == word.end == first.end for word in rest)
    assert aligner.asked[: len(plain.segments)] == [
        (round(16_000 * whole.end) - round(16_000 * whole.start), 16_000, "en") for whole in plain.segments
    ]


@on_threads_too
@on_bench
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuse, "not today"),
        (lambda text: words_of(text + "!"), "joined texts are"),
        (lambda _: None, "a list of Word"),
    ],
)
async def test_words_that_are_not_aligned_share_the_time_of_their_segment(
    bench: Bench, answer: Callable[[str], Any], reason: str
) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    async with bench.engine() as engine:
        found = await engine.transcribe(SPEECH, **WORDS, aligner=Alike(bench.host, answer))
    assert all("share this time evenly" in warning and reason in warning for warning in found.warnings)
    assert len({warning.partition("aligned: ")[2] for warning in found.warnings}) == len(found.warnings), "each once"
    for segment in found.segments:
        assert f"{segment.start:.2f} to {segment.end:.2f}" in " ".join(found.warnings)
        assert segment.text == "".join(word.text for word in segment.words)
        lengths = [word.end - word.start for word in segment.words]
        assert lengths == pytest.approx([(segment.end - segment.start) / len(lengths)] * len(lengths), abs=2e-3)
        assert {word.probability for word in segment.words} == {0.0}


@on_threads_too
@on_bench
async def test_an_error_of_an_aligner_ends_its_transcription(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    async with bench.engine() as engine:
        with pytest.raises(ZeroDivisionError):
            await engine.transcribe(SPEECH, **WORDS, aligner=Alike(bench.host, lambda _: 1 / 0))
        await engine.transcribe(SPEECH, **ALL_OF_IT)


@on_threads_too
@on_bench
async def test_an_aligner_that_the_callers_cannot_call_is_refused(bench: Bench) -> None:
    """An engine of the other kind, for example."""
    other = Alike(HOSTS[0] if bench.host.name == "threads" else ThreadsHost(), words_of)
    async with bench.engine() as engine:
        with pytest.raises(InvalidRequest, match=r"allowed here: .* method align"):
            await engine.transcribe(audio(1), timestamps="word", aligner=other)


def test_aligners_of_threads_take_no_thread_of_the_engine() -> None:
    bench = SyncBench(executor=SimExecutor(SpeakingModel()))
    asked, answered, many = threading.Semaphore(0), SyncSignal(), 40  # as many as trio has threads

    class Waiting:
        def align(self, _: Any, text: str, language: str | None = None) -> Any:
            asked.release()
            answered.wait()
            return words_of(text)

    def main() -> None:
        with bench.engine() as engine, ThreadPoolExecutor(many + 1) as threads:
            aligned = partial(engine.transcribe, SPEECH[:64_000], **WORDS, aligner=Waiting())
            found = [threads.submit(aligned) for _ in range(many)]
            try:
                assert all(asked.acquire(timeout=PATIENCE) for _ in found)
                plain = threads.submit(partial(engine.transcribe, SPEECH[:64_000], **ALL_OF_IT)).result(PATIENCE)
            finally:
                answered.set()
            assert {one.result(PATIENCE).text for one in found} == {plain.text}

    bench.run(main)


@on_bench
async def test_an_aligner_is_cancelled_with_its_transcription(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    aligner = Alike(bench.host, words_of, began=bench.host.signal())
    async with bench.engine() as engine, bench.host.group() as group:
        handle = group.start(partial(engine.transcribe, **WORDS, aligner=aligner), SPEECH)
        await aligner.began.wait()
        handle.cancel()
        await handle.ended()
    assert handle.cancelled
    assert aligner.cancelled
