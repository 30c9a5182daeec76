"""`SpeechFinder`: finds the speech of a `Recording` ahead of whoever transcribes it, in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncIterator
from functools import partial

import numpy as np
import trio

from ...core.errors import InvalidRequest
from ..inputs.audio import Samples
from ..inputs.recording import Recording
from ..inputs.threads import run_in_thread
from .spans import SpanRules, SpeechSpan, SpeechSpans
from .voice import Listener, Probabilities, VoiceActivity

_SECONDS_AT_ONCE = 8  # of audio that one call of a thread hears: some 30 ms, which a cancelled caller waits


async def speech_spans(
    recording: Recording, detector: VoiceActivity, rules: SpanRules | None = None, *, forgets: bool = False
) -> AsyncIterator[SpeechSpan]:
    """The speech of ``recording`` in order, each span as soon as it is final. See `SpeechFinder`."""
    finder = SpeechFinder(recording, detector, rules, forgets=forgets)
    while (span := await finder.next_span()) is not None:
        yield span


class SpeechFinder:
    """Where somebody speaks in ``recording``, as far as anybody has asked.

    It reads the recording up to where a question is answered, and keeps the spans that it found. It may be asked about
    any sample, in any order, by any number of tasks. Finding speech behind hours of silence reads all of them; with
    ``forgets`` it has the recording forget on its way what nobody needs: before the first span that `next_span` has not
    told, or before the sample that `speech_from` is asked about and the silence behind it. Without, the samples stay
    until somebody else has them forgotten, so ask `within` a stretch then.

    Attributes:
        settled: everything is known of the samples before this one.
        heard: samples that were heard, of which the last ones are not settled. Nothing from here on may be forgotten.

    Args:
        recording: an open one.
        detector: at the recording's rate.
        rules: what counts as speech.
        forgets: nobody else reads the samples before those that are asked about.

    Raises:
        InvalidRequest: the detector hears another rate, or answers with something else than probabilities.
    """

    def __init__(
        self,
        recording: Recording,
        detector: VoiceActivity,
        rules: SpanRules | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        if detector.sampling_rate != recording.sampling_rate:
            raise InvalidRequest(
                f"voice activity at {detector.sampling_rate} Hz; allowed: {recording.sampling_rate} Hz, the recording's"
            )
        self._recording = recording
        self._detector = detector
        self._listener: Listener | None = None
        self._decides = SpeechSpans(rules or SpanRules(), detector.sampling_rate, detector.frame_samples)
        self._forgets = forgets
        self._spans: list[SpeechSpan] = []
        self._told = 0  # of these, by `next_span`
        self._heard = 0  # samples
        self._ended = False
        self._hearing = trio.Lock()

    @property
    def settled(self) -> int:
        """See the class."""
        return self._heard if self._ended else self._decides.settled

    @property
    def heard(self) -> int:
        """See the class."""
        return self._heard

    async def next_span(self) -> SpeechSpan | None:
        """The next span that was not told yet; ``None`` after the last one."""
        while True:
            waits = self._told < len(self._spans)
            self._forget(self._spans[self._told].start if waits else self.settled)
            if waits:
                self._told += 1
                return self._spans[self._told - 1]
            if self._ended:
                return None
            await self._hear_on()

    async def speech_from(self, sample: int) -> int | None:
        """The first sample at or after ``sample`` that lies in speech; ``None``: nobody speaks any more."""
        while (span := self._span_after(sample)) is None and not self._ended:
            self._forget(self.settled)
            await self._hear_on()
        found = None if span is None else max(span.start, sample)
        self._forget(self.settled if found is None else found)
        return found

    async def within(self, start: int, stop: int) -> list[SpeechSpan]:
        """The speech in samples ``start`` to ``stop``: the spans there, cut to this stretch."""
        while not self._ended and self.settled < stop and not self._is_open_at(stop):
            await self._hear_on()
        last = self._decides.open
        spans = self._spans if last is None or self._ended else [*self._spans, last]
        first = bisect_right(spans, start, key=lambda span: span.stop)
        return [SpeechSpan(max(span.start, start), min(span.stop, stop)) for span in spans[first:] if span.start < stop]

    def _span_after(self, sample: int) -> SpeechSpan | None:
        """The first span that ends after ``sample``, as far as one knows; the open one if it is certain to."""
        index = bisect_right(self._spans, sample, key=lambda span: span.stop)
        if index < len(self._spans):
            return self._spans[index]
        return self._decides.open if self._is_open_at(sample + 1) else None

    def _is_open_at(self, stop: int) -> bool:
        span = self._decides.open
        return span is not None and span.stop >= stop

    def _forget(self, before: int) -> None:
        if self._forgets:
            self._recording.forget(before)

    @trio.lowlevel.enable_ki_protection  # between the listener's answer and what is made of it nothing may be lost
    async def _hear_on(self) -> None:
        """Hears the next seconds, or that there are none."""
        known = self._heard
        async with self._hearing:
            if self._heard != known or self._ended:
                return  # another task has heard them
            samples = await self._recording.window(self._heard, _SECONDS_AT_ONCE * self._detector.sampling_rate)
            probabilities = await run_in_thread(partial(self._ask, samples))
            self._heard += len(samples)
            self._spans += self._decides.hear(probabilities.tolist())
            if not len(samples):
                self._spans += self._decides.end(self._heard)
                self._ended = True

    def _ask(self, samples: Samples) -> Probabilities:
        if self._listener is None:
            self._listener = self._detector.listen()
        answer = np.asarray(self._listener.hear(samples) if len(samples) else self._listener.end())
        frame = self._detector.frame_samples
        due = (self._heard + len(samples)) // frame - self._decides.frames
        if not len(samples):
            due = -(-self._heard // frame) - self._decides.frames
        if answer.shape != (due,) or answer.dtype.kind != "f" or not ((answer >= 0) & (answer <= 1)).all():
            raise InvalidRequest(
                f"voice activity answered with {answer.dtype} of shape {answer.shape}; allowed: {due} probabilities "
                f"for {due} frames of {frame} samples, floats from 0 to 1"
            )
        return answer
