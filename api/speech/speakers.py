"""Diarization: who speaks when. A `Diarizer` finds out; `voices` has the default one, and `diarize` asks a model.

By `with_speakers` each word and segment of a transcript gets the speaker whose turns it overlaps most. Times are in
seconds.
"""

from __future__ import annotations

import itertools
import math
import string
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeGuard

from attrs import define, evolve, field, frozen

from ...core.checks import by, flag, number, settle
from ...core.errors import InvalidRequest
from ...core.model import ModelDescription
from ...core.order import read_priority
from ...core.request import Pooling, Request
from ..inputs.audio import AudioSource, Samples
from ..inputs.recording import Recording
from ..inputs.threads import run_in_thread
from ..outputs.results import Segment, Transcript, Turn
from .voice import Probabilities, SpanRules, SpeechSpans


class VoiceTurn(NamedTuple):
    """One voice speaks from ``start`` to ``end``, in seconds. ``voice`` is the number of the voice in all its turns."""

    start: float
    end: float
    voice: int


class Diarization(NamedTuple):
    """The turns of a recording, ordered by their starts, and the names of known voices by their numbers."""

    turns: Sequence[VoiceTurn] = ()
    names: Mapping[int, str] = MappingProxyType({})


class SpeakerListener(Protocol):
    """Hears one recording. One thread at a time calls it, but not always the same thread."""

    def hear(self, samples: Samples, probabilities: Probabilities) -> None:
        """Adds the next samples (at the end perhaps none), and the probability of speech of each frame that they
        complete."""
        ...

    def diarization(self) -> Diarization:
        """Ends the recording, and returns its turns."""
        ...

    def voice(self) -> Any:
        """Ends the recording, in which one person speaks. Returns that person's voice, in a form of its own."""
        ...


class Diarizer(Protocol):
    """Finds out who speaks. It may be slow: it is called in worker threads.

    Attributes:
        sampling_rate: the rate of the samples that listeners hear, in Hz; it must be the speech model's.
    """

    @property
    def sampling_rate(self) -> int: ...

    def listen(self, frame_samples: int, *, least: int, most: int, known: Mapping[str, Any]) -> SpeakerListener:
        """Returns a new listener. The first call may load data that all listeners share.

        Args:
            frame_samples: the number of samples of one probability of speech.
            least: the least number of voices; fewer are found if too little is said.
            most: the most voices.
            known: voices by their names, as `SpeakerListener.voice` has returned them.
        """
        ...


class AudioDiarizer(Protocol):
    """Finds who speaks for ``engine.transcribe(..., diarizer=...)``. An `Engine` whose model finds speakers is one, and
    so is an object of the caller's with this method."""

    def diarize(self, audio: AudioSource, strict: bool) -> Awaitable[Sequence[Turn]] | Sequence[Turn]:
        """Returns the turns, ordered by their starts. They may overlap. For an `Engine` this is an async method, which
        is awaited in the caller's event loop. For a `SyncEngine` it is a plain method, which is called in a thread.

        Args:
            audio: the audio of the transcription: a path, bytes, or an array, alone or with its rate.
            strict: refuse audio that is damaged or cut short; otherwise the turns end at the break.

        A transcription with ``audio_track=`` gives that argument, too, as `Engine.diarize` has it.
        """
        ...


TURNS = "a list of Turn, each with a speaker and 0 <= start <= end"


def are_turns(value: object) -> TypeGuard[list[Turn] | tuple[Turn, ...]]:
    """True if ``value`` is `TURNS`."""
    return isinstance(value, list | tuple) and all(
        isinstance(one, Turn)
        and isinstance(one.speaker, str)
        and all(isinstance(time, Real) for time in (one.start, one.end))
        and 0 <= one.start <= one.end < math.inf
        for one in value
    )


async def turns_of(
    diarizer: AudioDiarizer | Sequence[Turn], audio: AudioSource, strict: bool, track: int | str | None
) -> tuple[Turn, ...]:
    """Returns the turns that ``diarizer`` has found, or finds now in the track ``track``; ``None``: the default one.

    Raises:
        InvalidRequest: the audio can be read only once, or the diarizer refuses it or answers with something else.
    """
    found: Any = diarizer
    if not isinstance(diarizer, Sequence):
        if hasattr(audio, "read"):
            raise InvalidRequest(
                "audio is a file object, which is read once; allowed with diarizer: a path, bytes or an array"
            )
        diarize: Any = diarizer.diarize
        found = await (diarize(audio, strict) if track is None else diarize(audio, strict, audio_track=track))
    if not are_turns(found):
        raise InvalidRequest(f"the diarizer answered {found!r:.200}; allowed: {TURNS}")
    return tuple(found)


# ---- who says which words --------------------------------------------------------------------------------------------


SpeakerAt: TypeAlias = Callable[[float, float], str | None]


def named_turns(found: Diarization, spoken: Sequence[tuple[float, float]]) -> tuple[Turn, ...]:
    """Returns the turns of ``found`` with the names of their speakers. Known voices have their names, and others the
    letters A, B and so on, in the order in which their text begins.

    Args:
        spoken: the times of the segments, in order. Voices without text come last.
    """
    starts, ends = [*(start for start, _ in spoken), math.inf], [end for _, end in spoken]
    ordered = sorted(found.turns, key=lambda turn: starts[bisect_right(ends, turn.start)] >= turn.end)
    names, letters = dict(found.names), string.ascii_uppercase
    free = (one for one in (*letters, *(a + b for a in letters for b in letters)) if one not in names.values())
    for voice in dict.fromkeys(turn.voice for turn in ordered):
        if voice not in names:
            names[voice] = next(free)
    return tuple(Turn(start=turn.start, end=turn.end, speaker=names[turn.voice]) for turn in found.turns)


def with_speakers(transcript: Transcript) -> Transcript:
    """Returns ``transcript`` with the speakers of its segments and words, by its turns. A segment in which several
    people speak is split between two words; without words it has the speaker who speaks longest. Segments to which the
    model itself gave a speaker keep it.
    """
    if not transcript.turns and not transcript.speakers:
        return transcript
    speaker_at = _finder(transcript.turns)
    parts = [part for segment in transcript.segments for part in _parts(segment, speaker_at)]
    return evolve(transcript, segments=tuple(evolve(part, id=number) for number, part in enumerate(parts)))


def _finder(turns: Iterable[Turn]) -> SpeakerAt:
    """Returns a function: who speaks longest from a start to an end, or, if nobody does, whose turn is nearest."""
    ordered = sorted(turns, key=lambda turn: turn.start)
    starts = [turn.start for turn in ordered]
    last = [*itertools.accumulate(ordered, _last)]  # to end, up to each

    def speaker_at(start: float, end: float) -> str | None:
        first, stop = bisect_right(last, start, key=lambda turn: turn.end), bisect_left(starts, end)
        near = [*last[max(first - 1, 0) : first], *ordered[first : max(first, stop) + 1]]
        seconds: defaultdict[str, float] = defaultdict(float)
        for turn in near:
            seconds[turn.speaker] += max(0.0, min(turn.end, end) - max(turn.start, start))
        if any(seconds.values()):
            return max(seconds, key=seconds.__getitem__)
        nearest = min(near, key=lambda turn: max(turn.start - end, start - turn.end), default=None)
        return None if nearest is None else nearest.speaker

    return speaker_at


def _last(one: Turn, two: Turn) -> Turn:
    return two if two.end > one.end else one


def _parts(segment: Segment, speaker_at: SpeakerAt) -> Iterator[Segment]:
    if segment.speaker is not None or not segment.words:
        speaker = segment.speaker or speaker_at(segment.start, segment.end)
        said = segment.words and tuple(evolve(word, speaker=speaker) for word in segment.words)
        yield evolve(segment, speaker=speaker, words=said)
        return
    words = [evolve(word, speaker=speaker_at(word.start, word.end)) for word in segment.words]
    runs = [(speaker, tuple(run)) for speaker, run in itertools.groupby(words, key=lambda word: word.speaker)]
    if len(runs) == 1:
        yield evolve(segment, words=runs[0][1], speaker=runs[0][0])
        return
    logprobs = iter(segment.logprobs)
    for place, (speaker, run) in enumerate(runs):
        tokens = tuple(token for word in run for token in word.token_ids)
        yield evolve(
            segment,
            start=run[0].start if place else segment.start,
            end=segment.end if place == len(runs) - 1 else run[-1].end,
            text="".join(word.text for word in run),
            token_ids=tokens,
            logprobs=tuple(itertools.islice(logprobs, len(tokens))),
            words=run,
            speaker=speaker,
        )


# ---- a model that finds speakers frame by frame ----------------------------------------------------------------------
# It reads a recording part by part, each with a request. So memory holds one part, however long the recording is.


_SECONDS = number(0, 60, "; seconds")


@frozen
class DiarizeQuery:
    """The arguments of one call of `Engine.diarize`, which explains them."""

    audio: AudioSource = field(repr=False)
    mode: str | None
    threshold: float = field(metadata=by(number(0, 1)))
    min_speech: float = field(metadata=by(_SECONDS))
    min_silence: float = field(metadata=by(_SECONDS))
    strict: bool = field(metadata=by(flag()))
    priority: int = field(kw_only=True)
    request_id: str | None = field(kw_only=True)
    wait: bool = field(kw_only=True)

    def __attrs_post_init__(self) -> None:
        settle(self)


@define(eq=False)
class TurnMaker:
    """Makes turns of the probabilities of frames, in order, for each speaker by the rules of `SpeechSpans`."""

    spans: Sequence[SpeechSpans]
    _turns: list[VoiceTurn] = field(init=False, factory=list)

    @classmethod
    def of(cls, query: DiarizeQuery, frame_samples: int, rate: int, speakers: int) -> TurnMaker:
        """Returns a maker of the turns that ``query`` asks for."""
        rules = SpanRules(
            threshold=query.threshold,
            end_threshold=query.threshold,
            min_speech=query.min_speech,
            min_silence=query.min_silence,
            padding=0.0,
        )
        return cls([SpeechSpans(rules, rate, frame_samples) for _ in range(speakers)])

    def hear(self, probabilities: Any) -> None:
        """Adds the next frames, float32 [frames, speakers]."""
        for voice, column in enumerate(probabilities.T.tolist()):
            self._add(voice, self.spans[voice].hear(column))

    def end(self) -> Diarization:
        """Returns all turns, ordered by their starts. Those of different speakers may overlap."""
        for voice, spans in enumerate(self.spans):
            self._add(voice, spans.end(None))
        return Diarization(sorted(self._turns))

    def _add(self, voice: int, found: Sequence[tuple[int, int]]) -> None:
        rate = self.spans[voice].sampling_rate
        self._turns += [VoiceTurn(round(start / rate, 3), round(stop / rate, 3), voice) for start, stop in found]


async def diarize(
    query: DiarizeQuery,
    description: ModelDescription,
    run: Callable[[Request], Awaitable[Sequence[float]]],
    request_id: str,
) -> tuple[Turn, ...]:
    """Implements `Engine.diarize`. ``run`` runs one request, and returns its vector."""
    model, rate = description.diarizer, description.sampling_rate
    if model is None:
        raise InvalidRequest(f"{description.architecture} cannot find speakers; allowed: Nemotron 3 Diarization")
    mode = next(iter(model.modes)) if query.mode is None else query.mode
    if mode not in model.modes:
        raise InvalidRequest(f"mode={mode!r}; allowed: {', '.join(map(repr, model.modes))}, or None")
    maker = TurnMaker.of(query, model.frame_samples, rate, model.speakers)
    reading = model.read(mode, maker.hear)
    asked = Request(
        id=request_id, prompt_token_ids=(0,), pooling=Pooling(kind="last"), priority=read_priority(query.priority)
    )
    async with Recording(query.audio, sampling_rate=rate, strict=query.strict) as recording:
        needed = next(reading)
        while needed is not None:
            start, length = needed
            recording.forget(start)
            needed = item = await run_in_thread(partial(reading.send, await recording.window(start, length)))
            if item is not None:
                answer = await run(evolve(asked, id=f"{request_id}.{start}", items=(item,)))
                needed = await run_in_thread(partial(reading.send, answer))
    return named_turns(maker.end(), ())
