"""Long audio to text, window by window: `Transcription` walks over the audio.

The decisions (`cut_window`, `Assessment`, `Recipe`, `window_at`) are pure functions; `Walk` and `WindowReader` await
the engine between decisions. The windows follow each other as in openai/whisper's ``transcribe.py`` (Radford et al.
2022, section 4.5)::

    audio     |-------- window --------|
    tokens     <0.00> A <5.20><5.20> B <11.00><11.00> C       C is cut off by the window's end
    segments  [0.00 A 5.20][5.20 B 11.00]
    next                                 |-------- window --------|
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from attrs import evolve

from ...core.errors import EngineStateError, InvalidRequest
from ...core.timings import Timings
from ..inputs.recording import Recording
from ..outputs.results import Progress, Segment, Stretch, Transcript, Turn
from .plan import Plan
from .reader import WindowReader
from .speakers import named_turns, with_speakers
from .walk import Walk, sound_of


class Transcription:
    """The transcription of one audio, as an async iterator of its segments. `next_window` returns the segments of one
    window, and `transcript` reads all windows that are left.

    A transcription has no nursery and no cancel scope, so it may be stopped after any window and driven from an async
    generator. If a request fails, the position does not change, and `next_window` may be called again.

    Attributes:
        ended: the last window was read.

    Raises:
        EngineStateError: `start` or `next_window` was called while an earlier call still runs.
    """

    def __init__(self, recording: Recording, plan: Plan, reader: WindowReader) -> None:
        self.recording = recording
        self.plan = plan
        self.reader = reader
        self.ended = False
        self._walk = Walk(reader=reader, recording=recording, plan=plan)
        self._reached = 0  # the samples before this one are done
        self._times: list[tuple[float, float]] = []  # the segments' times
        self._pending: list[Segment] = []  # segments of the last window, while it is iterated over
        self._timings: Timings | None = None
        self._warnings: tuple[str, ...] = ()
        given = reader.recipe.options.diarizer
        self._turns: tuple[Turn, ...] = given if isinstance(given, tuple) else ()  # else known after the last window
        self._started = False
        self._busy = False

    # -- where it is -------------------------------------------------------------------------------------------------

    def progress(self, whole: bool = False) -> Progress:
        """Returns the state of the transcription. The coverage and the segments ahead are added only at the end or with
        ``whole``, since they take a pass over all segments.
        """
        whole = whole or self.ended
        recipe, duration = self.reader.recipe, self.recording.duration
        told = (fault.message for fault in self.recording.faults)
        so_far = Transcript(
            text="",
            language=self.reader.language,
            language_probability=self.reader.language_probability,
            language_probabilities=self.reader.language_probabilities,
            duration=self._end,
            segments=(),
            task=recipe.options.task,
            coverage=self.coverage if whole else (),
            warnings=(*recipe.warnings, *self.reader.warnings, *self._warnings, *told),
            word_times=recipe.word_times,
            timings=self._timings,
            turns=self._turns,
        )
        return Progress(
            so_far=so_far,
            duration=duration,
            position=self.position,
            seconds_read=self.seconds_read,
            ahead=(*self._pending, *self._numbered(self._later())) if whole else (),
        )

    @property
    def position(self) -> float:
        """The seconds of audio, from its beginning, that are done."""
        duration = self.recording.duration
        if self.ended and duration is not None:
            return duration
        reached = self.reader.recipe.seconds(self._reached)
        return reached if duration is None else min(reached, duration)

    @property
    def seconds_read(self) -> float:
        """The number of seconds of audio that are done. A parallel transcription also reads beyond `position`."""
        end = self._end
        return end - sum(max(min(stop, end) - start, 0.0) for start, stop in self._unread())

    @property
    def coverage(self) -> tuple[Stretch, ...]:
        """The stretches of the audio, and what became of each."""
        speech, clips = self._in_seconds(self.plan.speech), self._in_seconds(self.plan.clips)
        segments = [*self._times, *((one.start, one.end) for one in self._later())]
        lost = self.recording.lost
        return coverage(self._end, segments, speech, clips=clips, unread=self._unread(), lost=lost)

    @property
    def _end(self) -> float:
        """The end of the audio in seconds. Before the length is known, the end of the part that is known."""
        duration = self.recording.duration
        return max([self.position, *(start for start, _ in self._unread())]) if duration is None else duration

    def _unread(self) -> list[tuple[float, float]]:
        """Returns the stretches that are not read yet, in seconds."""
        return [] if self.ended else self._in_seconds(self._unread_samples())

    def _unread_samples(self) -> list[tuple[int, float]]:
        """Returns the stretches that are not read yet, [start, stop) in samples, in order."""
        return [(self._reached, math.inf)]

    def _later(self) -> list[Segment]:
        """Returns the segments of windows that are read, but that `next_window` has not returned yet, in order."""
        return []

    def _in_seconds(self, spans: Iterable[tuple[int, float]]) -> list[tuple[float, float]]:
        seconds = self.reader.recipe.seconds
        return [(seconds(start), seconds(stop)) for start, stop in spans]

    def _numbered(self, segments: Iterable[Segment]) -> list[Segment]:
        """Numbers the segments after those that `next_window` has returned."""
        return [evolve(one, id=number) for number, one in enumerate(segments, len(self._times))]

    # -- the walk ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Detects the language if it is not known yet. Without this call the first `next_window` detects the
        language."""
        with self._alone("start"):
            await self._start()

    async def next_window(self) -> list[Segment] | None:
        """Transcribes one window. Returns its segments, an empty list for a silent window, or ``None`` after the last
        window."""
        with self._alone("next_window"):
            if self.ended:
                return None
            await self._start()
            segments = await self._next()
            if segments is None:
                self._check_clips()
                self._check_empty()
                options = self.reader.recipe.options
                if options.speakers is not None and options.diarizer is None and self.plan.hearing is not None:
                    self._turns = named_turns(await self.plan.hearing.diarization(), self._times)
                self.ended = True
                self._timings = self.reader.timings()
                return None
            numbered = self._numbered(segments)
            self._times += [(one.start, one.end) for one in numbered]
            return numbered

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Segment:
        while not self._pending:
            segments = await self.next_window()
            if segments is None:
                raise StopAsyncIteration
            self._pending = segments
        return self._pending.pop(0)

    async def transcript(self) -> Transcript:
        """Transcribes the rest of the audio."""
        segments = [one async for one in self]
        return with_speakers(self.progress().transcript(segments))

    async def _start(self) -> None:
        """Detects the language if it is not known, in up to ``language_detection_segments`` windows. The first window
        whose language is certain decides, or else the mean of all windows. If no window has any sound, the language
        stays unknown.
        """
        if self._started:
            return
        reader, options = self.reader, self.reader.recipe.options
        found: list[Mapping[str, float]] = []
        seek = 0
        while reader.probes and reader.language is None and len(found) < options.language_detection_segments:
            window = await sound_of(self.recording.window, await self.plan.next(seek, ahead=seek > 0), reader.recipe)
            if window is None:
                break
            start, samples = window
            seek = start + len(samples)
            if reader.is_mute(samples):
                continue
            found.append(await reader.languages(await reader.sound(samples)))
            if max(found[-1].values()) >= options.language_detection_threshold:
                reader.decide(found[-1])
        if reader.language is None and found:
            reader.decide({code: sum(one[code] for one in found) / len(found) for code in found[0]})
        self._started = True

    def _check_clips(self) -> None:
        """Adds a warning if a part of ``clip_timestamps`` begins after the end of the audio. All parts are read, so if
        the length is still unknown, the audio goes on after the last part.

        Raises:
            InvalidRequest: all parts begin after the end.
        """
        clips, end = self.reader.recipe.options.clip_timestamps, self.recording.duration
        if end is None:
            return
        late = [clip for clip in clips if clip[0] >= end]
        if not late:
            return
        told = f"clip_timestamps={late}, but the audio ends at {end:.2f} s"
        if len(late) == len(clips):
            raise InvalidRequest(f"{told}; allowed: parts that begin before this end")
        self._warnings += (told,)

    def _check_empty(self) -> None:
        """Adds a warning that names the option that helps, if there is no text of audio that is not digital silence."""
        hearing, recipe = self.plan.hearing, self.reader.recipe
        if self._times:
            return
        if hearing is not None and hearing.audible and not hearing.spans:
            told = "no text, since voice activity finds no speech in audio that is not digital silence"
            self._warnings += (f'{told}; voice_activity="off" reads all of it',)
        elif self.reader.reads:
            told = "no text, since the model finds no speech in audio that is not digital silence"
            hint = "; no_speech_threshold=None keeps text that it doubts"
            self._warnings += (told + hint * ("no_speech_threshold" in recipe.facts.options),)

    async def _next(self) -> Iterable[Segment] | None:
        segments = await self._walk.next_window()
        self._reached, self.reader.language = self._walk.seek, self.reader.language or self._walk.language
        self.recording.forget(self._reached)
        return segments

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuses a second call while one runs, since both would read the same window."""
        if self._busy:
            raise EngineStateError(
                f"{what} of transcription {self.reader.request_id!r} was called while an earlier call still runs; "
                "allowed: one call at a time. Await the earlier call first, or open a transcription for each task"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


# ---- coverage --------------------------------------------------------------------------------------------------------
# Which seconds became text, were silent, failed, were excluded, or were not read. Pure functions; times are in seconds.


Times = Sequence[tuple[float, float]]  # in order, apart
_SLIGHT = 1.0  # seconds: shorter speech between segments is breath, laughter, or the edge of a word


def coverage(
    duration: float,
    segments: Times,
    heard: Times,
    *,
    clips: Times = ((0.0, math.inf),),
    unread: Times = (),
    lost: Times = (),
) -> tuple[Stretch, ...]:
    """Divides ``[0, duration)`` into stretches.

    Args:
        segments: the times of the segments.
        heard: the times in which voice activity found speech; empty if it did not listen.
        clips: the times that were asked for.
        unread: the times that are not read yet.
        lost: the times of which the file has no sound, because it is damaged or leaves them out.
    """
    left: Times = [(0.0, duration)]
    speech, left = _parted(left, segments)
    asked, excluded = _parted(left, clips)
    missing, left = _parted(asked, unread)
    voiced, _ = _parted(left, heard)
    unheard, _ = _parted(left, lost)
    failed = [one for one in _union(voiced, unheard) if one[1] - one[0] >= _SLIGHT]
    kinds = {
        "speech": speech,
        "excluded": excluded,
        "unread": missing,
        "failed": failed,
        "silent": _without(left, failed),
    }
    found = [Stretch(start=start, end=end, kind=kind) for kind, times in kinds.items() for start, end in times]
    return tuple(_joined(sorted(found, key=lambda one: one.start)))


def _parted(times: Times, by: Times) -> tuple[Times, Times]:
    """Returns the parts of ``times`` within ``by``, and those outside."""
    outside = list(_without(times, by))
    return list(_without(times, outside)), outside


def _without(times: Times, taken: Times) -> Iterator[tuple[float, float]]:
    """Yields what is left of ``times`` without ``taken``, in one pass over both."""
    others = iter([*taken, (math.inf, math.inf)])
    begin, stop = next(others)
    for start, end in times:
        at = start
        while at < end:
            while stop <= at:
                begin, stop = next(others)
            if at < begin:
                yield at, min(begin, end)
            at = stop if begin < end else end


def _union(first: Times, second: Times) -> Times:
    """Returns the times that are in one of both, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted([*first, *second]):
        last = found.pop() if found and start <= found[-1][1] else (start, end)
        found.append((last[0], max(end, last[1])))
    return found


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Joins neighbouring stretches of the same kind."""
    found: list[Stretch] = []
    for one in stretches:
        if found and found[-1].kind == one.kind and found[-1].end >= one.start:
            found[-1] = Stretch(start=found[-1].start, end=one.end, kind=one.kind)
        else:
            found.append(one)
    return found


# ---- segments as they come -------------------------------------------------------------------------------------------


class ReadSoFar:
    """The facts about a stream of segments apart from the segments. ``language``, ``language_probability`` and
    ``duration`` are known from the start.
    """

    def __init__(self, progress: Callable[[bool], Progress]) -> None:
        self._found: list[Segment] = []
        self._progress = progress

    def transcript(self) -> Transcript:
        """Returns a transcript of all that is read so far. After the last segment it is complete.

        Before that it has the segments of all windows that are read, even those that the stream has not given out. In
        parallel mode these may come after a gap. ``coverage`` says which seconds are not read (``"unread"``). So a
        program that stops early, or is stopped, keeps its text. Under asyncio and in threads, the text ahead and the
        coverage are added when the block is left, or when a reader was cancelled or got an error, but not between two
        segments.

        With ``speakers`` the stream gives segments without a speaker, since voices are told apart only when all are
        heard. The complete transcript has the speakers, and segments that are split where another speaker begins.
        """
        return with_speakers(self.progress(whole=True).transcript(self._found))

    def progress(self, *, whole: bool = False) -> Progress:
        """Returns the state of the transcription. With ``whole``, adds the segments ahead and the coverage, which takes
        a pass over all segments.
        """
        return self._progress(whole)

    @property
    def language(self) -> str | None:
        """The code of the spoken language."""
        return self.progress().so_far.language

    @property
    def language_probability(self) -> float | None:
        """The model's certainty about the language, 0 to 1; ``None``: the language was not detected."""
        return self.progress().so_far.language_probability

    @property
    def duration(self) -> float | None:
        """The length of the audio in seconds; ``None`` while it is unknown."""
        return self.progress().duration

    @property
    def position(self) -> float:
        """Seconds of the audio that are done."""
        return self.progress().position

    @property
    def seconds_read(self) -> float:
        """The number of seconds of audio that are done. A parallel transcription also reads beyond `position`."""
        return self.progress().seconds_read

    @property
    def timings(self) -> Timings | None:
        """The time that each stage of the transcription took; ``None`` before the last window is done."""
        return self.progress().so_far.timings


class SegmentStream(ReadSoFar):
    """An async iterator of `Segment`."""

    def __init__(self, segments: AsyncIterator[Segment], progress: Callable[[bool], Progress]) -> None:
        super().__init__(progress)
        self._segments = segments

    def __aiter__(self) -> AsyncIterator[Segment]:
        return self

    async def __anext__(self) -> Segment:
        segment = await anext(self._segments)
        self._found.append(segment)
        return segment
