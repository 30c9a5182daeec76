"""One transcription as its callers see it: calls, ends, failures, where it is; and the fallback over temperatures."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing

from triolet.api.inputs.timeline import AudioFault
from triolet.api.outputs.results import Segment, Stretch
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.transcription import SegmentStream
from triolet.api.speech.windows import Generated
from triolet.core.errors import EngineStateError
from triolet.core.request import Request

from .speech import (
    BEGIN,
    LADDER,
    RATE,
    PaperVoice,
    Script,
    answer,
    begin,
    describe,
    detected,
    opened,
    options_of,
    ramp,
    tokens,
)

LOOP = " and" * 50


# ---- calls and failures ----------------------------------------------------------------------------------------------


async def test_a_window_that_is_asked_again_has_the_text_before_it() -> None:
    """A failure in the middle loses nothing of the history, and adds nothing twice."""
    asked: list[tuple[int, ...]] = []

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        asked.append(requests[0].prompt_token_ids)
        await trio.lowlevel.checkpoint()
        if len(asked) == 2:
            raise RuntimeError("device")
        return [answer(0.0, "a", 5.0)]

    transcription = begin(ramp(60), run)
    await transcription.next_window()
    with pytest.raises(RuntimeError):
        await transcription.next_window()
    await transcription.next_window()
    assert asked[1] == asked[2]
    assert tokens(0.0, "a", 5.0) == asked[2][1 : 1 + 3]


async def test_a_request_id_is_never_used_twice() -> None:
    """A window that was cancelled or failed is asked again under other names: the engine may still know the first."""
    fates = ["cancelled", "failed", "answered"] * 2
    asked: list[str] = []

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        asked.append(requests[0].id)
        fate = fates[len(asked) - 1]
        if fate == "cancelled":
            scope.cancel()
        if fate == "failed":
            raise RuntimeError("device")
        await trio.lowlevel.checkpoint()
        return [detected(0.9, 0.1) if requests[0].rules.allowed else answer(0.0, "a", 5.0)]

    transcription = begin(ramp(10), run, TranscribeOptions())
    for ask in (transcription.start, transcription.next_window):
        with trio.CancelScope() as scope:
            await ask()
        assert scope.cancelled_caught
        with pytest.raises(RuntimeError, match="device"):
            await ask()
        assert transcription.position == 0
        await ask()
    assert transcription.position == transcription.progress().duration == 10
    assert await transcription.next_window() is None
    assert await transcription.next_window() is None
    assert [name.rpartition("/")[0] for name in asked] == ["r/language"] * 3 + ["r/0.0"] * 3
    assert len(set(asked)) == 6


async def test_one_window_at_a_time(nursery: trio.Nursery) -> None:
    """A second call while one runs is refused by name; the first goes on, and calls are welcome again."""
    go, done = trio.Event(), trio.Event()

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        await go.wait()
        return [answer(0.0, "a", 5.0)]

    found: list[list[Segment] | None] = []
    transcription = begin(ramp(40), run)

    async def first() -> None:
        found.append(await transcription.next_window())
        done.set()

    nursery.start_soon(first)
    await trio.testing.wait_all_tasks_blocked()
    with pytest.raises(EngineStateError, match=r"next_window of transcription 'r' .* one call at a time"):
        await transcription.next_window()
    with pytest.raises(EngineStateError, match="start of transcription 'r'"):
        await transcription.start()
    go.set()
    await done.wait()
    assert [len(segments or []) for segments in found] == [1]
    assert len(await transcription.next_window() or []) == 1


# ---- what it tells ---------------------------------------------------------------------------------------------------


async def test_a_transcript_has_all_that_was_found() -> None:
    """Segments are numbered over the windows, text is joined, every second has its place."""
    script = Script(
        detected(0.1, 0.3),
        answer(0.0, " one", 12.0, 12.0, " tw"),
        answer(0.5, " two", 20.0, logprob=-0.5, no_speech=0.2),
    )
    transcript = await begin(ramp(40), script, TranscribeOptions(task="translate")).transcript()
    assert [(s.id, s.start, s.end, s.text) for s in transcript.segments] == [(0, 0, 12, " one"), (1, 12, 32, " two")]
    assert transcript.text == "one two"
    assert transcript.duration == 40
    assert (transcript.task, transcript.language) == ("translate", "de")
    assert transcript.language_probability == pytest.approx(0.75)
    assert dict(transcript.language_probabilities or {}) == pytest.approx({"en": 0.25, "de": 0.75})
    assert transcript.coverage == (Stretch(start=0, end=32, kind="speech"), Stretch(start=32, end=40, kind="silent"))
    assert transcript.warnings == ()
    last = transcript.segments[-1]
    assert last.token_ids == tuple(b" two")
    assert (last.avg_logprob, last.temperature) == (pytest.approx(-0.5), 0.0)
    assert last.no_speech_prob == pytest.approx(0.2)


async def test_audio_of_unknown_length_is_as_long_as_it_was_read() -> None:
    script = Script(answer(0.0, "a", 5.0))
    transcription = begin(ramp(40), script)
    transcription.recording.length_known = False
    await transcription.next_window()
    assert (transcription.progress().duration, transcription.position) == (None, 30)
    assert transcription.progress().transcript([]).duration == 30
    assert (await transcription.transcript()).duration == 40


async def test_audio_that_breaks_off_is_told() -> None:
    transcription = begin(ramp(5), Script(answer(0.0, "a", 5.0)))
    transcription.recording.faults = (AudioFault(5.0, 9.0, "cut short", "it breaks off at 5 s"),)
    assert (await transcription.transcript()).warnings == ("it breaks off at 5 s",)


async def test_what_the_file_lost_is_not_silent() -> None:
    """Nobody knows whether somebody spoke there: coverage calls it failed, and text over it is text."""
    transcription = begin(ramp(20), Script(answer(0.0, "a", 5.0), answer("", no_speech=0.9, logprob=-2)))
    transcription.recording.lost = ((3.0, 7.0), (9.5, 10.0), (12.0, 13.5))
    found = [(one.start, one.end, one.kind) for one in (await transcription.transcript()).coverage]
    assert found == [
        *((0.0, 5.0, "speech"), (5.0, 7.0, "failed"), (7.0, 12.0, "silent")),
        *((12.0, 13.5, "failed"), (13.5, 20.0, "silent")),
    ]


async def test_what_was_read_is_forgotten() -> None:
    """No sample before the next window is asked for again, so that hours of audio need no memory."""
    transcription = begin(ramp(95), Script(answer(0.0, "a", 12.0, 12.0, "b")))
    for seconds in (12, 24, 36):
        await transcription.next_window()
        assert transcription.recording.forgotten == seconds * RATE


async def test_a_stream_tells_its_segments_one_by_one() -> None:
    """And where it is: silent windows are passed over, the end is told once."""
    script = Script(answer(0.0, "a", 5.0, 5.0, "b", 6.0), answer("", no_speech=0.9, logprob=-2), answer(0.0, "c", 5.0))
    transcription = begin(ramp(80), script)
    stream = SegmentStream(transcription, transcription.progress)
    assert (stream.transcript().segments, stream.transcript().text) == ((), "")
    known = []
    seen = []
    async for segment in stream:
        seen.append((segment.id, segment.text, stream.position))
        known.append((stream.transcript().text, [(one.kind, one.end) for one in stream.transcript().coverage]))
    assert seen == [(0, "a", 30), (1, "b", 30), (2, "c", 80)]
    first = ("ab", [("speech", 6), ("silent", 30), ("unread", 80)])
    assert known == [first, first, ("abc", [("speech", 6), ("silent", 60), ("speech", 65), ("silent", 80)])]
    assert (stream.language, stream.language_probability, stream.duration) == ("en", None, 80)
    whole = stream.transcript()
    assert whole == await begin(ramp(80), Script(*script.answers)).transcript()
    assert stream.timings is not None


async def test_without_a_seed_each_transcription_draws_afresh() -> None:
    seeds = set()
    for _ in range(2):
        async with opened(ramp(1) / RATE, Script(answer("a")), options_of(seed=None)) as transcription:
            seeds.add(transcription.reader.recipe.options.seed)
    assert len(seeds - {None}) == 2


# ---- the fallback over temperatures ----------------------------------------------------------------------------------


async def test_a_repetition_is_tried_again_at_the_next_temperature() -> None:
    """The ladder climbs until the text is good, with a seed of its own each time, on the same item."""
    options = attrs.evolve(LADDER, seed=7)
    script = Script(answer(0.0, LOOP, 5.0), answer(0.0, "bad guess", 5.0, logprob=-2), answer(0.0, " good", 5.0))
    transcript = await begin(ramp(5), script, options).transcript()
    assert [(r.id, r.sampling.temperature, r.sampling.seed) for r in script.requests] == [
        ("r/0.0/0", 0.0, 0),
        ("r/0.1/1", 0.2, 8),
        ("r/0.2/2", 0.4, 9),
    ]
    assert len({request.items[0].key for request in script.requests}) == 1
    assert [(s.text, s.temperature) for s in transcript.segments] == [(" good", 0.4)]


async def test_the_second_temperature_runs_alone_and_all_others_together() -> None:
    """What comes first in order is taken, as if they had run one by one."""
    bad, good = answer(0.0, "bad", 5.0, logprob=-2), answer(0.0, "good", 5.0)
    script = Script(bad, bad, bad, bad, good, good, answer(0.0, "better", 5.0, logprob=-0.01))
    options = options_of(temperature=(0.0, 0.2, 0.4, 0.6, 0.8, 1.0), best_of=1)
    transcript = await begin(ramp(5), script, options).transcript()
    assert script.together == [1, 1, 4]
    assert [(s.text, s.temperature) for s in transcript.segments] == [("good", 0.8)]


async def test_where_every_temperature_fails_the_best_is_taken() -> None:
    """Bad text is better than none: its segment says how bad."""
    script = Script(
        answer(0.0, LOOP, 5.0), answer(0.0, "mumble", 5.0, logprob=-1.5), answer(0.0, "mutter", 5.0, logprob=-2)
    )
    (segment,) = (await begin(ramp(5), script, LADDER).transcript()).segments
    assert (segment.text, segment.temperature, segment.avg_logprob) == ("mumble", 0.2, pytest.approx(-1.5))


async def test_a_segment_has_the_log_probabilities_of_its_own_tokens() -> None:
    """Those of the timestamps around its text are not among them."""
    window = answer(0.0, "ab", 5.0, 5.0, "cde", 10.0)
    counted = attrs.evolve(window, logprobs=tuple(-float(place) for place in range(len(window.logprobs))))
    segments = (
        await begin(ramp(10), Script(counted), options_of(temperature=(0.0,), logprob_threshold=None)).transcript()
    ).segments
    texts = [place for place, token in enumerate(window.token_ids) if token < BEGIN]
    assert [place for segment in segments for place in segment.logprobs] == [-float(place) for place in texts]
    assert [len(segment.logprobs) for segment in segments] == [len(segment.token_ids) for segment in segments]


# -- trimmed windows ---------------------------------------------------------------------------------------------------

TRIMMED = attrs.evolve(LADDER, encoder_context="trimmed")


@pytest.mark.parametrize(
    ("seconds", "embeddings"), [(0.5, 150), (5.0, 350), (5.001, 400), (27.5, 1500), (28.5, 1500), (30.0, 1500)]
)
async def test_a_trimmed_window_has_as_many_embeddings_as_it_lasts(seconds, embeddings):
    """And two seconds of silence, up to a whole second: windows of similar lengths are computed together."""
    script = Script(answer(0.0, "a", min(seconds, 5.0)))
    await begin(ramp(seconds), script, TRIMMED).transcript()
    (request,) = script.requests
    (item,) = request.items
    assert (item.embeddings, item.size) == (embeddings, embeddings * 64 * 4)
    whole = Script(answer(0.0, "a", min(seconds, 5.0)))
    await begin(ramp(seconds), whole, LADDER).transcript()
    (full,) = whole.requests[0].items
    assert (full.key == item.key) == (embeddings == 1500)


@pytest.mark.parametrize(
    ("first", "times", "temperature"),
    [
        (answer(0.0, "a" * 99, 5.0), 1, 0.0),  # at temperature 0 once more
        (answer(0.0, "a" * 99, 5.0), 2, 0.2),  # ... then as any window
        # that nobody speaks is least certain where the silence behind the speech is missing
        (answer(0.0, "hm", 5.0, logprob=-3.0, no_speech=0.9), 1, 0.0),
    ],
)
async def test_a_trimmed_window_without_good_text_is_read_with_all_of_it(first, times, temperature):
    script = Script(*[first] * times, answer(0.0, "well", 5.0))
    (segment,) = (await begin(ramp(5), script, TRIMMED).transcript()).segments
    assert (segment.text, segment.temperature) == ("well", temperature)
    assert [request.items[0].embeddings for request in script.requests] == [350, *[1500] * times]


async def test_words_are_those_of_the_window_that_the_text_was_read_from():
    script = Script(answer(0.0, "a" * 99, 5.0), answer(0.0, "well", 5.0))
    options = attrs.evolve(TRIMMED, timestamps="word")
    await begin(ramp(5), script, options, describe(alignment_fault=None)).transcript()
    assert [request.items[0].embeddings for request in script.requests] == [350, 1500, 1500]
    assert script.requests[-1].alignment is not None


# -- which parts are read ----------------------------------------------------------------------------------------------

LEVELS = ((1, 0), (2, 0.6), (1, 0.4), (2, 0), (0.2, 0.9), (4, 0), (3, 0.6))  # seconds, and the probability of speech
TENTH = RATE // 10


class Levels(PaperVoice):
    """A detector that takes the loudest sample of a frame for the probability."""

    def listen(self) -> Any:
        ends = np.zeros(0, np.float32)  # the audio has whole frames
        return SimpleNamespace(hear=lambda samples: samples.reshape(-1, TENTH).max(axis=1), end=lambda: ends)


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, [(0.5, 6.7), (9.7, 13.6)]),
        ({"threshold": 0.7}, [(5.5, 6.7)]),
        ({"threshold": 0.3}, [(0.5, 6.7), (9.7, 13.6)]),
        ({"min_silence_duration_ms": 1_000}, [(0.5, 4.5), (5.5, 6.7), (9.7, 13.6)]),
        ({"min_silence_duration_ms": 2_500, "neg_threshold": 0.5}, [(0.5, 3.5), (5.5, 6.7), (9.7, 13.6)]),
        ({"min_speech_duration_ms": 300}, [(0.5, 4.5), (9.7, 13.6)]),
        ({"max_speech_duration_s": 2}, [(0.5, 2.5), (2.5, 4.3), (5.5, 6.7), (9.7, 11.7), (11.7, 13.6)]),
        ({"speech_pad_ms": 0}, [(0.9, 6.3), (10.1, 13.2)]),
        ({"speech_pad_ms": 5_000}, [(0.0, 7.8), (8.6, 14.7)]),
    ],
)
async def test_parameters_of_voice_activity_decide_what_is_read(
    given: dict[str, float], windows: list[tuple[float, float]]
) -> None:
    samples = np.concatenate([np.full(round(seconds * RATE), level, np.float32) for seconds, level in LEVELS])
    options = options_of(voice_activity=Levels(RATE, TENTH), **{f"vad_{name}": value for name, value in given.items()})
    async with opened(samples, Script(answer("a")), options) as transcription:
        found, seek = [], 0
        while (window := await transcription.plan.next(seek)) is not None:
            seek = window[1]
            found.append((window[0] / RATE, seek / RATE))
    assert [pytest.approx(one) for one in windows] == found
