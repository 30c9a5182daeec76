"""Whatever the model writes: a transcription advances, ends, covers the audio and tells segments in order; read in
parallel it is each piece alone."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import trio
import trio.testing
from attrs import define, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.outputs.results import Segment
from triolet.api.speech.options import TranscribeOptions
from triolet.api.speech.plan import Clips, CutRules, Plan
from triolet.api.speech.transcription import Transcription
from triolet.api.speech.windows import Generated
from triolet.core.request import FinishReason, Request

from .speech import (
    BEGIN,
    EVERYTHING,
    GREEDY,
    RATE,
    STEP,
    PaperHearing,
    begin,
    begin_parallel,
    describe,
    extent,
    options_of,
    plain,
)

SHORT = 90 * STEP  # a window of 90 timestamp steps shows all that one of 1,500 does
SMALL = describe(window_samples=SHORT)
Span = tuple[int, int]

# -- strategies --------------------------------------------------------------------------------------------------------

any_tokens = st.lists(
    st.one_of(st.integers(0, 255), st.integers(256, BEGIN - 1), st.integers(BEGIN, BEGIN + 120)), max_size=12
)
any_answer = st.builds(
    lambda ids, logprob, no_speech, reason: Generated(
        token_ids=tuple(ids), logprobs=(logprob,) * len(ids), finish_reason=reason, probe=(no_speech,)
    ),
    any_tokens,
    st.floats(-3, 0),
    st.floats(-3, 0),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
any_options = st.builds(
    lambda timestamps, ladder, conditioned: options_of(
        timestamps=timestamps,
        temperature=(0.0, 0.6, 0.8) if ladder else 0.0,
        best_of=2,
        condition_on_previous_text=conditioned,
    ),
    st.sampled_from(["segment", "segment", "none"]),
    st.booleans(),
    st.booleans(),
)


@frozen
class Audio:
    """What is read, and by which plan."""

    length: int
    clips: Clips
    speech: tuple[Span, ...] | None  # None: nobody listens

    def samples(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.arange(1, self.length + 1, dtype=np.float32)

    def plan(self, clips: Clips | None = None) -> Plan:
        if self.speech is None:
            return plain(SHORT, clips or self.clips)
        rules = CutRules(window=SHORT, gap=RATE, padding=1_000, earliest=SHORT // 2)
        return Plan(rules, clips or self.clips, PaperHearing(self.speech, self.length, 4_096))

    def wanted(self) -> list[Span]:
        """What must be read: the clips, or the speech in them."""
        found = [(start, min(stop, self.length)) for start, stop in self.clips]
        if self.speech is None:
            return found
        return [(max(a, c), min(b, d)) for a, b in self.speech for c, d in found if max(a, c) < min(b, d)]


@st.composite
def any_audio(draw: st.DrawFn) -> Audio:
    length = draw(st.integers(1, 4 * SHORT))
    edges = sorted(draw(st.sets(st.integers(0, 4 * SHORT), max_size=5)))
    clips: Clips = tuple(zip(edges[::2], edges[1::2], strict=False)) + (
        ((edges[-1], math.inf),) if len(edges) % 2 else ()
    )
    found: list[Span] | None = None
    if draw(st.booleans()):
        marks = sorted(draw(st.sets(st.integers(0, length), max_size=8)))
        found = list(zip(marks[::2], marks[1::2], strict=False))
    speech = None if found is None else tuple(found)
    return Audio(length=length, clips=clips or EVERYTHING, speech=speech)


@define(eq=False)
class Oracle:
    """A run whose answers depend on the window, the text before and the temperature alone, and take their time."""

    answers: Sequence[Generated]
    fails_at: int | None = None  # a window that begins there fails
    requests: list[Request] = field(factory=list)
    running: int = 0
    most_running: int = 0

    async def __call__(self, requests: Sequence[Request]) -> Sequence[Generated]:
        self.requests += requests
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        chosen = [self._chosen(request) for request in requests]
        try:
            await trio.sleep(sum(chosen) % 7)
        finally:
            self.running -= 1
        if self.fails_at is not None and extent(requests[0].items[0].payload)[0] == self.fails_at:
            raise LookupError(self.fails_at)
        return [self.answers[number % len(self.answers)] for number in chosen]

    @staticmethod
    def _chosen(request: Request) -> int:
        window = extent(request.items[0].payload)
        sampling = request.sampling
        return zlib.crc32(repr((window, request.prompt_token_ids, sampling.temperature, sampling.seed)).encode())

    def windows(self) -> list[Span]:
        return list(dict.fromkeys(extent(request.items[0].payload) for request in self.requests))


def uncovered(wanted: Sequence[Span], found: Sequence[Span]) -> list[Span]:
    """The stretches of ``wanted`` that are in none of ``found``."""
    left: list[Span] = []
    for start, stop in wanted:
        at = start
        for a, b in sorted(found):
            if a >= stop:
                break
            if a > at:
                left.append((at, a))
            at = max(at, b)
        if at < stop:
            left.append((at, stop))
    return left


def virtual(main: Callable[[], object]) -> None:
    """Runs ``main`` on virtual time, and sees that no task is left."""
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))  # type: ignore[arg-type]


# -- promises ----------------------------------------------------------------------------------------------------------


def check_segments(segments: Sequence[Segment], length: int) -> None:
    """In order, apart, within the audio, with text and numbers."""
    assert [one.id for one in segments] == list(range(len(segments)))
    assert all(one.text.strip() and one.start < one.end for one in segments), f"an empty segment: {segments}"
    edges = [edge for one in segments for edge in (one.start, one.end)]
    assert edges == sorted(edges), f"segments overlap or are out of order: {edges}"
    assert not edges or (edges[0] >= 0 and edges[-1] <= length / RATE), f"behind the audio: {edges}"


def check_windows(audio: Audio, windows: Sequence[Span]) -> None:
    """They cover what is wanted but for rests of less than a step, read nothing outside of the clips, and are few."""
    missed = [(a, b) for a, b in uncovered(audio.wanted(), windows) if b - a >= STEP]
    assert not missed, f"never read: {missed}"
    clips = [(start, min(stop, audio.length)) for start, stop in audio.clips]
    outside = uncovered(windows, clips)
    assert not outside, f"read outside of the clips: {outside}"
    assert all(stop - start <= SHORT for start, stop in windows)
    most = 2 * (audio.length // RATE + 1) + 3 * (len(audio.clips) + len(audio.speech or ()) + audio.length // SHORT + 1)
    assert len(windows) <= most, f"{len(windows)} windows"


def check_coverage(transcription: Transcription, length: int, segments: Sequence[Segment]) -> None:
    """The stretches tile the audio, with speech where segments are."""
    stretches = transcription.coverage
    edges = [0.0, *(edge for one in stretches for edge in (one.start, one.end)), length / RATE]
    assert all(a == b for a, b in zip(edges[::2], edges[1::2], strict=True)), f"they do not tile: {stretches}"
    spoken = sum(one.end - one.start for one in stretches if one.kind == "speech")
    assert abs(spoken - sum(one.end - one.start for one in segments)) < 1e-6


@given(audio=any_audio(), answers=st.lists(any_answer, min_size=1, max_size=8), options=any_options)
@settings(max_examples=80)
def test_whatever_the_model_writes_a_transcription_advances_and_ends(
    audio: Audio, answers: list[Generated], options: TranscribeOptions
) -> None:
    """Segments are ordered and within the audio; the windows cover every sample, or every sample of speech."""
    oracle = Oracle(answers)

    async def main() -> None:
        transcription = begin(audio.samples(), oracle, options, SMALL, audio.plan())
        segments: list[Segment] = []
        while True:
            before = transcription.position
            found = await transcription.next_window()
            if found is None:
                break
            assert transcription.position > before, f"no progress at {before}"
            segments += found
        assert transcription.position == transcription.progress().duration == audio.length / RATE
        check_segments(segments, audio.length)
        check_windows(audio, oracle.windows())
        check_coverage(transcription, audio.length, segments)

    virtual(main)


@given(
    audio=any_audio(),
    answers=st.lists(any_answer, min_size=1, max_size=8),
    options=any_options,
    at_once=st.integers(1, 4),
)
@settings(max_examples=80)
def test_in_parallel_it_is_each_piece_alone(
    audio: Audio, answers: list[Generated], options: TranscribeOptions, at_once: int
) -> None:
    """In order, whatever order the pieces finish in, and no more of them at once than is allowed. Who stops on the way
    has segments that the whole transcript has, too, and knows which seconds are missing."""
    oracle, alone = Oracle(answers), Oracle(answers)

    async def main() -> None:
        async with begin_parallel(
            audio.samples(), oracle, options, SMALL, audio.plan(), at_once=at_once
        ) as transcription:
            segments: list[Segment] = []
            states = [transcription.progress(whole=True).transcript(segments)]
            read = [transcription.seconds_read]
            while (found := await transcription.next_window()) is not None:
                segments += found
                assert not found or transcription.position >= found[-1].end, "told, but not done"
                states.append(transcription.progress(whole=True).transcript(segments))
                read.append(transcription.seconds_read)
                check_coverage(transcription, audio.length, states[-1].segments)
        assert transcription.position == transcription.seconds_read == audio.length / RATE
        assert read == sorted(read), f"less is read than before: {read}"
        for state, seconds in zip(states, read, strict=True):
            unread = sum(one.end - one.start for one in state.coverage if one.kind in ("unread", "excluded"))
            assert seconds + unread > audio.length / RATE - 1e-6, f"{seconds} are read, {unread} unread"
            check_segments(state.segments, audio.length)
            assert {(one.start, one.end) for one in state.segments} <= {(one.start, one.end) for one in segments}
        assert oracle.most_running <= at_once, f"{oracle.most_running} at once"
        check_segments(segments, audio.length)
        check_windows(audio, oracle.windows())
        check_coverage(transcription, audio.length, segments)
        expected: list[Segment] = []
        for piece in transcription.recording.read:
            one = await begin(audio.samples(), alone, options, SMALL, audio.plan((piece,))).transcript()
            expected += one.segments
        assert [(one.start, one.end, one.token_ids) for one in segments] == [
            (one.start, one.end, one.token_ids) for one in expected
        ], "a piece depends on the others"

    virtual(main)


@given(
    audio=any_audio(),
    answers=st.lists(any_answer, min_size=1, max_size=8),
    parallel=st.booleans(),
    delays=st.lists(st.floats(0, 12), min_size=1, max_size=12),
)
@settings(max_examples=80)
def test_a_cancelled_call_changes_nothing(
    audio: Audio, answers: list[Generated], parallel: bool, delays: list[float]
) -> None:
    """However often it is cancelled and called again, the segments are the same, and each is told once."""

    async def read(calls: Sequence[float]) -> list[Segment]:
        limits = list(calls)
        given = (audio.samples(), Oracle(answers), GREEDY, SMALL, audio.plan())
        async with begin_parallel(*given) if parallel else nullcontext(begin(*given)) as transcription:
            segments: list[Segment] = []
            while True:
                found: list[Segment] | None = []
                with trio.move_on_after(limits.pop() if limits else float("inf")):
                    found = await transcription.next_window()
                if found is None:
                    return segments
                segments += found

    async def main() -> None:
        before = trio.lowlevel.current_statistics().tasks_living
        assert await read(delays) == await read([])
        assert trio.lowlevel.current_statistics().tasks_living == before, "a task is left"

    virtual(main)


@given(
    audio=any_audio(),
    answers=st.lists(any_answer, min_size=1, max_size=8),
    piece=st.integers(0, 3),
    at_once=st.integers(1, 4),
)
@settings(max_examples=60)
def test_an_error_in_a_piece_is_raised_as_it_is_behind_what_comes_before(
    audio: Audio, answers: list[Generated], piece: int, at_once: int
) -> None:
    """In no group, when all segments before it were told, and no task is left."""
    whole = Oracle(answers)

    async def main() -> None:
        await begin(audio.samples(), whole, model=SMALL, plan=audio.plan()).transcript()
        starts = [start for start, _ in whole.windows()]
        if not starts:
            return
        before = trio.lowlevel.current_statistics().tasks_living
        oracle = Oracle(answers, fails_at=starts[piece % len(starts)])
        segments: list[Segment] = []
        error: Exception | None = None
        try:
            async with begin_parallel(
                audio.samples(), oracle, model=SMALL, plan=audio.plan(), at_once=at_once
            ) as transcription:
                while (found := await transcription.next_window()) is not None:
                    segments += found
        except LookupError as raised:
            error = raised
        assert trio.lowlevel.current_statistics().tasks_living == before, "a task is left"
        assert oracle.running == 0, "a request is left"
        check_segments(segments, audio.length)
        if oracle.fails_at in [start for start, _ in oracle.windows()]:
            assert error is not None, "the error is lost"
        assert error is None or all(one.end <= error.args[0] / RATE for one in segments), "told behind the error"

    virtual(main)
