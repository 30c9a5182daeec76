"""Transcriptions that find out who speaks, as the engine opens them; the network is replaced by `Levels`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import trio

from triolet.api.hosts.transcriptions import Detectors
from triolet.api.inputs.audio import Samples
from triolet.api.speech.options import read_options
from triolet.api.speech.transcription import SegmentStream
from triolet.api.speech.voices import VoiceClusters
from triolet.core.errors import InvalidRequest
from triolet_testing.trio_tools import Trial, sweep_program

from .speech import RATE, PaperVoice, Script, answer, opened, options_of


class Levels:
    """An encoder for which a voice is the level of a constant signal."""

    def embed(self, windows: Sequence[Samples]) -> Any:
        return np.eye(10, dtype=np.float32)[[round(float(np.median(one)) * 10) for one in windows]]


def detectors() -> Detectors:
    return Detectors(PaperVoice(), VoiceClusters(lambda: Levels().embed))


def talk(*turns: tuple[int, float], pause: float = 0.5) -> Samples:
    """Turns of a voice (1 to 9) and seconds, each after a pause."""
    parts = [np.full(round(n * RATE), v / 10, np.float32) for voice, s in turns for v, n in ((0, pause), (voice, s))]
    return np.concatenate([*parts, np.zeros(RATE // 2, np.float32)])


TWO = talk((1, 5.0), (2, 5.0), (1, 5.0), (2, 4.0))
TEXT = Script(answer(0.0, " a", 5.5, 5.5, " b", 11.0, 11.0, " c", 16.5, 16.5, " d", 21.0))


async def transcribed(samples: Samples, run: Script = TEXT, **options: Any) -> Any:
    async with opened(samples, run, options_of(**options), detectors=detectors()) as transcription:
        return await transcription.transcript()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("speakers", [True, "any", 2, (1, 5), "1-5"])
async def test_segments_have_their_speakers(speakers: Any, parallel: bool) -> None:
    transcript = await transcribed(TWO, speakers=speakers, parallel=parallel)
    assert [(one.speaker, one.text) for one in transcript.segments] == [
        ("A", " a"),
        ("B", " b"),
        ("A", " c"),
        ("B", " d"),
    ]
    assert transcript.speakers == ("A", "B")
    assert [one.speaker for one in transcript.turns] == ["A", "B", "A", "B"]
    assert (await transcribed(TWO)).turns == ()


async def test_known_speakers_have_their_names() -> None:
    known = {"Ada": talk((2, 4.0)), "Bob": (talk((3, 4.0)), RATE)}
    transcript = await transcribed(TWO, speakers=True, known_speakers=known)
    assert [one.speaker for one in transcript.segments] == ["A", "Ada", "A", "Ada"]


async def test_streamed_segments_get_their_speakers_when_all_is_heard() -> None:
    async with opened(TWO, TEXT, options_of(speakers=True), detectors=detectors()) as transcription:
        stream = SegmentStream(transcription, transcription.progress)
        assert {(await anext(stream)).speaker} == {None}
        assert stream.transcript().speakers == ()
        assert {one.speaker async for one in stream} == {None}
        assert stream.transcript().speakers == ("A", "B")


async def test_the_speaker_of_a_clip_is_speaker_a_though_others_speak_before_it() -> None:
    run = Script(answer(0.0, " b", 5.0))
    transcript = await transcribed(TWO, run, speakers=True, clip_timestamps=[5.9, 10.4])
    assert transcript.speakers == ("A",)
    assert [one.speaker for one in transcript.turns] == ["B", "A", "B"]


async def test_where_nobody_speaks_nobody_is_found() -> None:
    assert (await transcribed(np.zeros(5 * RATE, np.float32), speakers=True)).speakers == ()


async def test_a_cancelled_search_for_speakers_may_be_repeated() -> None:
    async with opened(TWO, TEXT, options_of(speakers=True), detectors=detectors()) as transcription:
        segments = await transcription.next_window()
        with trio.CancelScope() as scope:
            scope.cancel()
            await transcription.next_window()
        assert scope.cancelled_caught
        assert not transcription.ended
        assert await transcription.next_window() is None
        assert len(segments or ()) == 4
        assert [one.speaker for one in transcription.progress().so_far.turns] == ["A", "B", "A", "B"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speakers", [0, -1, 51, (3, 2), (0, 2), (1, 2, 3), 2.5, "many", "5-2", "0", [], {}])
def test_an_impossible_number_of_speakers_is_refused(speakers: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"speakers=.*allowed: 'any', a number of speakers \(1 to 50"):
        read_options({"speakers": speakers})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"speakers": True, "voice_activity": "off"}, "voice_activity='off' with speakers; allowed: .*'skip'"),
        ({"known_speakers": {"Ada": b""}}, "known_speakers has 1 names, with no speakers; allowed: speakers='any'"),
        ({"speakers": 1, "known_speakers": {"Ada": b"", "Bob": b""}}, "2 names, with speakers up to 1"),
        (
            {"speakers": True, "known_speakers": {" ": b"RIFF"}},
            "known_speakers has the name ' '; allowed: a text of up to",
        ),
        ({"speakers": True, "known_speakers": {"a\nb": b""}}, "without line ends"),
        ({"speakers": True, "known_speakers": [b""]}, "allowed: audio by the name of its speaker"),
        ({"num_speakers": 2}, "did you mean speakers"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_call(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        read_options(options)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        (talk((2, 1.0)), "has 1.2 s of speech in 2.0 s of audio; allowed: 1.6 s of speech or more"),
        (talk((2, 61.0)), "in up to 60 s of audio"),
        (np.zeros(5 * RATE, np.float32), "nobody speaks in the audio"),
        (b"RIFF", "cannot|not audio"),
    ],
)
async def test_a_reference_that_shows_no_voice_is_refused_before_a_window_is_read(reference: Any, told: str) -> None:
    run = Script(answer(0.0, " a", 5.0))
    with pytest.raises(InvalidRequest, match=f"the reference of the known speaker 'Ada'.*({told})"):
        await transcribed(TWO, run, speakers=True, known_speakers={"Ada": reference})
    assert not run.requests


# -- every fault at every step -----------------------------------------------------------------------------------------


async def read_on_after_a_fault(trial: Trial) -> None:
    """A reader may be cancelled at any step, also while a thread listens; who reads on gets all speakers."""
    run = Script(TEXT.answers[0])
    options = options_of(speakers=True, known_speakers={"Ada": (talk((2, 4.0)), RATE)})
    async with trial.part(), opened(TWO, run, options, detectors=detectors()):
        pass
    async with opened(TWO, run, options, detectors=detectors()) as transcription:
        stream = SegmentStream(transcription, transcription.progress)
        async with trial.part():
            async for segment in stream:
                assert segment.speaker is None
        async for segment in stream:
            assert segment.speaker is None
        found = stream.transcript()
    assert " ".join(f"{one.speaker}:{one.text}" for one in found.segments) == "A: a Ada: b A: c Ada: d"
    assert [one.speaker for one in found.turns] == ["A", "Ada", "A", "Ada"]


def test_no_fault_at_any_step_costs_a_speaker() -> None:
    report = sweep_program(read_on_after_a_fault, runs=200)
    assert report.failures == [], "\n".join(map(str, report.failures))
    assert report.faults >= 100
