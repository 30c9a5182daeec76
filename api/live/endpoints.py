"""`Endpointer`: the utterances of a live session, and the readings of them that are due.

The endpointer decides from probabilities of speech, frame by frame. It holds no audio and reads no clock::

    voice       ______#########__########______________####____
    utterance        |-------- 0 ---------|           |- 1 ..        ends after `endpoint_silence`
    readings         |---->                                          a step of new voice
                     |------------>
                     |---------------->                              the speaker pauses: the whole utterance so far
                     `start`         `stop`

Silence between utterances is never read. An utterance that is longer than the model's window is read in parts. `moved`
notes that a part is done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from attrs import define, field, frozen

from ..speech.voice import SpanRules, SpeechSpan, SpeechSpans

_PADDING = 0.3  # seconds around voice that belong to an utterance; less if `endpoint_silence` is short


@frozen(kw_only=True)
class Reading:
    """A reading that is due: samples ``start`` to ``stop`` are to be read.

    Args:
        pauses: the speaker is silent after ``stop``, for a while or for good. The text is worth more work, since it may
            be the last one of the utterance.
        full: the audio fills the model's window, so its beginning must become final with this reading.
    """

    start: int
    stop: int
    pauses: bool = False
    full: bool = False


@define
class Endpointer:
    """The utterances of one session. Samples are counted from the session's beginning.

    Args:
        sampling_rate: the rate of the samples, in Hz.
        frame_samples: the number of samples in one frame.
        endpoint_silence: seconds without voice that end an utterance.
        step: the number of samples of new voice that make a reading due.
        window: the most samples of one reading.
    """

    sampling_rate: int
    frame_samples: int
    endpoint_silence: float
    step: int
    window: int
    _spans: SpeechSpans = field(init=False)
    _ended: deque[SpeechSpan] = field(factory=deque, init=False)  # ended utterances that are not read yet
    _start: int = field(default=0, init=False)  # the samples before this one are done
    _read: Reading | None = field(default=None, init=False)  # the last reading of the first utterance
    _length: int | None = field(default=None, init=False)  # of the whole audio; None: not ended

    def __attrs_post_init__(self) -> None:
        padding = min(_PADDING, self.endpoint_silence / 2)
        rules = SpanRules(min_silence=self.endpoint_silence, padding=padding)
        self._spans = SpeechSpans(rules, self.sampling_rate, self.frame_samples)

    # -- what is heard -------------------------------------------------------------------------------------------------

    def hear(self, probabilities: Iterable[float]) -> None:
        """Adds the probabilities of the next frames."""
        self._ended += self._spans.hear(probabilities)

    def end(self, length: int) -> None:
        """Ends the audio after ``length`` samples, and with it the last utterance."""
        self._ended += self._spans.end(length)
        self._length = length

    @property
    def needed(self) -> int:
        """Samples before this one are never read again."""
        return max(self._start, self._ended[0].start if self._ended else self._spans.settled)

    @property
    def is_full(self) -> bool:
        """True if the samples that are kept for utterances fill one reading. No more may be heard then."""
        return self._utterance is not None and self._heard - self.needed >= self.window

    @property
    def _heard(self) -> int:
        return self._spans.frames * self.frame_samples if self._length is None else self._length

    # -- what is read --------------------------------------------------------------------------------------------------

    def due(self) -> Reading | None:
        """Returns the reading that is due now, or ``None`` if no reading is due."""
        utterance = self._utterance
        if utterance is None:
            return None
        start, stop = max(utterance.start, self._start), min(utterance.stop, self._heard)
        if start >= stop:
            return None
        if stop - start > self.window or (not self._ended and self.is_full):
            return Reading(start=start, stop=min(stop, start + self.window), full=True)
        done = self._read
        if done is not None and done.stop >= stop and done.pauses:
            return None
        pauses = bool(self._ended) or self._heard >= utterance.stop
        if pauses or stop - (start if done is None else done.stop) >= self.step:
            return Reading(start=start, stop=stop, pauses=pauses)
        return None

    def read(self, reading: Reading) -> None:
        """Notes that ``reading`` was made."""
        self._read = reading

    def moved(self, start: int) -> None:
        """Notes that the first utterance is done up to sample ``start``."""
        assert start > self._start, f"moved back from {self._start} to {start}"
        self._start = start

    @property
    def is_over(self) -> bool:
        """True if the first utterance has ended and nothing of it is left to read."""
        return bool(self._ended) and self.due() is None

    def next(self) -> None:
        """Ends the first utterance and goes on to the next one."""
        self._start = max(self._start, self._ended.popleft().stop)
        self._read = None

    @property
    def _utterance(self) -> SpeechSpan | None:
        return self._ended[0] if self._ended else self._spans.open
