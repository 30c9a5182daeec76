"""The cuts between windows, at pauses that voice activity has found. Pure functions; all positions are in samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

Spans = Sequence[tuple[int, int]]  # speech: [start, stop), in order, with silence between


@frozen(kw_only=True)
class CutRules:
    """The rules by which windows are cut, in samples.

    Args:
        window: the most that the model reads at once.
        gap: silence of this length or more ends a window, and is not read.
        padding: silence that is read around speech.
        earliest: a window full of speech is cut at its longest pause after so many samples. Without a pause there, the
            window has its full length, and the model's timestamps decide where the next one starts.
    """

    window: int
    gap: int
    padding: int
    earliest: int


def window_at(seek: int, spans: Spans, rules: CutRules) -> tuple[int, int] | None:
    """Returns the first window from ``seek`` on, or ``None`` if nobody speaks after ``seek``.

    Args:
        spans: speech, known to the end of the audio, or for a whole window after the next speech begins.
    """
    ahead = [(max(start, seek), stop) for start, stop in spans if stop > seek]
    if not ahead:
        return None
    start = max(ahead[0][0] - rules.padding, seek)
    latest = start + rules.window
    for (_, before), (after, _) in pairwise(ahead):
        if before > latest:
            break
        if after - before >= rules.gap:
            return start, min(before + rules.padding, latest)
    if ahead[-1][1] <= latest:
        return start, min(ahead[-1][1] + rules.padding, latest)
    return start, _pause(start + rules.earliest, latest, ahead)


def _pause(earliest: int, latest: int, spans: Spans) -> int:
    """Returns the middle of the longest pause between ``earliest`` and ``latest``, or ``latest`` if there is none."""
    pauses = [
        (max(before, earliest), min(after, latest))
        for (_, before), (after, _) in pairwise(spans)
        if before < latest and after > earliest
    ]
    start, stop = max(pauses, key=lambda pause: pause[1] - pause[0], default=(latest, latest))
    return (start + stop) // 2


def speaks(spans: Spans, at: int) -> bool:
    """True if ``at`` lies within speech."""
    return any(start < at < stop for start, stop in spans)


def speech_within(spans: Spans, start: int, stop: int) -> int:
    """The number of samples of [start, stop) that are speech."""
    return sum(max(0, min(end, stop) - max(begin, start)) for begin, end in spans)


def next_speech(spans: Spans, seek: int, default: int) -> int:
    """Returns the first sample of speech at ``seek`` or later, or ``default`` if there is none."""
    return next((max(start, seek) for start, stop in spans if stop > seek), default)
