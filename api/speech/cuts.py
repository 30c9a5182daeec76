"""The cuts between windows, at pauses that voice activity has found. Values in, values out, in samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

Spans = Sequence[tuple[int, int]]  # speech: [start, stop), in order, with silence between


@frozen(kw_only=True)
class CutRules:
    """The rules by which windows are cut, in samples.

    Args:
        window: most that the model reads at once.
        gap: a longer silence ends a window, and is not read.
        padding: silence that is read around speech.
        earliest: a window that speech fills is cut at its longest pause after so much. Where there is none it has its
            full length, and the next one starts by the model's timestamps.
    """

    window: int
    gap: int
    padding: int
    earliest: int


def window_at(seek: int, spans: Spans, rules: CutRules) -> tuple[int, int] | None:
    """The first window from ``seek`` on; ``None``: nobody speaks from there on.

    Args:
        spans: speech, known to the end of the audio, or for a whole window after its next beginning.
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
    """The middle of the longest pause between ``earliest`` and ``latest``; ``latest`` where there is none."""
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
    """The first sample of speech at ``seek`` or later; ``default`` where there is none."""
    return next((max(start, seek) for start, stop in spans if stop > seek), default)
