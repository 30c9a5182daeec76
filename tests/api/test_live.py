"""Live sessions on virtual time: a speaker talks in real time, and a model that takes its time understands."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import trio
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import EngineError, EngineStateError, InvalidRequest, LiveText
from triolet.api.hosts.live import open_live
from triolet.api.inputs.audio import Samples
from triolet.api.live.agreement import said_again
from triolet.api.live.options import read_live_options
from triolet.api.live.session import Ear, LiveTranscription, read_chunk
from triolet.api.speech.words import TextWord
from triolet.core.speech import Ask, Detection, Draft, Sound, WindowCut
from triolet.models.speech.whisper_speech import WhisperSpeech
from triolet_testing.trio_tools import run_virtually

from .speaker import WORD, Speaker, describe, int16, name, speech
from .speech import DE, PREVIOUS, RATE, START, PaperVoice

CHUNK = 0.1  # seconds


@asynccontextmanager
async def session_of(
    speaker: Speaker,
    *,
    window: float = 30.0,
    languages: bool = False,
    facts: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> AsyncIterator[LiveTranscription]:
    model = describe(window=window, languages=languages, **facts)
    async with open_live(
        read_live_options(options), model, speaker, request_id="live", detector=PaperVoice()
    ) as session:
        yield session


def held_by(session: LiveTranscription) -> float:
    """Seconds of audio in memory: the backlog, and the samples that may still be read."""
    return (session._waiting + session._samples.count) / RATE


async def speak(
    session: LiveTranscription, samples: Samples, pace: float = 1.0, held: list[float] | None = None
) -> None:
    """Feeds ``samples`` in real time, or ``pace`` times as fast, and finishes."""
    begun = trio.current_time()
    size = round(CHUNK * RATE)
    for start in range(0, len(samples), size):
        if pace:
            await trio.sleep_until(begun + min(start + size, len(samples)) / RATE / pace)
        await session.feed(int16(samples[start : start + size]))
        if held is not None:
            held.append(held_by(session))
    await session.finish()


def heard(samples: Samples, speaker: Speaker | None = None, pace: float = 1.0, **options: Any) -> list[Any]:
    """(second, update) of a whole session."""

    async def main() -> list[tuple[float, LiveText]]:
        with trio.fail_after(100_000):
            async with session_of(speaker or Speaker(), **options) as session, trio.open_nursery() as nursery:
                nursery.start_soon(speak, session, samples, pace)
                begun = trio.current_time()
                found = [(round(trio.current_time() - begun, 3), update) async for update in session]
        return found

    return run_virtually(main)


def text(updates: list[Any]) -> str:
    return "".join(update.stable for _, update in updates)


def words(*numbers: int) -> str:
    return "".join(map(name, numbers))


# ---- the text --------------------------------------------------------------------------------------------------------


def test_all_that_is_said_becomes_stable_in_order_with_times() -> None:
    updates = heard(speech(1.0, *range(8), 2.0, *range(8, 12), 1.5))
    assert text(updates) == words(*range(12))
    assert [update.utterance for _, update in updates if update.ends_utterance] == [0, 1]
    found = [word for _, update in updates for word in update.words]
    assert "".join(word.text for word in found) == words(*range(12))
    starts = [1.0 + WORD * index + (2.0 if index > 7 else 0.0) for index in range(12)]
    assert [word.start for word in found] == pytest.approx(starts, abs=0.05)
    assert [word.end for word in found] == pytest.approx([start + WORD for start in starts], abs=0.05)
    for _, update in updates:
        assert update.stable == "".join(word.text for word in update.words)
        assert (update.start, update.end) == (
            (update.words[0].start, update.words[-1].end) if update.words else (None, None)
        )
        assert update.language == "en"


def test_a_word_is_shown_soon_and_stable_by_the_second_reading_that_has_it() -> None:
    """A step of 0.5 s, and a model of 0.2 s a request: every word is shown within 1 s of its end, and stable within
    2 s."""
    updates = heard(speech(0.5, *range(20), 1.5))
    shown: dict[int, float] = {}
    told: dict[int, float] = {}
    so_far = ""
    for at, update in updates:
        so_far += update.stable
        for number in range(20):
            if name(number) in so_far.split("x")[0] + " ":
                told.setdefault(number, at)
            if f"{name(number)} " in f"{so_far}{update.provisional} ":
                shown.setdefault(number, at)
    ends = {number: 0.5 + WORD * (number + 1) for number in range(20)}
    assert max(shown[number] - ends[number] for number in range(20)) < 1.0
    assert max(told[number] - ends[number] for number in range(20)) < 2.0


def test_stable_text_never_changes_and_the_provisional_text_never_repeats_it() -> None:
    """Word 20 follows word 19, so a number twice would be a repetition."""
    said = ""
    for _, update in heard(speech(*range(30), 2.0)):
        said += update.stable
        assert words(*range(30)).startswith(said)
        shown = said + update.provisional.split(" x")[0]
        assert words(*range(30)).startswith(shown)
    assert said == words(*range(30))


def test_silence_ends_an_utterance_after_the_time_that_was_asked_for() -> None:
    for silence in (0.5, 2.0):
        updates = heard(speech(0, 1, 2, 5.0, 3), endpoint_silence=silence)
        ended = next(at for at, update in updates if update.ends_utterance)
        assert ended == pytest.approx(3 * WORD + silence, abs=0.4)
        assert [update.utterance for _, update in updates if update.ends_utterance] == [0, 1]


def test_the_next_utterance_is_given_the_text_before() -> None:
    speaker = Speaker()
    heard(speech(0, 1, 2.0, 2, 3, 2.0), speaker, initial_prompt="names")
    prompts = [one.prompt_token_ids for one in speaker.requests if PREVIOUS in one.prompt_token_ids]
    before = [bytes(prompt[1 : prompt.index(START)]).decode() for prompt in prompts]
    assert before[0] == " names"
    assert before[-1] == f" names{words(0, 1)}"


def test_every_reading_has_the_hotwords_however_long_the_utterance() -> None:
    """Text before and begun text give way to them; too many are refused, since nobody would hear that they are cut."""
    speaker, hotwords = Speaker(), "y" * 222
    said = heard(speech(*range(60), 2.0, 60), speaker, hotwords=hotwords)
    assert text(said) == words(*range(61))
    prompts = [one.prompt_token_ids for one in speaker.requests if one.alignment is None]
    assert {prompt[:224] for prompt in prompts} == {(PREVIOUS, *f" {hotwords}".encode())}
    assert all(len(one.prompt_token_ids) + (one.max_tokens or 0) <= 448 for one in speaker.requests)
    with pytest.raises(InvalidRequest, match=r"hotwords=.* has 224 tokens; allowed: up to 223"):
        heard(speech(0), hotwords=hotwords + "y")


def test_the_language_is_detected_at_the_beginning_and_told() -> None:
    speaker = Speaker(language=DE)
    updates = heard(speech(0, 1, 2, 3, 4, 5, 2.0, 6, 7), speaker, languages=True)
    assert {update.language for _, update in updates} == {"de"}
    asked = [request.prompt_token_ids == (START,) for request in speaker.requests]
    assert 1 <= sum(asked) <= 5
    assert not any(asked[len(asked) // 2 :])


def test_a_model_that_writes_the_language_is_not_held_to_that_of_its_first_reading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, draft, cut = list[str | None](), WhisperSpeech.draft, WhisperSpeech.cut

    def asking(self: WhisperSpeech, sound: Sound, ask: Ask) -> Draft:
        asked.append(ask.language)
        return draft(self, sound, evolve(ask, language="en"))

    def writing(self: WhisperSpeech, token_ids: Sequence[int], ask: Ask) -> WindowCut:
        return evolve(cut(self, token_ids, ask), language="de" if len(asked) == 1 else "en")

    monkeypatch.setattr(WhisperSpeech, "draft", asking)
    monkeypatch.setattr(WhisperSpeech, "cut", writing)
    updates = heard(
        speech(0, 1, 2, 3, 4, 5), languages=True, facts={"detection": Detection.WRITTEN, "word_times": None}
    )
    assert set(asked) == {None}
    assert updates[0][1].language == "de"
    assert updates[-1][1].language == "en"


# ---- pace ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1.5, 4.0])
def test_a_slow_model_makes_longer_steps_and_no_queue(seconds: float) -> None:
    """Readings follow each other, each with all audio so far: the last update comes soon after the end."""
    speaker = Speaker(seconds=seconds)
    updates = heard(speech(*range(60), 1.0), speaker)
    assert text(updates) == words(*range(60))
    assert updates[-1][0] < 60 * WORD + 1.0 + 6 * seconds


def test_feeding_waits_for_a_model_slower_than_speech_and_memory_is_bounded() -> None:
    """A request takes 20 s. All text comes, however late; never more is held than a window, the backlog, a piece
    being heard and one that is partly forgotten."""
    held: list[float] = []
    samples = speech(*range(300), 1.0)

    async def main() -> tuple[str, float]:
        found = ""
        async with session_of(Speaker(seconds=20.0), window=10.0, max_backlog=4.0) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(speak, session, samples, 1.0, held)
                async for update in session:
                    found += update.stable
        return found, trio.current_time()

    found, took = run_virtually(main)
    assert found == words(*range(300))
    assert took > 2 * len(samples) / RATE, "the model is not slower than speech"
    assert 10 < max(held) <= 10 + 4 + 2.1


def test_what_another_task_still_feeds_is_heard_although_the_session_was_finished() -> None:
    """Its chunk is far longer than the backlog, so that it waits for room; `feed` has taken it, so nothing is lost.
    Where it is cancelled instead, the session ends all the same, with what was taken."""
    samples = speech(*range(100), 1.0)  # 41 s: a window and the backlog have 31 s

    async def main(*, cancelled: bool) -> tuple[str, bool]:
        scope, found = trio.CancelScope(), ""

        async def feed() -> None:
            with scope:
                await session.feed(samples)

        with trio.fail_after(1000):
            async with session_of(Speaker(seconds=0.01), max_backlog=1.0) as session, trio.open_nursery() as nursery:
                nursery.start_soon(feed)
                await trio.sleep(0.005)  # the model reads for longer: by then the window is full
                await session.finish()
                if cancelled:
                    scope.cancel()
                async for update in session:
                    found += update.stable
        return found, scope.cancelled_caught

    assert run_virtually(partial(main, cancelled=False)) == (words(*range(100)), False)
    found, was_cancelled = run_virtually(partial(main, cancelled=True))
    assert was_cancelled
    assert found.startswith(words(*range(70)))
    assert len(found) < len(words(*range(90)))


def test_chunks_of_any_sizes_and_kinds_are_one_audio() -> None:
    """Of 3 ms to 1.5 s, as bytes, int16 and float32 in turn; the caller's buffer is used again for the next chunk."""
    samples = speech(*range(20), 1.0)
    chance = random.Random(3)

    async def main() -> str:
        async with session_of(Speaker(seconds=0.3)) as session:
            start = 0
            while start < len(samples):
                chunk = samples[start : start + chance.choice([48, 500, 3_000, 24_000])].copy()
                start += len(chunk)
                kind = chance.choice([bytes, np.int16, np.float32])
                fed = int16(chunk) if kind is bytes else (chunk * 32768).astype(kind) if kind is np.int16 else chunk
                await session.feed(fed)
                chunk[:] = 0
            await session.finish()
            return "".join([update.stable async for update in session])

    assert run_virtually(main) == words(*range(20))


def test_a_session_dies_with_its_block(no_collector: None) -> None:
    """By its reference count, however it ends."""

    async def ended(speaker: Speaker, *, early: bool) -> weakref.ref[LiveTranscription]:
        with pytest.raises(EngineError) if speaker.fails else nullcontext():
            async with session_of(speaker) as session:
                found = weakref.ref(session)
                await session.feed(speech(*range(10), 1.0))
                if not early:
                    await session.finish()
                    assert [update async for update in session]
        await trio.lowlevel.checkpoint()
        return found

    async def main() -> None:
        for speaker, early in ((Speaker(), False), (Speaker(), True), (Speaker(fails=EngineError("gone")), False)):
            found = await ended(speaker, early=early)
            assert found() is None, (speaker, early)

    run_virtually(main)


def test_a_late_reader_gets_the_updates_of_an_utterance_as_one() -> None:
    samples = speech(*range(10), 1.0, *range(10, 20), 1.0)

    async def main() -> list[LiveText]:
        async with session_of(Speaker()) as session:
            await speak(session, samples)
            await trio.sleep(10)
            return [update async for update in session]

    first, second = run_virtually(main)
    assert (first.stable, first.utterance, first.ends_utterance) == (words(*range(10)), 0, True)
    assert (second.stable, second.utterance, second.ends_utterance) == (words(*range(10, 20)), 1, True)
    assert first.provisional == second.provisional == ""
    assert first.start == pytest.approx(0.0, abs=0.05)
    assert first.end == pytest.approx(10 * WORD, abs=0.05)


@given(
    said=st.lists(st.integers(1, 12) | st.floats(0.1, 3.0), max_size=8),
    latency=st.floats(0.01, 6.0),
    window=st.floats(4.0, 12.0),
    step=st.floats(0.3, 3.0),
    pace=st.sampled_from([0.0, 1.0, 5.0]),
)
@settings(max_examples=30)
def test_whatever_the_pace_every_word_is_stable_once_and_in_order(
    said: list[int | float], latency: float, window: float, step: float, pace: float
) -> None:
    """Groups of words and silences; windows, steps and models of any speed."""
    numbers = itertools.count()
    parts: list[int | float] = []
    for part in said:
        parts += [next(numbers) for _ in range(part)] if isinstance(part, int) else [part]
    speaker = Speaker(seconds=latency)
    updates = heard(speech(*parts, 0.5), speaker, pace, window=window, step=step)
    assert text(updates) == words(*range(next(numbers)))
    assert all(len(one) <= round(window * RATE) for one in speaker.windows)
    ends = [update.utterance for _, update in updates if update.ends_utterance]
    assert ends == list(range(len(ends)))


@pytest.mark.parametrize(
    "facts", [{"begins": False}, {"word_times": None}, {"begins": False, "word_times": None}], ids=str
)
@given(said=st.lists(st.integers(1, 12) | st.floats(0.1, 3.0), max_size=6), latency=st.floats(0.01, 3.0))
@settings(max_examples=10)
def test_models_that_continue_no_text_or_know_no_times_lose_no_word(
    facts: dict[str, Any], said: list[int | float], latency: float
) -> None:
    numbers = itertools.count()
    parts: list[int | float] = []
    for part in said:
        parts += [next(numbers) for _ in range(part)] if isinstance(part, int) else [part]
    updates = [one for _, one in heard(speech(*parts, 0.5), Speaker(seconds=latency), facts=facts)]
    found = [word for update in updates for word in update.words]
    assert "".join(update.stable for update in updates) == words(*range(next(numbers)))
    assert "".join(word.text for word in found) == words(*range(len(found)))
    times = [time for word in found for time in (word.start, word.end)]
    assert times == sorted(times)
    assert all(update.start == update.words[0].start for update in updates if update.words)


def test_readings_of_an_utterance_follow_each_other_where_the_encoder_goes_on() -> None:
    speaker = Speaker()
    heard(speech(*range(8), 2.0, *range(8, 14), 1.0), speaker, facts={"reuses": True})
    items = list({request.items[0].key: request.items[0] for request in speaker.requests}.values())
    lengths = {item.key: len(item.payload) for item in items}
    followed = [(lengths[item.follows], len(item.payload)) for item in items if item.follows]
    assert len(followed) > len(items) / 2
    assert all(RATE <= before <= after for before, after in followed)


@given(stable=st.text("ab", max_size=6), later=st.text("ab", max_size=6), spoiled=st.text("abc", max_size=6))
def test_what_is_said_again_is_found_where_the_text_goes_on(stable: str, later: str, spoiled: str) -> None:
    def as_words(text: str) -> list[TextWord]:
        return [TextWord(text=f" {one}", token_ids=()) for one in text]

    assert said_again(as_words(stable), as_words(stable + later)) == len(stable)
    assert 0 <= said_again(as_words(stable), as_words(spoiled)) <= len(spoiled)
    assert said_again(as_words(stable + "c"), as_words("b" + stable + "c" + later)) == len(stable) + 2


# ---- chunks ----------------------------------------------------------------------------------------------------------

TONE = np.array([0.25, -0.5, 0.0], np.float32)


@pytest.mark.parametrize(
    "chunk",
    [
        TONE,
        TONE.astype(np.float64),
        (TONE * 32768).astype(np.int16),
        (TONE * 32768).astype("<i2").tobytes(),
        bytearray((TONE * 32768).astype("<i2").tobytes()),
        memoryview((TONE * 32768).astype("<i2").tobytes()),
        (TONE, RATE),
        {"array": (TONE * 32768).astype(np.int16), "sampling_rate": RATE},
    ],
    ids=lambda chunk: type(chunk).__name__,
)
def test_chunks_of_every_kind_are_the_same_samples(chunk: Any) -> None:
    np.testing.assert_array_equal(read_chunk(chunk, RATE).part(0, 3), TONE)


REFUSED = [
    (TONE.astype(np.int32), "holds int32; allowed: float32"),
    (
        (TONE, 44_100),
        "a chunk has 44100 Hz; allowed: 16000 Hz, the rate of the session. Open the session with engine.live",
    ),
    ({"array": TONE}, "a chunk is a mapping without 'sampling_rate'"),
    (np.array([0.0, np.nan], np.float32), r"NaN or infinite \(number 1\)"),
    (TONE * 32768, r"a chunk has a peak of 16384; allowed: full scale at 1.0 \(up to 2\)"),
    (b"abc", "a chunk has 3 bytes; allowed: an even number"),
    ("speech.wav", "a chunk has the type str; allowed: int16 samples as bytes"),
    (None, "a chunk has the type NoneType; allowed"),
]


@pytest.mark.parametrize(("chunk", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_a_chunk_that_cannot_be_read_is_refused_at_once_and_nothing_of_it_taken(chunk: Any, told: str) -> None:
    """The session goes on."""

    async def main() -> str:
        async with session_of(Speaker()) as session:
            with pytest.raises(InvalidRequest, match=told):
                await session.feed(chunk)
            assert held_by(session) == 0
            await session.feed(speech(0, 1, 2))
            await session.finish()
            return "".join([update.stable async for update in session])

    assert run_virtually(main) == words(0, 1, 2)


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_another_rate_is_resampled_as_one_stream(rate: int) -> None:
    """However it is divided into chunks."""
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate).astype(np.float32) / 2
    results = []
    for size in (rate, 441, 1_000):
        ear = Ear(rate, PaperVoice(), RATE)
        parts = [ear.hear(tone[start : start + size])[0] for start in range(0, rate, size)]
        results.append(np.concatenate([*parts, ear.hear(np.zeros(0, np.float32), last=True)[0]]))
        np.testing.assert_allclose(results[-1], results[0], atol=1e-6)
    middle = slice(RATE // 4, 3 * RATE // 4)
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE) / 2
    assert len(results[0]) == RATE
    np.testing.assert_allclose(results[0][middle], expected[middle], atol=2e-3)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rate": 7_999}, "rate=7999; allowed: an integer, 8000 to 768000"),
        ({"rate": 16_000.0}, "rate=16000.0; allowed"),
        ({"step": 0.0}, "step=0.0; allowed: a number, 0.1 or more"),
        ({"endpoint_silence": 20}, "endpoint_silence=20; allowed"),
        ({"max_backlog": float("nan")}, "max_backlog=nan; allowed"),
        ({"sampling_rate": 8_000}, "did you mean rate"),
        ({"beam_sizes": 2}, "did you mean beam_size"),
        ({"timestamps": "word"}, "timestamps= is not an option of a live session; allowed: rate, step"),
        ({"temperature": -1}, "temperature=-1; allowed"),
    ],
)
def test_options_that_cannot_work_are_refused(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read_live_options(wrong)


# ---- ends ------------------------------------------------------------------------------------------------------------


def test_an_error_of_a_request_reaches_the_reader_as_it_is_and_later_callers_by_name() -> None:
    error = EngineError("the device is gone")

    async def main() -> None:
        speaker = Speaker(fails=error)
        async with session_of(speaker) as session:
            await session.feed(speech(0, 1, 2, 3, 4))
            with pytest.raises(EngineError) as raised:
                await anext(session)
            assert raised.value is error
            for use in (session.finish, lambda: session.feed(TONE), lambda: anext(session)):
                with pytest.raises(
                    EngineStateError, match=r"has failed \(EngineError: the device is gone\); open another"
                ):
                    await use()

    run_virtually(main)


def test_a_feeder_that_waits_hears_of_an_error() -> None:
    async def main() -> None:
        async with session_of(Speaker(seconds=50.0, fails=EngineError("gone")), max_backlog=1.0, window=4.0) as session:
            with pytest.raises(EngineError, match="gone"):
                await session.feed(speech(*range(100)))

    run_virtually(main)


def test_a_session_is_used_within_its_block_and_not_behind_its_end() -> None:
    async def main() -> None:
        async with session_of(Speaker()) as session:
            await session.finish()
            await session.finish()
            with pytest.raises(EngineStateError, match=r"feed.. was called after finish"):
                await session.feed(TONE)
            assert [update async for update in session] == []
            assert [update async for update in session] == []
        async with session_of(Speaker()) as left:
            pass
        for use in (left.finish, lambda: left.feed(TONE), lambda: anext(left)):
            with pytest.raises(EngineStateError, match="its block has ended; open another"):
                await use()

    run_virtually(main)


def test_two_tasks_cannot_feed_at_once() -> None:
    async def main() -> None:
        async with session_of(Speaker(seconds=5.0), max_backlog=1.0, window=4.0) as session:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(session.feed, speech(*range(100)))
                await trio.sleep(1)
                with pytest.raises(EngineStateError, match="while another task feeds"):
                    await session.feed(TONE)
                nursery.cancel_scope.cancel()

    run_virtually(main)


def test_the_bodys_own_error_leaves_the_block_as_it_is() -> None:
    async def main() -> None:
        async with session_of(Speaker()) as session:
            await session.feed(speech(0, 1, 2, 3, 4))
            await trio.sleep(1.0)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtually(main)


@pytest.mark.parametrize("seed", range(20))
def test_a_session_that_is_cancelled_at_any_moment_ends_at_once(seed: int) -> None:
    """While it feeds, reads, hears, or waits for the model. Its tasks end with it: the run has no task left."""
    chance = random.Random(seed)

    async def main() -> float:
        with trio.move_on_after(chance.uniform(0, 20)) as scope:
            async with session_of(Speaker(seconds=chance.uniform(0.1, 5.0)), max_backlog=2.0) as session:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(speak, session, speech(*range(20), 2.0, *range(20, 60)), chance.choice([0, 1]))
                    async for _ in session:
                        pass
        if scope.cancelled_caught:
            assert trio.current_time() == pytest.approx(scope.deadline)
        return trio.lowlevel.current_statistics().tasks_living

    living = run_virtually(main)
    assert living == run_virtually(_living)


async def _living() -> float:
    await trio.lowlevel.checkpoint()
    return trio.lowlevel.current_statistics().tasks_living
