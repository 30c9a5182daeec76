"""Transcriptions whose pieces are read at the same time: order, ends and failures, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import trio
import trio.testing
from attrs import define, evolve, field

from triolet.api.inputs.audio import Samples
from triolet.api.speech.plan import CutRules, Plan
from triolet.api.speech.reader import WindowReader
from triolet.api.speech.transcription import SegmentStream
from triolet.api.speech.windows import Generated
from triolet.core.plan import AlignedTokens
from triolet.core.request import Request
from triolet.models.speech.whisper_speech import WhisperSpeech

from .speech import (
    EVERYTHING,
    GREEDY,
    PREVIOUS,
    RATE,
    START,
    WINDOW,
    PaperHearing,
    PaperRecording,
    Script,
    answer,
    begin_parallel,
    describe,
    detected,
    extent,
    options_of,
    ramp,
    read_all,
)

RULES = CutRules(window=RATE, gap=RATE // 2, padding=0, earliest=RATE // 2)
SECOND = describe(window_samples=RATE)  # windows of a second are short enough to be prepared without a thread


@define(eq=False)
class Gates:
    """A run that answers a window, named by the second at which it begins, when it is told to."""

    gates: dict[int, trio.Event] = field(factory=dict)
    errors: dict[int, Exception] = field(factory=dict)
    asked: list[int] = field(factory=list)
    answered: Generated = field(factory=lambda: answer(0.0, "a", 5.0))

    async def __call__(self, requests: Sequence[Request]) -> Sequence[Generated]:
        second = extent(requests[0].items[0].payload)[0] // RATE
        self.asked.append(second)
        await self.gate(second).wait()
        if second in self.errors:
            raise self.errors[second]
        return [self.answered]

    def gate(self, second: int) -> trio.Event:
        return self.gates.setdefault(second, trio.Event())


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_segments_come_in_order_whatever_ends_first() -> None:
    """The first piece is told as soon as it is read; a later one waits for it. Two begin, and each window that is read
    lets one more begin, so that the first ones do not share the device with all others."""
    run, told = Gates(), []
    async with begin_parallel(ramp(3), run, model=SECOND) as transcription:

        async def read() -> None:
            while (found := await transcription.next_window()) is not None:
                told.extend((one.id, one.start) for one in found)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await settle()
            assert sorted(run.asked) == [0, 1]
            for second, expected in ((1, []), (2, []), (0, [(0, 0), (1, 1), (2, 2)])):
                assert second in run.asked
                run.gate(second).set()
                await settle()
                assert told == expected
    assert transcription.position == 3


async def test_the_language_that_a_model_writes_is_that_of_the_first_text(monkeypatch: pytest.MonkeyPatch) -> None:
    run, draft, cut = Gates(), WhisperSpeech.draft, WhisperSpeech.cut
    monkeypatch.setattr(WindowReader, "probes", False)
    monkeypatch.setattr(
        WhisperSpeech, "draft", lambda model, sound, ask: draft(model, sound, evolve(ask, language="de"))
    )
    monkeypatch.setattr(
        WhisperSpeech, "cut", lambda model, ids, ask: evolve(cut(model, ids, ask), language=model.decode(ids))
    )
    async with begin_parallel(ramp(2), run, options_of(language=None), SECOND) as transcription:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transcription.next_window)
            await settle()
            for second, language in ((1, "en"), (0, "fr")):
                run.answered = answer(0.0, language, 5.0)
                run.gate(second).set()
                await settle()
        assert transcription.progress().so_far.language == "fr"


async def test_who_stops_early_keeps_the_text_of_every_window_that_was_read() -> None:
    """In order, with what is missing; though the stream has not given the text out, since one before it is not read."""
    run = Gates(answered=answer(0.0, "a", 0.5))
    async with begin_parallel(ramp(5), run, model=SECOND) as transcription:
        stream = SegmentStream(transcription, transcription.progress)
        with trio.CancelScope() as stopped:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.__anext__)
                for second in (1, 3):
                    run.gate(second).set()
                    await settle()
                assert (stream.position, stream.seconds_read) == (0, 2)
                stopped.cancel()
        so_far = stream.transcript()
    assert [(one.id, one.start) for one in so_far.segments] == [(0, 1), (1, 3)]
    assert so_far.text == "aa"
    kinds = ["unread", "speech", "silent", "unread", "speech", "silent", "unread"]
    assert [(one.kind, one.end) for one in so_far.coverage] == list(zip(kinds, [1, 1.5, 2, 3, 3.5, 4, 5], strict=True))


async def test_one_piece_more_is_cut_than_may_be_read_at_once() -> None:
    """So that hours of audio need no memory, and the next piece is ready."""
    run = Gates()
    async with begin_parallel(ramp(10), run, model=SECOND, at_once=2) as transcription:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transcription.transcript)
            await settle()
            assert sorted(run.asked) == [0, 1]
            run.gate(1).set()
            await settle()
            assert sorted(run.asked) == [0, 1, 2]
            assert len(transcription.recording.read) == 4
            nursery.cancel_scope.cancel()


async def test_no_piece_has_text_before_it_but_its_own() -> None:
    """And the initial prompt, with its names and spelling; windows within a piece have the text of those before."""
    for prompt, initial in ((None, 0), ("names", 7)):
        script = Script(answer(0.0, "a", 10.0, 10.0, "b"))
        async with begin_parallel(ramp(60), script, options_of(initial_prompt=prompt), at_once=1) as transcription:
            await transcription.transcript()
        before = [(extent(r.items[0].payload)[0] // RATE, r.prompt_token_ids.index(START)) for r in script.requests]
        grown = [0, 3, 6] if prompt else [0, 4, 7]
        expected = [initial + more for more in grown]
        assert before == [(10 * n, expected[n % 3]) for n in range(6)]


async def test_every_piece_has_the_hotwords() -> None:
    script = Script(answer(0.0, "a", 10.0, 10.0, "b"))
    async with begin_parallel(ramp(60), script, options_of(hotwords=["Yo", "Ko"])) as transcription:
        await transcription.transcript()
    assert {request.prompt_token_ids[:8] for request in script.requests} == {(PREVIOUS, *b" Yo, Ko")}


async def test_the_language_is_decided_once_for_all_pieces() -> None:
    """Or, multilingual, by each piece for itself."""
    script = Script(detected(0.1, 0.9), answer(0.0, "a", 5.0))
    async with begin_parallel(ramp(90), script, options_of(language=None)) as transcription:
        transcript = await transcription.transcript()
    assert [request.rules.allowed is not None for request in script.requests] == [True, False, False, False]
    assert len({request.prompt_token_ids for request in script.requests[1:]}) == 1
    assert transcript.language == "de"


async def test_an_error_is_raised_when_all_before_it_was_told_and_the_piece_can_be_read_again() -> None:
    """As it is, in no group; nothing is lost: the next call reads the piece again, and those behind it follow."""
    run = Gates(errors={1: LookupError("1")})
    for second in range(3):
        run.gate(second).set()
    async with begin_parallel(ramp(3), run, model=SECOND) as transcription:
        assert len(await transcription.next_window() or []) == 1
        assert await transcription.next_window() == []
        for _ in range(2):
            with pytest.raises(LookupError) as raised:
                await transcription.next_window()
            assert raised.value is run.errors[1]
        del run.errors[1]
        rest = await transcription.transcript()
    assert [one.start for one in rest.segments] == [1, 2]


async def test_what_a_piece_has_read_is_told_before_its_error() -> None:
    """Although both are known when its turn comes."""
    run, told = Gates(answered=answer(0.0, "a", 0.5, 0.5, "b")), list[float | str]()
    run.gate(1).set()

    async def failing(requests: Sequence[Request]) -> Sequence[Generated]:
        found = await run(requests)
        if extent(requests[0].items[0].payload)[0] == 1.5 * RATE:
            raise LookupError("1")
        return found

    async with begin_parallel(ramp(2), failing, model=SECOND) as transcription:

        async def read() -> None:
            with pytest.raises(LookupError, match="1"):
                while (found := await transcription.next_window()) is not None:
                    told.extend(one.start for one in found)
            told.append("error")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await settle()
            run.gate(0).set()
    assert told == [0, 0.5, 1, "error"]


async def test_a_piece_that_failed_goes_on_at_the_window_that_failed() -> None:
    """With the text of its own windows before that one."""
    script = Script(answer(0.0, "a", 10.0, 10.0, "b"))

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        found = await script(requests)
        if len(script.requests) == 2:
            raise LookupError("device")
        return found

    async with begin_parallel(ramp(30), run) as transcription:
        assert len(await transcription.next_window() or []) == 1
        with pytest.raises(LookupError, match="device"):
            await transcription.next_window()
        await transcription.transcript()
    assert [extent(one.items[0].payload)[0] // RATE for one in script.requests] == [0, 10, 10, 20]
    assert script.requests[1].prompt_token_ids == script.requests[2].prompt_token_ids


async def test_a_recording_that_fails_fails_behind_what_was_read_and_is_cut_on_by_the_next_call() -> None:
    """Nothing is read twice, and nothing is lost."""

    class Shaky(PaperRecording):
        has_failed = False

        async def window(self, start: int, length: int) -> Samples:
            if start == 60 * RATE and not self.has_failed:
                self.has_failed = True
                raise OSError("the disk")
            return await PaperRecording.window(self, start, length)

    script, told = Script(answer(0.0, "a", 5.0)), list[float]()
    async with begin_parallel(ramp(120), script) as transcription:
        transcription.recording = Shaky(ramp(120))
        with pytest.raises(OSError, match="the disk"):
            while (found := await transcription.next_window()) is not None:
                told += [one.start for one in found]
        assert told == [0, 30]
        rest = await transcription.transcript()
    assert [one.start for one in rest.segments] == [60, 90]
    assert sorted(script.windows()) == [(n * WINDOW, (n + 1) * WINDOW) for n in range(4)]


async def test_the_samples_of_a_piece_are_dropped_when_it_is_read(no_collector: None) -> None:
    """Although it waits to be told, since one before it is not read yet."""
    run = Gates()
    async with begin_parallel(ramp(4), run, model=SECOND) as transcription:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transcription.transcript)
            await settle()
            for second in (1, 2, 3):
                run.gate(second).set()
            await settle()
            kept = [samples() is not None for samples in transcription.recording.given[:4]]
            assert kept == [True, False, False, False]
            run.gate(0).set()
    assert not any(samples() is not None for samples in transcription.recording.given[:4])


async def test_speech_without_a_pause_is_one_piece_whose_windows_are_read_in_order() -> None:
    """Each starts where the one before says, with its text before it, so that no word is cut; other pieces go on."""
    speech = [(0, 3 * RATE), (4 * RATE, 5 * RATE)]
    plan = Plan(RULES, EVERYTHING, PaperHearing(speech, 5 * RATE))
    run = Gates(answered=answer(0.0, "a", 0.5, 0.5, "b"))
    async with begin_parallel(ramp(5), run, model=SECOND, plan=plan) as transcription:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transcription.transcript)
            await settle()
            assert sorted(run.asked) == [0, 4], "the second window waits for the first one's timestamps"
            for second in range(5):
                run.gate(second).set()
    assert [span for span in transcription.recording.read if span[0] < span[1]] == speech


@pytest.mark.parametrize(("seconds", "together"), [(20, 4), (9, 2), (5, 1)])
async def test_a_piece_has_windows_by_the_length_of_the_audio(seconds: int, together: int) -> None:
    """Up to four, and so few that there are four pieces. Each but a piece's first has the text before it."""
    speech = [(second * RATE, second * RATE + RATE * 9 // 10) for second in range(seconds)]
    plan = Plan(RULES, EVERYTHING, PaperHearing(speech, seconds * RATE))
    script = Script(answer(0.0, "a", 0.9))
    async with begin_parallel(ramp(seconds), script, model=SECOND, plan=plan) as transcription:
        transcript = await transcription.transcript()
    assert len(transcript.segments) == seconds
    alone = {extent(r.items[0].payload)[0] // RATE for r in script.requests if r.prompt_token_ids.index(START) == 0}
    assert sorted(alone) == list(range(0, seconds, together))


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_hallucination_at_the_end_of_the_audio_is_not_read_again(parallel: bool) -> None:
    """A piece knows where the whole audio ends."""
    script = Script(answer(0.0, " ok", 1.0, 28.5, " x", 29.5))

    async def run(requests: Sequence[Request]) -> Sequence[Generated]:
        found = await script(requests)
        frames, logprobs = (0, 10, 20, 40, 40, 1425, 1450, 1475, 1475), (-0.1,) * 5 + (-9.0,) * 3
        aligned = requests[0].alignment and AlignedTokens(frames=frames, logprobs=logprobs)
        return [evolve(one, aligned=aligned) for one in found]

    options = options_of(timestamps="word", hallucination_silence_threshold=2.0)
    transcription = await read_all(ramp(30), run, options, describe(alignment_fault=None), parallel=parallel)
    assert [one.end for one in transcription.coverage if one.kind == "speech"] == [0.82]
    assert len([one for one in script.requests if one.alignment is None]) == 1


async def test_silence_between_pieces_is_passed_over() -> None:
    samples = ramp(90)
    samples[WINDOW : 2 * WINDOW] = 0.0
    script = Script(answer(0.0, "a", 30.0))
    async with begin_parallel(samples, script, GREEDY) as transcription:
        transcript = await transcription.transcript()
    assert [(one.kind, one.end) for one in transcript.coverage] == [("speech", 30), ("silent", 60), ("speech", 90)]
    assert len(script.requests) == 2
    assert not np.shares_memory(script.requests[0].items[0].payload, samples)
