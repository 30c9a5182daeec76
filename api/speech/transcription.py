"""Long audio, window by window: `Transcription` walks over the audio.

The decisions (`cut_window`, `Assessment`, `Recipe`) are values in, values out. `Transcription` awaits the engine
between decisions. The rules are those of Radford et al. 2022, section 4.5, as in openai/whisper's ``transcribe.py``::

    audio     |-------- window --------|
    tokens     <0.00> A <5.20><5.20> B <11.00><11.00> C       C is cut off by the window's end
    segments  [0.00 A 5.20][5.20 B 11.00]
    next                                 |-------- window --------|
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import trio
from attrs import define, evolve, field

from ...core.errors import EngineStateError, InvalidRequest
from ...core.model import ModelDescription
from ...core.request import EncoderItem, Request
from ...core.timings import Timings
from ..inputs.audio import Samples
from ..inputs.prompts import audio_item
from ..outputs.results import Segment, Transcript
from .options import TranscribeOptions
from .recipe import Recipe
from .windows import Assessment, Generated, Span, WindowCut

Run = Callable[[Request], Awaitable[Generated]]  # runs one request to its end


@define
class _Stopwatch:
    """Adds up the timings of one transcription's requests, see `Timings`."""

    asked: float | None  # None: the time of the first request
    _queued: float = field(default=0.0, init=False)
    _encoder_wait: float = field(default=0.0, init=False)
    _first_token: float | None = field(default=None, init=False)
    _ended: float | None = field(default=None, init=False)

    def add(self, timings: Timings | None, begun: float, *, is_text: bool) -> None:
        """Adds a request that was made at ``begun``."""
        self.asked = begun if self.asked is None else self.asked
        if timings is None:
            return
        self._queued += timings.queued
        self._encoder_wait += timings.encoder_wait
        if is_text and self._first_token is None and timings.first_token is not None:
            self._first_token = begun - self.asked + timings.first_token

    def end(self, now: float) -> None:
        """The last window is done."""
        if self._ended is None:
            self._ended = now

    def timings(self) -> Timings | None:
        """The sums; ``None`` before the end."""
        if self._ended is None or self.asked is None:
            return None
        return Timings(
            queued=self._queued,
            encoder_wait=self._encoder_wait,
            first_token=self._first_token,
            total=self._ended - self.asked,
        )


class Transcription:
    """One audio on its way to text: call `next_window` until it returns ``None``, or `transcript` for all windows.

    A transcription has no nursery and no cancel scope, so it may be stopped after any window and driven from an async
    generator. A window (at most ``description.window_samples``) starts where the previous window ends or, where the
    previous window cut off a sentence, where its last whole segment ends. So every sample lies in a window, but for
    less than one timestamp step (20 ms) at the end. Where a request fails, the position stays, and `next_window` may be
    called again.

    Attributes:
        language: the code of the spoken language; ``None`` before `start` has detected it.
        language_probability: the model's certainty, 0 to 1; ``None`` where nothing was detected.
        duration: of the audio, in seconds.
        position: seconds from the beginning that are done.
        timings: how long the transcription took, from ``asked`` (trio time; by default the first request) on; ``None``
            until the last window is done.

    Raises:
        InvalidRequest: options that the model does not allow, no samples.
        EngineStateError: `start` or `next_window` was called while an earlier call still runs.
    """

    def __init__(
        self,
        samples: Samples,
        options: TranscribeOptions,
        description: ModelDescription,
        run: Run,
        *,
        request_id: str,
        asked: float | None = None,
    ) -> None:
        if not len(samples):
            raise InvalidRequest("audio without samples; allowed: 0.02 s of audio or more")
        self._recipe = Recipe(options=_with_seed(options), description=description)
        self._samples = samples
        self._run = run
        self._request_id = request_id
        self._seek = 0  # samples: where the next window starts
        self._spoken = 0  # samples: where the last segment ends
        self._windows = 0
        self._segments = 0
        self._requests = itertools.count()
        self._busy = False
        self._stopwatch = _Stopwatch(asked)
        self.language = self._recipe.language
        self.language_probability: float | None = None

    @property
    def duration(self) -> float:
        """Length of the audio in seconds."""
        return self._seconds(len(self._samples))

    @property
    def position(self) -> float:
        """Seconds from the beginning that are done."""
        return self._seconds(self._seek)

    @property
    def timings(self) -> Timings | None:
        """See the class."""
        return self._stopwatch.timings()

    async def start(self) -> None:
        """Detects the language where it is not known yet. Without it `next_window` does."""
        with self._alone("start"):
            if self.language is None:
                await self._detect(await self._item(self._window()))

    async def next_window(self) -> list[Segment] | None:
        """Transcribes one window. Returns its segments, none for a silent window; ``None`` after the last window."""
        with self._alone("next_window"):
            if self._seek >= len(self._samples):
                return None
            window = self._window()
            item = await self._item(window)
            language = self.language or await self._detect(item)
            generated, assessment = await self._read_with_fallback(item, language)
            silent = assessment.is_silent(self._recipe.options)
            cut = WindowCut((), None) if silent else self._recipe.cut(generated)
            segments = self._segments_of(cut.spans, assessment, self._seek + len(window))
            self._move_on(cut.next_start, len(window))
            return segments

    async def transcript(self) -> Transcript:
        """Transcribes what is left of the audio."""
        segments: list[Segment] = []
        while (found := await self.next_window()) is not None:
            segments += found
        return Transcript.of(
            segments,
            language=self.language,
            language_probability=self.language_probability,
            duration=self.duration,
            timings=self.timings,
        )

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """Refuses a second call while one runs: it would read the same window twice."""
        if self._busy:
            raise EngineStateError(
                f"{what} of transcription {self._request_id!r} was called while an earlier call of it still runs; "
                "allowed: one call at a time. Await it first, or open a transcription for each task"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _new_id(self, what: str) -> str:
        """An id that ends in a number of its own. A window whose request was cancelled or failed is requested again,
        under a new id, since the engine may still know the earlier one."""
        return f"{self._request_id}/{what}/{next(self._requests)}"

    def _window(self) -> Samples:
        return self._samples[self._seek : self._seek + self._recipe.description.window_samples]

    def _seconds(self, samples: int) -> float:
        return samples / self._recipe.description.sampling_rate

    async def _item(self, window: Samples) -> EncoderItem:
        """The item of a copy of ``window``: a view would keep the whole audio alive."""
        return await audio_item(self._recipe.description, np.array(window, np.float32))

    async def _ask(self, request: Request, *, is_text: bool) -> Generated:
        begun = trio.current_time()
        generated = await self._run(request)
        self._stopwatch.add(generated.timings, begun, is_text=is_text)
        return generated

    async def _detect(self, item: EncoderItem) -> str:
        answer = await self._ask(self._recipe.detection(self._new_id("language"), item), is_text=False)
        self.language, self.language_probability = self._recipe.detected(answer)
        return self.language

    async def _read_with_fallback(self, item: EncoderItem, language: str) -> tuple[Generated, Assessment]:
        """The temperature fallback: tries one temperature after the other until the text is good. The last one's text
        is taken as it is."""
        options, first = self._recipe.options, self._windows == 0
        for attempt, temperature in enumerate(options.temperature):
            name = self._new_id(f"{self._windows}.{attempt}")
            request = self._recipe.request(name, item, language, attempt, first=first)
            generated = await self._ask(request, is_text=True)
            assessment = Assessment.of(generated, self._recipe.decode(generated.token_ids), temperature)
            if assessment.is_good(options):
                break
        return generated, assessment

    def _segments_of(self, spans: Sequence[Span], assessment: Assessment, window_end: int) -> list[Segment]:
        """Segments within the window and the audio, in order. Spans without text or time are left out. So are spans
        that begin after the audio's end, where the model hears only padding. Where all begin there, the first is kept:
        its words were said in the window, and only its time is wrong."""
        segments, late = [], []
        for span in spans:
            text = self._recipe.decode(span.token_ids)
            start = self._seek + span.start * self._recipe.timestamp_step
            if not text.strip():
                continue
            if start >= window_end:
                late.append((text, span))
            elif found := self._segment(start, self._end(span, window_end), text, span, assessment):
                segments.append(found)
        if late and not segments and (found := self._segment(self._seek, window_end, *late[0], assessment)):
            segments.append(found)
        return segments

    def _end(self, span: Span, window_end: int) -> int:
        """Samples from the beginning of the audio to the end of ``span``."""
        if span.end is None:
            return window_end
        return min(self._seek + span.end * self._recipe.timestamp_step, window_end)

    def _segment(self, start: int, end: int, text: str, span: Span, assessment: Assessment) -> Segment | None:
        """The segment of ``span``, begun no earlier than the last segment's end; ``None`` where no time is left."""
        start = max(start, self._spoken)
        if start >= end:
            return None
        segment = Segment(
            id=self._segments,
            start=self._seconds(start),
            end=self._seconds(end),
            text=text,
            token_ids=tuple(token for token in span.token_ids if self._recipe.is_text(token)),
            avg_logprob=assessment.avg_logprob,
            no_speech_prob=assessment.no_speech_prob,
            compression_ratio=assessment.compression_ratio,
            temperature=assessment.temperature,
        )
        self._segments += 1
        self._spoken = end
        return segment

    def _move_on(self, next_start: int | None, window_samples: int) -> None:
        step = self._recipe.timestamp_step
        moved = window_samples if next_start is None else min(next_start * step, window_samples)
        self._windows += 1
        self._seek += moved
        if len(self._samples) - self._seek < step:
            self._seek = len(self._samples)
            self._stopwatch.end(trio.current_time())


def _with_seed(options: TranscribeOptions) -> TranscribeOptions:
    return options if options.seed is not None else evolve(options, seed=secrets.randbits(62))
