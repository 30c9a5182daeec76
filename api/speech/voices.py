"""`VoiceClusters`: the default diarizer. Windows of speech become vectors, and clusters of vectors become voices.

::

    speech    |------------------------|     |-------|     by voice activity
    windows   [------][------]  [------]     [-------]     1.6 s each, or all of a shorter stretch
                  [------][------]                         a new one each 0.75 s, the last one at the end of the stretch
    turns     |A A A A A A A|B B B B B B|    |A A A A|     each 0.1 s has the voice of the nearest window

Only the vectors are kept, 2.5 MB for an hour of speech.

Clusters are found by pure functions, which give the same result in each run: by spectral clustering (von Luxburg 2007)
of the cosines between windows, of which each window keeps the largest (Wang et al. 2018, "Speaker diarization with
LSTM"). The number of voices is the place of the largest gap between eigenvalues. Then voices that are too much alike
are merged, and those that spoke for moments alone are dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import define, field

from ...core.checks import demand
from ..inputs.audio import SAMPLING_RATE, Samples
from ..inputs.recording import HeldSamples
from .speakers import Diarization, VoiceTurn
from .voice import Probabilities, SpanRules, SpeechSpan, SpeechSpans

# -- clusters ----------------------------------------------------------------------------------------------------------


Array: TypeAlias = npt.NDArray[Any]

_MOST_WINDOWS = 1_000  # that are compared with each other: 1,000 take half a second, and ten times as many 500 s
_KEPT, _LEAST_KEPT = 0.06, 6  # the part of the cosines that each window keeps, and the least number of them
_ALIKE = 0.89  # two voices whose means have this cosine are one
_FEW = 4  # a voice with fewer windows is a cough, or two people at once
_KNOWN = 0.78  # the least cosine at which a voice is a known one
_ROUNDS = 50  # of k-means, which has always settled before


def cluster(vectors: Array, least: int, most: int) -> Array:
    """Returns the means of the voices, shape (voices, width), of ``vectors`` of length 1, shape (n, width). There are
    ``least`` to ``most`` voices; fewer if there are fewer vectors."""
    chosen = vectors[np.unique(np.linspace(0, len(vectors) - 1, min(_MOST_WINDOWS, len(vectors))).astype(int))]
    labels = _merged(chosen, _spectral(chosen, least, most), least)
    counts = np.bincount(labels)
    enough = np.argsort(-counts, kind="stable")[: max(least, int((counts >= _FEW).sum()), 1)]
    return _means(chosen, labels)[np.sort(enough)]


def nearest(vectors: Array, means: Array) -> Array:
    """Returns the number of the nearest mean for each vector."""
    return np.asarray((vectors @ means.T).argmax(axis=1))


def recognized(means: Array, known: Mapping[str, Array]) -> dict[int, str]:
    """Returns the name of the known voice for each mean that is near enough to one. The nearest pairs come first, and
    each known voice is found once."""
    pairs = [(float(mean @ voice), number, name) for number, mean in enumerate(means) for name, voice in known.items()]
    found: dict[int, str] = {}
    for cosine, number, name in sorted(pairs, reverse=True):
        if cosine >= _KNOWN and number not in found and name not in found.values():
            found[number] = name
    return found


def _means(vectors: Array, labels: Array) -> Array:
    return unit(np.array([vectors[labels == one].mean(axis=0) for one in range(labels.max() + 1)]))


def unit(vectors: Array) -> Array:
    """Returns ``vectors`` with length 1."""
    return np.asarray(vectors / (np.linalg.norm(vectors, axis=-1, keepdims=True) + 1e-9))


def _affinity(vectors: Array) -> Array:
    cosines = np.clip(vectors @ vectors.T, 0, 1)
    left_out = len(vectors) - min(len(vectors), max(_LEAST_KEPT, int(_KEPT * len(vectors))))
    cosines[cosines < np.partition(cosines, left_out, axis=1)[:, left_out, None]] = 0
    np.fill_diagonal(cosines, 0)
    return np.asarray((cosines + cosines.T) / 2)


def _spectral(vectors: Array, least: int, most: int) -> Array:
    """Returns the label of each vector, by k-means of the rows of eigenvectors."""
    affinity = _affinity(vectors.astype(float))
    degree = affinity.sum(axis=1) + 1e-9
    laplacian = np.eye(len(vectors)) - affinity / np.sqrt(degree[:, None] * degree)
    values, rows = np.linalg.eigh(laplacian)
    gaps = np.diff(values[least - 1 : most + 1])
    count = min(least + int(np.argmax(gaps)) if len(gaps) else least, len(vectors))
    rows = unit(rows[:, :count])
    first = [int(degree.argmax())]
    while len(first) < count:  # the row that is farthest from all that are chosen
        first.append(int((rows @ rows[first].T).max(axis=1).argmin()))
    labels = _numbered(nearest(rows, rows[first]))
    for _ in range(_ROUNDS):
        labels = _numbered(nearest(rows, _means(rows, labels)))
    return labels


def _merged(vectors: Array, labels: Array, least: int) -> Array:
    """Returns the labels after the most similar voices were merged, while they are too much alike and more than
    ``least`` are left."""
    while (means := _means(vectors, labels)).shape[0] > least:
        cosines = np.tril(means @ means.T, -1)
        later, earlier = np.unravel_index(int(cosines.argmax()), cosines.shape)
        if cosines[later, earlier] < _ALIKE:
            break
        labels = _numbered(np.where(labels == later, earlier, labels))
    return labels


def _numbered(labels: Array) -> Array:
    return np.asarray(np.unique(labels, return_inverse=True)[1])


# -- the diarizer ------------------------------------------------------------------------------------------------------


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
