"""Long audio to text, window by window: `Transcription` walks over the audio.

The decisions (`cut_window`, `Assessment`, `Recipe`, `window_at`) are values in, values out; `Walk` and `WindowReader`
await the engine between decisions. The walk is that of openai/whisper's ``transcribe.py`` (Radford et al. 2022, section
4.5)::

    audio     |-------- window --------|
    tokens     <0.00> A <5.20><5.20> B <11.00><11.00> C       C is cut off by the window's end
    segments  [0.00 A 5.20][5.20 B 11.00]
    next                                 |-------- window --------|
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import trio
from attrs import define, evolve, field

from ...core.errors import EngineStateError
from ...core.request import EncoderItem
from ...core.timings import Timings
from ..outputs.results import Segment, Stretch, Transcript
from .coverage import coverage
from .languages import Languages
from .plan import Plan, Recording
from .reader import WindowReader
from .walk import Walk


class Transcription:
    """One audio on its way to text: call `next_window` until it returns ``None``, or `transcript` for all windows.

    A transcription has no nursery and no cancel scope, so it may be stopped after any window and driven from an async
    generator. Where a request fails, the position stays, and `next_window` may be called again.

    Attributes:
        ended: the last window was read.

    Raises:
        EngineStateError: `start` or `next_window` was called while an earlier call still runs.
    """

    def __init__(self, recording: Recording, plan: Plan, reader: WindowReader) -> None:
        self.recording = recording
        self.plan = plan
        self.reader = reader
        self.languages = Languages(reader)
        self._walk = Walk(
            reader=reader,
            recording=recording,
            plan=plan,
            history=reader.recipe.history(),
            language=self.languages.of,
        )
        self._told: list[tuple[float, float]] = []  # the segments' times
        self._started = False
        self.ended = False
        self._busy = False

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def language(self) -> str | None:
        """The code of the spoken language; ``None`` before `start` has detected it, and where nobody speaks."""
        return self.languages.language

    @property
    def language_probability(self) -> float | None:
        """The model's certainty, 0 to 1; ``None`` where nothing was detected."""
        return self.languages.probability

    @property
    def language_probabilities(self) -> Mapping[str, float] | None:
        """Of each language, by code; ``None`` where nothing was detected."""
        return self.languages.probabilities

    @property
    def duration(self) -> float | None:
        """Length of the audio in seconds; ``None`` while nobody knows."""
        return self.recording.duration

    @property
    def position(self) -> float:
        """Seconds from the beginning that are done."""
        if self.ended and self.duration is not None:
            return self.duration
        reached = self._seconds(self._reached())
        return reached if self.duration is None else min(reached, self.duration)

    @property
    def timings(self) -> Timings | None:
        """How long the transcription took; ``None`` until the last window is done."""
        return self.reader.stopwatch.timings()

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the caller should know: a prompt that was cut, audio that breaks off."""
        broken = self.recording.broken
        return self.reader.recipe.warnings if broken is None else (*self.reader.recipe.warnings, broken)

    @property
    def coverage(self) -> tuple[Stretch, ...]:
        """What became of the audio, up to `position`."""
        heard = [(self._seconds(start), self._seconds(stop)) for start, stop in self.plan.speech]
        return coverage(self.position, self._told, heard)

    # -- the walk ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Detects the language where it is not known yet. Without it `next_window` does."""
        with self._alone("start"):
            await self._start()

    async def next_window(self) -> list[Segment] | None:
        """Transcribes one window. Returns its segments, none for a silent window; ``None`` after the last window."""
        with self._alone("next_window"):
            if self.ended:
                return None
            await self._start()
            segments = await self._next()
            if segments is None:
                self.ended = True
                self.reader.stopwatch.end(trio.current_time())
                return None
            numbered = [evolve(one, id=len(self._told) + index) for index, one in enumerate(segments)]
            self._told += [(one.start, one.end) for one in numbered]
            return numbered

    async def transcript(self) -> Transcript:
        """Transcribes what is left of the audio."""
        segments: list[Segment] = []
        while (found := await self.next_window()) is not None:
            segments += found
        return self.transcript_of(segments)

    def transcript_of(self, segments: Iterable[Segment]) -> Transcript:
        """The transcript of the audio up to `position`, whose ``segments`` these are."""
        return Transcript.of(
            segments,
            task=self.reader.recipe.options.task,
            language=self.language,
            language_probability=self.language_probability,
            language_probabilities=self.language_probabilities,
            duration=self.position if self.duration is None else self.duration,
            coverage=self.coverage,
            warnings=self.warnings,
            timings=self.timings,
        )

    async def _start(self) -> None:
        if not self._started:
            await self.languages.detect(_FirstWindows(self.plan, self.recording, self.reader).next)
            self._started = True

    async def _next(self) -> Iterable[Segment] | None:
        segments = await self._walk.next_window()
        self.recording.forget(self._walk.seek)
        return segments

    def _reached(self) -> int:
        return self._walk.seek

    def _seconds(self, samples: float) -> float:
        return samples / self.reader.recipe.description.sampling_rate

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuses a second call while one runs: it would read the same window twice."""
        if self._busy:
            raise EngineStateError(
                f"{what} of transcription {self.reader.request_id!r} was called while an earlier call of it still "
                "runs; allowed: one call at a time. Await it first, or open a transcription for each task"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


@define(eq=False)
class _FirstWindows:
    """The items of the first windows, one after the other, to detect the language in."""

    plan: Plan
    recording: Recording
    reader: WindowReader
    _seek: int = field(default=0, init=False)

    async def next(self) -> EncoderItem | None:
        """``None``: there is no window with a sound any more."""
        while (planned := await self.plan.next(self._seek, ahead=self._seek > 0)) is not None:
            start, stop = planned
            samples = await self.recording.window(start, stop - start)
            if self.reader.ends_before(samples, stop - start):
                return None
            self._seek = start + len(samples)
            if not self.reader.is_mute(samples):
                return await self.reader.item(samples)
        return None
