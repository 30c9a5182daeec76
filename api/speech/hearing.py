"""`Hearing`: finds the speech in a `Recording`, as far ahead as callers ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from ..inputs.audio import Samples
from ..inputs.recording import Recording
from ..inputs.threads import run_in_thread
from .speakers import Diarization, SpeakerListener
from .voice import CheckedListener, Probabilities, SpanRules, SpeechSpan, SpeechSpans, VoiceActivity

_SECONDS_AT_ONCE = 8  # of audio for one call in a thread: a cancelled caller waits for its end, some 30 ms


class Hearing:
    """Finds the speech in ``recording``, as far as callers ask.

    `hear` reads the recording as far as it is asked, and keeps the spans. The samples stay in the recording until
    `Recording.forget` drops them.

    Attributes:
        ended: the recording was heard to its end.
        audible: what was heard is not digital silence.
        heard: the samples before this one were heard.

    Args:
        recording: an open recording.
        detector: a detector at the recording's rate.
        rules: the rules that decide what counts as speech.
        listen: returns a listener that finds out who speaks, for a detector's number of samples in a frame; it hears
            all that the detector hears. ``None``: nobody asks.

    Raises:
        InvalidRequest: the detector has another rate, or answers with something other than probabilities.
    """

    def __init__(
        self,
        recording: Recording,
        detector: VoiceActivity,
        rules: SpanRules,
        listen: Callable[[int], SpeakerListener] | None = None,
    ) -> None:
        self.ended = self.audible = False
        self._recording = recording
        self._detector = detector
        self._listener = CheckedListener(detector, recording.sampling_rate)
        self._listen = listen
        self._speakers: SpeakerListener | None = None
        self._decides = SpeechSpans(rules, detector.sampling_rate, detector.frame_samples)
        self._final: list[SpeechSpan] = []
        self.heard = 0
        self._hearing = trio.Lock()

    @property
    def spans(self) -> list[SpeechSpan]:
        """The speech so far, [start, stop) in samples, in order. The last span may grow."""
        last = self._decides.open
        return self._final if last is None else [*self._final, last]

    @property
    def settled(self) -> int:
        """The spans before this sample are known, and will not change."""
        return self.heard if self.ended else self._decides.settled

    def skip(self, before: int) -> None:
        """Drops the samples before ``before`` from the recording, as far as they were heard. Nobody needs them."""
        self._recording.forget(min(before, self.heard))

    async def hear(self, until: int) -> None:
        """Hears the recording up to sample ``until`` or to its end."""
        while self.heard < until and not self.ended:
            await self._hear_on()

    @trio.lowlevel.enable_ki_protection
    async def diarization(self) -> Diarization:
        """Returns who speaks when in all that was heard. Nothing can be heard afterwards."""
        return Diarization() if self._speakers is None else await run_in_thread(self._speakers.diarization)

    @trio.lowlevel.enable_ki_protection
    async def voice(self) -> Any:
        """Returns the voice of the one person who speaks in all that was heard. Nothing can be heard afterwards."""
        assert self._speakers is not None, "nothing was heard"
        return await run_in_thread(self._speakers.voice)

    @trio.lowlevel.enable_ki_protection  # a ^C after the listener's answer would lose the answer
    async def _hear_on(self) -> None:
        """Hears the next seconds, or notes that the recording has ended."""
        known = self.heard
        async with self._hearing:
            if self.heard != known or self.ended:
                return  # another task has heard them
            samples = await self._recording.window(self.heard, _SECONDS_AT_ONCE * self._detector.sampling_rate)
            probabilities = await run_in_thread(partial(self._ask, samples))
            self.heard += len(samples)
            self.audible = self.audible or bool(samples.any())
            found = self._decides.hear(probabilities.tolist())
            if not len(samples):
                found += self._decides.end(self.heard)
                self.ended = True
            self._final += found

    def _ask(self, samples: Samples) -> Probabilities:
        answer = self._listener.hear(samples, last=not len(samples))
        if self._listen is not None:
            self._speakers = self._speakers or self._listen(self._detector.frame_samples)
            self._speakers.hear(samples, answer)
        return answer
