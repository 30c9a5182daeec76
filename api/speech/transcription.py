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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self

import trio
from attrs import evolve

from ...core.errors import EngineStateError
from ...core.request import EncoderItem
from ..outputs.results import Progress, Segment, Stretch, Transcript
from .coverage import coverage
from .languages import Languages
from .plan import AudioWindows, Plan
from .reader import WindowReader
from .walk import Walk


class Transcription:
    """One audio on its way to text: an async iterator of its segments. `next_window` gives those of one window, and
    `transcript` all that are left.

    A transcription has no nursery and no cancel scope, so it may be stopped after any window and driven from an async
    generator. Where a request fails, the position stays, and `next_window` may be called again.

    Attributes:
        ended: the last window was read.

    Raises:
        EngineStateError: `start` or `next_window` was called while an earlier call still runs.
    """

    def __init__(self, recording: AudioWindows, plan: Plan, reader: WindowReader) -> None:
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
        self._times: list[tuple[float, float]] = []  # the segments' times
        self._pending: list[Segment] = []  # segments of the last window, while it is iterated over
        self._looked_to = 0  # where the window after those begins in which the language was detected
        self._started = False
        self.ended = False
        self._busy = False

    # -- where it is -------------------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """All that is known so far. The coverage comes at the end alone, since it goes through all segments."""
        recipe, duration, broken = self.reader.recipe, self.recording.duration, self.recording.broken
        return Progress(
            language=self.languages.language,
            language_probability=self.languages.probability,
            language_probabilities=self.languages.probabilities,
            duration=duration,
            position=self.position,
            task=recipe.options.task,
            coverage=self.coverage if self.ended else (),
            warnings=recipe.warnings if broken is None else (*recipe.warnings, broken),
            timings=self.reader.stopwatch.timings(),
        )

    @property
    def position(self) -> float:
        """Seconds from the beginning that are done."""
        duration = self.recording.duration
        if self.ended and duration is not None:
            return duration
        reached = self.reader.recipe.seconds(self._reached())
        return reached if duration is None else min(reached, duration)

    @property
    def coverage(self) -> tuple[Stretch, ...]:
        """The fate of every second of the audio, up to `position`."""
        seconds = self.reader.recipe.seconds
        heard = [(seconds(start), seconds(stop)) for start, stop in self.plan.speech]
        return coverage(self.position, self._times, heard)

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
            numbered = [evolve(one, id=len(self._times) + index) for index, one in enumerate(segments)]
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
        """Transcribes what is left of the audio."""
        segments: list[Segment] = []
        while (found := await self.next_window()) is not None:
            segments += found
        return Transcript.of(segments, self.progress())

    async def _start(self) -> None:
        if not self._started:
            self._looked_to = 0  # an earlier call may have failed
            await self.languages.detect(self._next_item)
            self._started = True

    async def _next_item(self) -> EncoderItem | None:
        """The item of the next window to detect the language in; ``None``: no window has a sound any more."""
        while (planned := await self.plan.next(self._looked_to, ahead=self._looked_to > 0)) is not None:
            start, stop = planned
            samples = await self.recording.window(start, stop - start)
            if self.reader.ends_before(samples, stop - start):
                return None
            self._looked_to = start + len(samples)
            if not self.reader.is_mute(samples):
                return await self.reader.item(samples)
        return None

    async def _next(self) -> Iterable[Segment] | None:
        segments = await self._walk.next_window()
        self.recording.forget(self._walk.seek)
        return segments

    def _reached(self) -> int:
        return self._walk.seek

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
