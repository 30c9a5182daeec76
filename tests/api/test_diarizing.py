"""`Engine.diarize`, and transcriptions with a diarizer, on every host, over a simulated model."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from typing import Any

import anyio.lowlevel
import numpy as np
import pytest
from attrs import define, evolve, field, frozen

from triolet import InvalidRequest, Turn
from triolet.api.inputs.audio import content_key, load_audio
from triolet.api.inputs.sources import with_track
from triolet.core.model import Kind, ModelDescription
from triolet.core.request import EncoderItem, Placeholder
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel, expected_vector

from .films import film_of_two_tracks
from .hosts import HOSTS, Bench, Host, SpeakingModel, ThreadsHost, audio, cancel_one_of_two, on_bench, on_threads_too
from .test_hosts import ALL_OF_IT, transcribe

pytestmark = pytest.mark.real_time

PART, FRAME = 800, 160


@frozen
class SimDiarizer:
    """Implements `triolet.core.diarizing.FrameDiarizer`: an answer says who of three speaks in five frames."""

    frame_samples: int = FRAME
    speakers: int = 3
    modes: tuple[str, ...] = ("sim", "slow")

    def read(self, mode: str, hear: Callable[[Any], object]) -> Generator[Any, Any, None]:
        at = 0
        samples = yield at, PART
        while len(samples):
            key = content_key(samples, mode)
            answer = yield EncoderItem(key=key, payload=samples, embeddings=1, size=100, spans=((0, 1),))
            hear(np.tile([int(answer[0]) >> bit & 1 for bit in range(3)], (len(samples) // FRAME, 1)))
            at += PART
            samples = yield at, PART
        yield None


@frozen(kw_only=True)
class DiarizingModel(SimModel):
    """A simulated model with `SimDiarizer`."""

    kind: Kind = field(default=Kind.DIARIZER, repr=str)
    whole_prompts: bool = True

    def describe(self) -> ModelDescription:
        return evolve(SimModel.describe(self), diarizer=SimDiarizer())


def turns(samples: Any, mode: str = "sim") -> tuple[Turn, ...]:
    """The turns in ``samples``, if the engine does nothing else."""
    found: list[list[Any]] = []
    for start in range(0, len(samples), PART):
        part = samples[start : start + PART]
        key = content_key(part, mode)
        (answer,) = expected_vector((0,), None, (Placeholder(key=key, spans=((0, 1),)),))
        for voice in (bit for bit in range(3) if int(answer) >> bit & 1):
            begin, end = start / 16_000, (start + len(part)) / 16_000
            last = next((turn for turn in found if turn[2] == voice and turn[1] == begin), None)
            if last is None:
                found.append([begin, end, voice])
            else:
                last[1] = end
    order = list(dict.fromkeys(voice for *_, voice in sorted(found)))
    return tuple(Turn(start=begin, end=end, speaker="ABC"[order.index(voice)]) for begin, end, voice in sorted(found))


def recording(number: int) -> Any:
    return np.concatenate([audio(number + part) for part in range(4)])


@pytest.fixture
def bench(bench: Bench) -> Bench:
    bench.executor = SimExecutor(DiarizingModel())
    return bench


async def ask(engine: Any, number: int) -> None:
    mode = "slow" if number % 2 else "sim"
    assert await engine.diarize(recording(number), mode=mode) == turns(recording(number), mode)


@on_threads_too
@on_bench
async def test_every_task_gets_the_turns_of_its_own_recording(bench: Bench) -> None:
    async with bench.engine() as engine, bench.host.group() as group:
        for number in range(12):
            group.start(ask, engine, number % 5)
    assert len({turns(recording(number)) for number in range(5)}) == 5
    assert bench.outcomes() == ["finished"] * 12 * 8


@on_bench
async def test_a_cancelled_recording_is_aborted_and_others_go_on(bench: Bench) -> None:
    await cancel_one_of_two(bench, ask)
    assert sorted(bench.outcomes()) == ["aborted"] + ["finished"] * 8


@on_threads_too
@on_bench
async def test_what_cannot_be_diarized_is_refused_by_name(bench: Bench) -> None:
    async with bench.engine() as engine:
        for options, message in (
            ({"mode": "fast"}, "mode='fast'; allowed: 'sim', 'slow', or None"),
            ({"threshold": 1.5}, "threshold=1.5"),
            ({"min_silence": -1}, "min_silence=-1"),
            ({"strict": 3}, "strict=3"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await engine.diarize(audio(1), **options)
        with pytest.raises(InvalidRequest, match=r"finds speakers, not text; use engine\.diarize"):
            await engine.generate("a")


@on_threads_too
@on_bench
async def test_the_track_of_a_film_is_chosen(bench: Bench) -> None:
    film = film_of_two_tracks()
    async with bench.engine() as engine:
        first, second = [await engine.diarize(load_audio(with_track(film, one))) for one in (1, 2)]
        assert first != second
        for track, found in ((None, second), (1, first), ("de", first), ("eng", second)):
            assert await engine.diarize(film, audio_track=track) == found
        with pytest.raises(InvalidRequest, match=r"audio_track='fr', but .* has 2 audio tracks"):
            await engine.diarize(film, audio_track="fr")


# -- transcriptions --------------------------------------------------------------------------------------------------


@define(eq=False, slots=False)
class Alike:
    """Gives the same answer for each recording, and notes what it was asked."""

    host: Host
    answer: Any
    asked: list[tuple[Any, ...]] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        if self.host.name == "threads":
            self.diarize = self._plain  # type: ignore[method-assign]

    async def diarize(self, audio: Any, strict: bool, **named: Any) -> Any:
        await anyio.lowlevel.checkpoint()  # fails outside of the caller's loop
        return self._plain(audio, strict, **named)

    def _plain(self, audio: Any, strict: bool, **named: Any) -> Any:
        self.asked.append((len(audio), strict, *named.items()))
        return self.answer


SPEECH = np.linspace(0, 0.01, 70 * 16_000, dtype=np.float32)
TURNS = [Turn(start=0.0, end=40.0, speaker="Ada"), Turn(start=20.0, end=70.0, speaker="Bob")]


@on_threads_too
@on_bench
async def test_segments_have_the_speakers_that_a_diarizer_or_the_caller_finds(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    diarizer, options = Alike(bench.host, TURNS), {**ALL_OF_IT, "timestamps": "none"}
    async with bench.engine() as engine:
        plain = await engine.transcribe(SPEECH, **options)
        found, _, _ = await transcribe(engine, SPEECH, **options, speakers=True, diarizer=diarizer)
        assert await engine.transcribe(SPEECH, **options, diarizer=TURNS) == found
    assert diarizer.asked == [(len(SPEECH), False)] * 2
    assert found.turns == tuple(TURNS)
    assert found.text == plain.text
    assert {one.speaker for one in found.segments} == {"Ada", "Bob"}
    for segment in found.segments:
        ada = max(0.0, min(segment.end, 40) - segment.start)
        bob = max(0.0, segment.end - max(segment.start, 20))
        assert segment.speaker == ("Ada" if ada >= bob else "Bob")


@on_threads_too
@on_bench
async def test_a_diarizer_hears_the_track_that_is_transcribed(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    diarizer, film = Alike(bench.host, TURNS), film_of_two_tracks()
    async with bench.engine() as engine:
        for track in (2, None):
            await engine.transcribe(film, diarizer=diarizer, audio_track=track)
    assert diarizer.asked == [(len(film), False, ("audio_track", 2)), (len(film), False)]


@on_threads_too
@on_bench
async def test_a_diarizer_that_answers_something_else_and_a_file_that_is_read_once_are_refused(bench: Bench) -> None:
    bench.executor = SimExecutor(SpeakingModel())
    async with bench.engine() as engine:
        with pytest.raises(InvalidRequest, match="the diarizer answered 3; allowed: a list of Turn"):
            await engine.transcribe(SPEECH, diarizer=Alike(bench.host, 3))
        other = HOSTS[0] if bench.host.name == "threads" else ThreadsHost()
        with pytest.raises(InvalidRequest, match=r"diarizer=.* allowed here: .* method diarize"):
            await engine.transcribe(SPEECH, diarizer=Alike(other, TURNS))
        for track in (None, 1):
            with pytest.raises(InvalidRequest, match="file object, which is read once"):
                await engine.transcribe(io.BytesIO(b"RIFF"), diarizer=Alike(bench.host, TURNS), audio_track=track)
        with pytest.raises(InvalidRequest, match="cannot find speakers; allowed: Nemotron 3 Diarization"):
            await engine.diarize(SPEECH)
