"""`VoiceClusters`: the default diarizer. Windows of speech become vectors, and clusters of vectors become voices.

::

    speech    |------------------------|     |-------|     by voice activity
    windows   [------][------]  [------]     [-------]     1.6 s each, or all of a shorter stretch
                  [------][------]                         a new one each 0.75 s, the last one at the end of the stretch
    turns     |A A A A A A A|B B B B B B|    |A A A A|     each 0.1 s has the voice of the nearest window

Only the vectors are kept, 2.5 MB for an hour of speech.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from attrs import define, field

from ...core.checks import demand
from ..inputs.audio import SAMPLING_RATE, Samples
from ..inputs.held import HeldSamples
from .clusters import Array, cluster, nearest, recognized, unit
from .diarizer import Diarization, VoiceTurn
from .spans import SpanRules, SpeechSpan, SpeechSpans
from .voice import Probabilities

WINDOW, HOP = 25_600, 12_000  # samples
_STEP = 1_600  # samples: 0.1 s
_RULES = SpanRules(min_silence=0.25, padding=0.03)  # shorter pauses than windows of text have: a turn ends there


Embed: TypeAlias = Callable[[Sequence[Samples]], Array]  # windows of up to `WINDOW` samples to vectors of length 1


def _load() -> Embed:
    from ...models.networks.voices import VoiceEncoder

    return VoiceEncoder.load().embed


@define(eq=False)
class VoiceClusters:
    """The default `Diarizer`. The first call of `listen` reads the weights, 2.8 MB, from the package (``load``). All
    listeners share them. `listen` may be called in any thread. It does not know when two people speak at once."""

    load: Callable[[], Embed] = _load
    sampling_rate: int = field(default=SAMPLING_RATE, init=False)
    _embed: Embed | None = field(default=None, init=False)
    _reading: threading.Lock = field(factory=threading.Lock, init=False)

    def listen(self, frame_samples: int, *, least: int, most: int, known: Mapping[str, Array]) -> VoiceListener:
        """Returns a listener at the beginning of a recording."""
        with self._reading:
            self._embed = self._embed or self.load()
        return VoiceListener(self._embed, SpeechSpans(_RULES, self.sampling_rate, frame_samples), least, most, known)


@define(eq=False)
class VoiceListener:
    """The vectors of one recording so far, and the samples of windows that are not complete."""

    _embed: Embed
    _spans: SpeechSpans
    _least: int
    _most: int
    _known: Mapping[str, Array]
    _held: HeldSamples = field(factory=HeldSamples)
    _next: int | None = None  # the start of the next window in the open span; None: the start of the span
    _found: list[tuple[SpeechSpan, int]] = field(factory=list)  # final spans; windows to the end of each
    _middles: list[int] = field(factory=list)  # of the windows, in samples
    _vectors: list[Array] = field(factory=list)  # of several windows each, in float16

    def hear(self, samples: Samples, probabilities: Probabilities) -> None:
        """Adds the next samples, and the probability of speech of each frame that they complete."""
        self._held.append(samples)
        self._add(self._spans.hear(probabilities.tolist()))

    def diarization(self) -> Diarization:
        """Ends the recording, and returns its turns."""
        vectors = self._ended()
        if not len(vectors):
            return Diarization()
        means = cluster(vectors, self._least, self._most)
        return Diarization(tuple(self._turns(nearest(vectors, means))), recognized(means, self._known))

    def voice(self) -> Array:
        """Ends the recording, and returns the mean of its vectors, shape (width,)."""
        vectors = self._ended()
        demand(len(vectors) > 0, "nobody speaks in the audio", "audio in which one person speaks")
        return unit(vectors.sum(axis=0))

    def _ended(self) -> Array:
        """Ends the recording. Returns the vectors of its windows, in float32, shape (n, width)."""
        self._add(self._spans.end(self._held.stop))
        return np.concatenate(self._vectors).astype(np.float32) if self._vectors else np.zeros((0, 0), np.float32)

    def _turns(self, voices: Array) -> Iterator[VoiceTurn]:
        first = 0
        for span, last in self._found:
            yield from turns_within(span, self._middles[first:last], voices[first:last])
            first = last

    def _add(self, final: Sequence[SpeechSpan]) -> None:
        """Makes vectors of the windows that are complete, and drops the samples that no later window has."""
        windows: list[SpeechSpan] = []
        for span in final:
            windows += self._windows(span, is_final=True)
            self._found.append((span, len(self._middles) + len(windows)))
        needed, span_open = self._spans.settled, self._spans.open
        if span_open is not None:
            windows += self._windows(span_open, is_final=False)
            needed = max(needed, min(self._next or 0, span_open.stop - WINDOW, self._held.stop - WINDOW))
        if windows:
            self._vectors.append(self._embed([self._held.read(*one) for one in windows]).astype(np.float16))
            self._middles += [(start + stop) // 2 for start, stop in windows]
        self._held.forget(needed)

    def _windows(self, span: SpeechSpan, *, is_final: bool) -> list[SpeechSpan]:
        """Returns the next windows of ``span``. If it is final, the last window ends with it."""
        start = span.start if self._next is None else self._next
        stop = min(span.stop, self._held.stop)
        found = [SpeechSpan(at, at + WINDOW) for at in range(start, stop - WINDOW + 1, HOP)]
        self._next = start + HOP * len(found)
        if not is_final:
            return found
        reached = span.start if self._next == span.start else self._next - HOP + WINDOW
        self._next = None
        return found if reached >= stop else [*found, SpeechSpan(max(span.start, stop - WINDOW), stop)]


def turns_within(span: SpeechSpan, middles: Sequence[int], voices: Array) -> Iterator[VoiceTurn]:
    """Yields the turns of one span of speech, which has windows with these middles (in samples) and voices. The turns
    follow each other without a gap, and never overlap."""
    steps = max(1, round((span.stop - span.start) / _STEP))
    times = span.start + (np.arange(steps) + 0.5) * _STEP
    between = np.add(middles[1:], middles[:-1]) / 2
    heard = voices[np.searchsorted(between, times)]  # the voice of the nearest window
    starts = [0, *np.flatnonzero(np.diff(heard)) + 1]
    borders = [span.start, *(span.start + at * _STEP for at in starts[1:]), span.stop]
    for at, (start, stop) in zip(starts, pairwise(borders), strict=True):
        yield VoiceTurn(float(start) / SAMPLING_RATE, float(stop) / SAMPLING_RATE, int(heard[at]))
