"""`SpeechFinder`: finds the speech of a `Recording` ahead of whoever transcribes it, in bounded memory."""

from __future__ import annotations

from collections import deque
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

    It reads the recording up to where the question is answered, and keeps a few numbers. With ``forgets`` it has the
    recording forget all samples before the first span that is not told yet, and those of a span when the next one is
    asked for. So a silence of hours takes no memory; whoever reads further back must not use it. Without, the samples
    stay until somebody else has them forgotten.

    Attributes:
        settled: everything is known of the samples before this one.

    Args:
        recording: an open one.
        detector: at the recording's rate.
        rules: what counts as speech.
        forgets: nobody needs the samples before the span that is asked for.

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
        self._found: deque[SpeechSpan] = deque()  # not told yet
        self._heard = 0  # samples
        self._ended = False
        self._hearing = trio.Lock()

    @property
    def settled(self) -> int:
        """See the class."""
        return self._heard if self._ended else self._decides.settled

    async def next_span(self) -> SpeechSpan | None:
        """The next span; ``None`` after the last one."""
        self._forget(self._first_needed())
        while not self._found and not self._ended:
            await self._hear_on()
            self._forget(self._first_needed())
        return self._found.popleft() if self._found else None

    async def speech_from(self, sample: int) -> int | None:
        """The first sample at or after ``sample`` that lies in speech; ``None``: nobody speaks any more. Spans that end
        before ``sample`` are not told any more. Ask for one sample after the other."""
        while True:
            while self._found and self._found[0].stop <= sample:
                self._found.popleft()
            if self._found:
                return max(self._found[0].start, sample)
            if (span := self._decides.open) is not None and span.stop > sample:
                return max(span.start, sample)
            self._forget(self.settled)
            if self._ended:
                return None
            await self._hear_on()

    def _first_needed(self) -> int:
        return self._found[0].start if self._found else self.settled

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
            self._found += self._decides.hear(probabilities.tolist())
            if not len(samples):
                self._found += self._decides.end(self._heard)
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
