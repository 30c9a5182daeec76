"""The walk over windows: where each begins and ends, which segments it tells, which windows are never asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import attrs
import numpy as np
import pytest
import trio
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.outputs.results import Transcript
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.plan import CutRules, Plan
from triolet.api.speech.recipe import History
from triolet.api.speech.transcription import Transcription
from triolet.api.speech.windows import Generated
from triolet.core.errors import InvalidRequest
from triolet.core.plan import AlignedTokens
from triolet.core.request import Request

from .speech import (
    DE,
    EN,
    EVERYTHING,
    NO_SPEECH,
    RATE,
    START,
    TRANSCRIBE,
    WINDOW,
    PaperHearing,
    Script,
    answer,
    begin,
    describe,
    detected,
    opened,
    options_of,
    plain,
    ramp,
    read_all,
)

ALIGNS = describe(alignment_fault=None)


def times(transcription: Transcription) -> list[tuple[float, float]]:
    return [(one.start, one.end) for one in transcription.coverage if one.kind == "speech"]


# ---- where windows begin ---------------------------------------------------------------------------------------------


async def test_a_segment_that_the_window_cuts_off_is_read_again_from_its_start() -> None:
    """The second window begins at the last timestamp; times are those of the whole audio."""
    script = Script(answer(0.0, " one", 12.0, 12.0, " tw"), answer(0.0, " two", 20.0))
    transcript = await begin(ramp(40), script).transcript()
    assert script.windows() == [(0, WINDOW), (12 * RATE, 40 * RATE)]
    assert [(s.start, s.end, s.text) for s in transcript.segments] == [(0, 12, " one"), (12, 32, " two")]


async def test_without_progress_the_window_is_used_up() -> None:
    """A last timestamp of 0.00 does not repeat the window for ever, nor once."""
    script = Script(answer(0.0, "a", 0.0, 0.0))
    transcript = await begin(ramp(45), script).transcript()
    assert script.windows() == [(0, WINDOW), (WINDOW, 45 * RATE)]
    assert len(script.requests) == 2
    assert transcript.segments == ()


async def test_after_two_small_moves_in_a_row_the_window_is_used_up() -> None:
    """A model that ends a segment after 20 ms, over and over, is asked twice a window, not 1,500 times."""
    script = Script(answer(0.0, " a", 0.02, 0.02, " b"))
    transcript = await begin(ramp(60), script).transcript()
    small = 320
    assert script.windows() == [
        (0, WINDOW),
        (small, small + WINDOW),
        (small + WINDOW, 60 * RATE),
        (2 * small + WINDOW, 60 * RATE),
    ]
    assert [(s.start, s.end) for s in transcript.segments] == [(0, 0.02), (0.02, 0.04), (30.02, 30.04), (30.04, 30.06)]


@define(eq=False)
class Worded:
    """A run that says one word in every window, which ends after ``seconds``, and goes on."""

    seconds: float
    script: Script = field(factory=lambda: Script(answer(0.0, " hm", 20.0, 20.0, " x")))

    async def __call__(self, requests: Sequence[Request]) -> Sequence[Generated]:
        (request,) = requests
        if request.alignment is None:
            return await self.script(requests)
        aligned = len(request.prompt_token_ids) - request.alignment.start
        frames = (0, *[round(50 * self.seconds)] * aligned)
        await trio.lowlevel.checkpoint()
        return [attrs.evolve(answer(), aligned=AlignedTokens(frames=frames, logprobs=(-0.1,) * aligned))]


@pytest.mark.parametrize(
    ("seconds", "moves"),
    [(0.6, [0.6, 30, 0.6, 30]), (1.0, [1, 1, 1, 1])],
    ids=["two small ones", "a second is no small one"],
)
async def test_after_two_small_moves_by_words_the_window_is_used_up(seconds: float, moves: list[float]) -> None:
    """The window goes on behind its last word. Where words end early, over and over, it does not creep either."""
    run = Worded(seconds)
    transcription = begin(ramp(120), run, options_of(timestamps="word"), ALIGNS)
    for _ in range(5):
        await transcription.next_window()
    starts = [start / RATE for start, _ in run.script.windows()]
    assert [after - before for before, after in pairwise(starts)] == pytest.approx(moves, abs=0.03)


@define(eq=False)
class Aligned:
    """A run that says three words in every window, whose tokens begin and end at ``shares`` of its frames."""

    shares: Sequence[float]
    script: Script = field(factory=lambda: Script(*[answer(0.0, " hm a, x.", 30.0)] * 9))

    async def __call__(self, requests: Sequence[Request]) -> Sequence[Generated]:
        (request,) = requests
        if request.alignment is None:
            return await self.script(requests)
        aligned = len(request.prompt_token_ids) - request.alignment.start
        shares = sorted(self.shares[at % len(self.shares)] for at in range(aligned + 1))
        frames = tuple(round(share * request.alignment.frames) for share in shares)
        await trio.lowlevel.checkpoint()
        return [attrs.evolve(answer(), aligned=AlignedTokens(frames=frames, logprobs=(-0.1,) * aligned))]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(RATE // 20, 70 * RATE))
@settings(max_examples=40, deadline=None)
def test_words_lie_within_the_audio_in_order(shares: list[float], length: int) -> None:
    """Wherever the alignment puts their tokens, its last frame included, and however the audio ends within a frame."""

    async def read() -> Transcript:
        return await begin(ramp(70)[:length], Aligned(shares), options_of(timestamps="word"), ALIGNS).transcript()

    transcript = trio.run(read)
    words = [word for segment in transcript.segments for word in segment.words or ()]
    assert all(0 <= word.start <= word.end <= transcript.duration for word in words)
    assert all(first.end <= second.start for first, second in pairwise(words))
    assert all(segment.end <= transcript.duration for segment in transcript.segments)


async def test_without_timestamps_each_window_is_one_segment() -> None:
    """timestamps='none': windows of full length."""
    script = Script(answer(" text"))
    transcript = await begin(ramp(70), script, options_of(timestamps="none")).transcript()
    assert [(s.start, s.end) for s in transcript.segments] == [(0, 30), (30, 60), (60, 70)]


async def test_a_rest_shorter_than_a_timestamp_step_is_not_read() -> None:
    """Nothing in it could be told."""
    script = Script(answer(0.0, "a", 5.0))
    samples = np.concatenate([ramp(30), np.ones(319, np.float32)])
    transcript = await begin(samples, script).transcript()
    assert len(script.requests) == 1
    assert transcript.coverage[-1].end == transcript.duration == len(samples) / RATE


# ---- which segments are told -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "kept"),
    [
        ((1.0, " late", 1.4), [(0, 0.8, " late")]),
        ((1.0, " late"), [(0, 0.8, " late")]),
        ((1.0, " ", 1.2, 1.2, " late", 1.4, 1.4, " later", 1.6), [(0, 0.8, " late")]),
        ((0.0, " soon", 0.5, 0.5, " sooner", 0.6, 1.0, " late", 1.4), [(0, 0.5, " soon"), (0.5, 0.6, " sooner")]),
        # one span, which ends at its last timestamp
        ((0.0, " soon", 0.5, " x"), [(0, 0.5, " soon x")]),
    ],
)
async def test_the_only_text_is_kept_although_its_time_lies_behind_the_audio(
    parts: tuple[float | str, ...], kept: list[tuple[float, float, str]]
) -> None:
    """Short audio, and a timestamp in the padding: the words were said, so they take the window's time."""
    transcript = await begin(ramp(0.8), Script(answer(*parts))).transcript()
    assert [(s.start, s.end, s.text) for s in transcript.segments] == kept


# ---- silence ---------------------------------------------------------------------------------------------------------


async def test_exact_silence_is_never_asked() -> None:
    """Not for its text, nor for the language; the text before goes on behind it."""
    samples = ramp(120)
    samples[: 30 * RATE] = samples[60 * RATE : 90 * RATE] = 0.0
    script = Script(detected(0.9, 0.1), answer(0.0, "a", 5.0), answer(0.0, "b", 5.0))
    transcript = await begin(samples, script, options_of(language=None)).transcript()
    assert [one.text for one in transcript.segments] == ["a", "b"]
    assert script.windows() == [(30 * RATE, 60 * RATE), (90 * RATE, 120 * RATE)]
    assert ord("a") in script.requests[-1].prompt_token_ids


@pytest.mark.parametrize("parallel", [False, True])
async def test_where_nobody_speaks_there_is_no_language(parallel: bool) -> None:
    script = Script(answer("never asked"))
    transcription = await read_all(
        np.zeros(100 * RATE, np.float32), script, options_of(language=None), parallel=parallel
    )
    assert script.requests == []
    assert (transcription.progress().so_far.language, transcription.progress().so_far.language_probability) == (
        None,
        None,
    )
    assert [(one.start, one.end, one.kind) for one in transcription.coverage] == [(0, 100, "silent")]


# ---- speech behind a window's last segment ---------------------------------------------------------------------------

RULES = CutRules(window=WINDOW, gap=2 * RATE, padding=RATE // 2, earliest=20 * RATE)


def voiced(*speech: tuple[float, float], seconds: float, rules: CutRules = RULES) -> Plan:
    spans = [(round(start * RATE), round(stop * RATE)) for start, stop in speech]
    return Plan(rules, EVERYTHING, PaperHearing(spans, round(seconds * RATE)))


@pytest.mark.parametrize(
    ("speech_until", "starts"),
    [
        (20.0, [0, 10]),  # speech of 10 s behind the last segment: read on
        (11.0, [0, 10]),  # of just a second
        (10.9, [0]),  # of less
        (8.0, [0]),  # none
    ],
)
async def test_speech_behind_a_closed_windows_last_segment_is_read_on(speech_until: float, starts: list[float]) -> None:
    """The model ended early, although voice activity hears somebody. Without voice activity its word counts."""
    script = Script(answer(0.0, "a", 10.0), answer(0.0, "b", 20.0))
    plan = voiced((0, speech_until), seconds=28)
    transcription = await read_all(ramp(28), script, plan=plan)
    assert [start // RATE for start, _ in script.windows()] == starts
    plain = Script(*script.answers)
    await begin(ramp(28), plain).transcript()
    assert len(plain.requests) == 1
    assert "failed" not in {one.kind for one in transcription.coverage}


async def test_reading_on_ends_where_the_model_says_nothing_new() -> None:
    """Segments of less than a second use the window up, so that a stubborn model ends too; coverage tells the rest."""
    script = Script(answer(0.0, "a", 0.9))
    transcription = await read_all(ramp(28), script, plan=voiced((0, 28), seconds=28))
    assert len(script.requests) == 1
    assert [(one.kind, one.end) for one in transcription.coverage] == [("speech", 0.9), ("failed", 28)]


def texts_before(script: Script) -> list[str]:
    """What each request has in front of <|startoftranscript|>: text alone."""
    prompts = [request.prompt_token_ids for request in script.requests]
    return [bytes(token for token in ids[: ids.index(START)] if token < 256).decode() for ids in prompts]


async def test_text_that_misled_the_model_is_not_given_on() -> None:
    """The model stopped although somebody spoke on: neither that window's text nor what came before it is repeated."""
    script = Script(answer(0.0, "a", 30.0), answer(0.0, "b", 10.0), answer(0.0, "c", 20.0))
    await read_all(ramp(60), script, options_of(initial_prompt="names"), plan=voiced((0, 60), seconds=60))
    assert [start // RATE for start, _ in script.windows()] == [0, 30, 40]
    assert texts_before(script) == [" names", " namesa", ""]


async def test_hotwords_come_again_where_other_text_misled_the_model_and_not_where_they_did() -> None:
    script = Script(NOTHING, answer(0.0, "a", 30.0), NOTHING, answer(0.0, "b", 30.0))
    await read_all(ramp(60), script, options_of(hotwords="Åsa"), plan=voiced((0, 60), seconds=60))
    assert texts_before(script) == [" Åsa", "", " Åsaa", " Åsa"]


NOTHING = answer(0.0, 30.0, no_speech=0.9)


@pytest.mark.parametrize(
    ("speech", "before", "asked"),
    [
        (((0, 29), (32, 33)), "a", ["", "a", ""]),  # a second of speech
        (((0, 29), (32, 32.9)), "a", ["", "a"]),  # less may be a noise
        (((0, 29), (32, 60)), "", ["", ""]),  # there is no text that could have misled it
        (None, "a", ["", "a"]),  # nobody listens: the model's word counts
    ],
)
async def test_where_somebody_speaks_and_the_model_says_nothing_it_is_asked_without_the_text_before(
    speech: tuple[tuple[float, float], ...] | None, before: str, asked: list[str]
) -> None:
    """Once more, on the same audio. What it says then is told."""
    first = answer(0.0, before, 29.0) if before else NOTHING
    script = Script(first, NOTHING, answer(0.0, "b", 0.5))
    plan = plain() if speech is None else voiced(*speech, seconds=60)
    transcription = begin(ramp(60), script, plan=plan)
    transcript = await transcription.transcript()
    assert texts_before(script) == asked
    assert len(script.windows()) == 2
    assert transcript.text == before + ("b" if len(asked) == 3 else "")


OFF = {"voice_activity": "off", "hotwords": "Åsa, Ödön"}
AGAIN = " so so so" * 30


@pytest.mark.parametrize(
    ("options", "told", "second", "taken"),
    [
        (OFF, " and Ödön.", NOTHING, ""),  # noise is heard as one of the names
        (OFF, " ...", " Thanks.", "Thanks."),
        (OFF, " Ödön", " Eden", "Ödön"),  # somebody is heard without the names, too
        (OFF, " Ödön spoke to me", None, "Ödön spoke to me"),  # a quarter of the words
        ({"hotwords": "Ödön"}, " Ödön", None, "Ödön"),  # voice activity hears somebody
        ({"initial_prompt": "Hello. " * 500}, " Hello. Hello.", " Good day.", "Good day."),
        ({"initial_prompt": "names"}, AGAIN, " so", "so"),  # whatever repeats itself
        ({"initial_prompt": "names"}, AGAIN, AGAIN + AGAIN, AGAIN.strip()),
        ({}, AGAIN, None, AGAIN.strip()),  # there is no text that could have misled the model
    ],
    ids=["noise", "marks", "heard", "few", "voiced", "prompt", "repeats", "both", "none"],
)
async def test_a_text_that_may_be_an_echo_is_read_once_more_without_the_text_before(
    options: dict[str, str], told: str, second: str | Generated | None, taken: str
) -> None:
    """The window behind has what was taken before it, and of the rest no more than the hotwords."""
    without = [] if second is None else [answer(0.0, second, 30.0) if isinstance(second, str) else second]
    script = Script(answer(0.0, told, 30.0, no_speech=0.5), *without, answer(0.0, " z", 30.0))
    plan = plain() if options is OFF else voiced((0, 60), seconds=60)
    transcript = await begin(ramp(60), script, options_of(**options), plan=plan).transcript()
    assert transcript.text == f"{taken} z".strip()
    first, *again, last = texts_before(script)
    assert again == [""] * len(without)
    if without and taken != told.strip():
        assert last == first * ("hotwords" in options) + (f" {taken}" if taken else "")


@pytest.mark.parametrize("second", [NOTHING, answer(0.0, "b", 30.0)], ids=["nothing again", "a text"])
async def test_a_second_reading_forgets_the_text_before(second: Generated) -> None:
    """The windows behind have what the second reading told before them, and nothing older."""
    script = Script(answer(0.0, "a", 30.0), NOTHING, second, answer(0.0, "c", 30.0))
    await read_all(ramp(90), script, plan=voiced((0, 90), seconds=90))
    assert texts_before(script) == ["", "a", "", "" if second is NOTHING else "b"]


async def test_a_second_reading_that_fails_leaves_all_as_it_was() -> None:
    """The window is read again from the beginning, with the text before it."""
    script = Script(answer(0.0, "a", 30.0), NOTHING, NOTHING, NOTHING, answer(0.0, "b", 30.0))

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        found = await script(requests)
        if len(script.requests) == 3:
            raise LookupError("device")
        return found

    transcription = begin(ramp(60), run, plan=voiced((0, 60), seconds=60))
    await transcription.next_window()
    with pytest.raises(LookupError, match="device"):
        await transcription.next_window()
    assert (await transcription.transcript()).text == "b"
    assert texts_before(script) == ["", "a", "", "a", ""]


async def test_a_silence_between_speech_is_not_read() -> None:
    script = Script(answer(0.0, "a", 3.0), answer(0.0, "b", 3.0))
    await read_all(ramp(70), script, plan=voiced((2, 5), (50, 53), seconds=70))
    assert script.windows() == [(1.5 * RATE, 5.5 * RATE), (49.5 * RATE, 53.5 * RATE)]


# ---- clips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("language", ["en", None])
async def test_a_clip_of_a_few_samples_does_not_end_the_others(parallel: bool, language: str | None) -> None:
    """It is shorter than the model can tell of, and so is the rest of a clip behind a last timestamp."""
    clips = ((0, 100), (RATE, 6 * RATE + 100), (50 * RATE, math.inf))
    ending = answer(0.0, "a", 5.0, 5.0, "b")
    script = Script(*([] if language else [detected(0.9, 0.1)]), ending, answer(0.0, "c", 5.0))
    transcription = await read_all(
        ramp(60), script, options_of(language=language), plan=plain(WINDOW, clips), parallel=parallel, at_once=1
    )
    assert times(transcription) == [(1, 6), (50, 55)]


# ---- languages -------------------------------------------------------------------------------------------------------


async def test_the_language_is_detected_once_on_the_first_window() -> None:
    """One token after <|startoftranscript|>, on the item that the window itself uses; probabilities among languages."""
    script = Script(detected(0.1, 0.3, 0.2), answer(0.0, "a", 5.0))
    transcript = await begin(ramp(40), script, TranscribeOptions()).transcript()
    detection, first, second = script.requests
    assert detection.id == "r/language/0"
    assert detection.prompt_token_ids == (START,)
    assert detection.max_tokens == 1
    assert detection.rules.allowed == (EN, DE)
    assert detection.probe is not None
    assert attrs.astuple(detection.probe) == (0, (EN, DE, NO_SPEECH))
    assert detection.items[0].key == first.items[0].key
    assert first.prompt_token_ids == second.prompt_token_ids[-3:] == (START, DE, TRANSCRIBE)
    assert transcript.language == "de"
    assert transcript.language_probability == pytest.approx(0.75)


async def test_start_detects_the_language_ahead_of_the_windows() -> None:
    """A stream can tell the language before its first segment; it is not asked for twice."""
    script = Script(detected(0.9, 0.05), answer(0.0, "a", 5.0))
    transcription = begin(ramp(5), script, TranscribeOptions())
    assert transcription.progress().so_far.language is None
    await transcription.start()
    await transcription.start()
    assert transcription.progress().so_far.language == "en"
    await transcription.next_window()
    assert [request.id for request in script.requests] == ["r/language/0", "r/0.0/1"]


@pytest.mark.parametrize(
    ("segments", "answers", "language", "asked"),
    [
        (1, [(0.6, 0.4)], "en", 1),  # certain enough
        (1, [(0.3, 0.25)], "en", 1),  # asked no more
        (3, [(0.3, 0.3), (0.1, 0.9)], "de", 2),  # until one is certain
        (3, [(0.55, 0.45), (0.55, 0.45), (0.2, 0.8)], "de", 3),  # none is: the mean of all
        (9, [(0.55, 0.45), (0.55, 0.45), (0.55, 0.45), (0.4, 0.6)], "en", 4),  # the audio has four windows
    ],
)
async def test_the_language_is_detected_in_several_windows_until_it_is_certain(
    segments: int, answers: list[tuple[float, float]], language: str, asked: int
) -> None:
    """Each of them another stretch of the audio."""
    script = Script(*(detected(*one) for one in answers))
    threshold = 0.5 if segments == 1 else 0.85
    options = options_of(language=None, language_detection_segments=segments, language_detection_threshold=threshold)
    transcription = begin(ramp(100), script, options)
    await transcription.start()
    assert transcription.progress().so_far.language == language
    starts = [start // RATE for start, _ in script.windows()]
    assert starts == [0, 30, 60, 90][:asked]


async def test_what_the_language_was_detected_in_is_read_from_its_beginning() -> None:
    """Detection listens and reads ahead; the first window is still there."""
    uncertain = detected(0.55, 0.45)
    script = Script(uncertain, uncertain, uncertain, answer(0.0, "a", 5.0, 5.0, "b"))
    options = options_of(
        language=None, language_detection_segments=3, language_detection_threshold=0.9, voice_activity="skip"
    )
    samples = np.where(np.arange(100 * RATE) // RATE % 20 < 15, np.float32(0.1), np.float32(0.0))
    async with opened(samples, script, options) as transcription:
        transcript = await transcription.transcript()
    assert transcript.segments[0].start == 0


async def test_a_multilingual_recording_is_asked_for_its_language_in_every_window() -> None:
    script = Script(
        detected(0.9, 0.1), detected(0.9, 0.1), answer(0.0, "a", 5.0), detected(0.1, 0.9), answer(0.0, "b", 5.0)
    )
    transcript = await begin(ramp(60), script, options_of(language=None, multilingual=True)).transcript()
    texts = [request for request in script.requests if request.rules.allowed is None]
    assert [EN in request.prompt_token_ids for request in texts] == [True, False]
    assert [DE in request.prompt_token_ids for request in texts] == [False, True]
    assert transcript.language == "en"
    assert [segment.language for segment in transcript.segments] == ["en", "de"]
    assert transcript.languages == ("en", "de")


@pytest.mark.parametrize(("carried", "prompt"), [(False, ""), (True, " names")])
async def test_where_the_language_changes_the_text_before_is_dropped_and_hotwords_stay(
    carried: bool, prompt: str
) -> None:
    """The model would go on in the language of that text, and invents a translation of what is said."""
    english, german = detected(0.9, 0.1), detected(0.1, 0.9)
    said = [answer(0.0, text, 30.0) for text in "abcd"]
    script = Script(
        english, english, said[0], english, said[1], german, said[2], german, said[3], english, answer(0.0, "e", 30.0)
    )
    options = options_of(
        language=None, multilingual=True, hotwords="Åsa", initial_prompt="names", carry_initial_prompt=carried
    )
    transcript = await begin(ramp(150), script, options).transcript()
    assert [one.language for one in transcript.segments] == ["en", "en", "de", "de", "en"]
    asked = [text for text in texts_before(script) if text]
    always = f" Åsa{prompt}"
    assert asked == [" Åsa names", " Åsa namesa", always, f"{always}c", always]


# ---- the text before -------------------------------------------------------------------------------------------------

texts = st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6), st.sampled_from([0.0, 0.5, 0.6, 1.0])), max_size=6)


@given(
    texts,
    st.sampled_from([(), (20,), (20, 21)]),
    st.lists(st.integers(10, 19), max_size=6),
    st.integers(0, 8),
    st.booleans(),
    st.integers(0, 9),
)
@settings(max_examples=200)
def test_the_history_is_the_end_of_all_text_since_the_last_reset(
    windows: list[tuple[list[int], float]],
    always: tuple[int, ...],
    initial: list[int],
    room: int,
    goes_on: bool,
    taken: int,
) -> None:
    """As openai/whisper has it: all tokens, of which the last are given, and the place behind the last reset. What
    comes always comes first, and is never cut."""
    history = History(always=always, initial=tuple(initial), room=room, goes_on=goes_on, reset_above=0.5)
    every, since = list(initial), 0
    for token_ids, temperature in windows:
        history.add(token_ids, temperature)
        every += token_ids
        if not goes_on or temperature > 0.5:
            since = len(every)
        expected = every[since:]
        assert history.last() == (*always, *expected[max(len(expected) - room, 0) :])
        left = max(room - taken, 0)
        assert history.last(taken) == (*always, *expected[max(len(expected) - left, 0) :])


# ---- parts of the audio ----------------------------------------------------------------------------------------------


async def clipped(*clips: tuple[float, float]) -> Transcript:
    """The transcript of parts of seven seconds in which somebody speaks."""
    async with opened(ramp(7) / (8 * RATE), Script(answer(0.0, "a", 3.0)), options_of(clip_timestamps=clips)) as parts:
        return await parts.transcript()


async def test_audio_that_nobody_asked_for_is_excluded_and_has_not_failed() -> None:
    transcript = await clipped((0, 3), (5, 6))
    kinds = [("speech", 3), ("excluded", 5), ("speech", 6), ("excluded", 7)]
    assert [(one.kind, one.end) for one in transcript.coverage] == kinds
    assert transcript.warnings == ()


async def test_parts_that_the_audio_does_not_have_are_named() -> None:
    """A warning beside other parts; alone they are a mistake, which an empty text would hide."""
    assert (await clipped((0, 3), (100, 200))).warnings == (
        "clip_timestamps=[(100.0, 200.0)], but the audio ends at 7.00 s",
    )
    with pytest.raises(InvalidRequest, match=r"clip_timestamps=\[\(100.0, 200.0\)\], but the audio ends at 7.00 s; al"):
        await clipped((100, 200))


async def test_silent_parts_of_audio_whose_length_nobody_knows_are_not_after_its_end() -> None:
    """Live WebM promises no length, and its end is not read."""
    clips = ((1.0, 2.0), (5.0, 6.0))
    plan = attrs.evolve(
        voiced(seconds=60), clips=tuple((round(start * RATE), round(stop * RATE)) for start, stop in clips)
    )
    transcription = begin(ramp(60), Script(), options_of(clip_timestamps=clips), plan=plan)
    transcription.recording.length_known = False
    assert (await transcription.transcript()).warnings == ()
