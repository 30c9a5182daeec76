"""Where windows begin and end: at pauses, by what voice activity has found. Values in, values out, in samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from attrs import frozen

Spans = Sequence[tuple[int, int]]  # speech: [start, stop), in order, with silence between


@frozen(kw_only=True)
class CutRules:
    """How windows are cut, in samples.

    Args:
        window: most that the model reads at once.
        gap: a longer silence ends a window, and is not read.
        padding: silence that is read around speech.
        earliest: a window that speech fills is cut behind so much.
        at_pauses: such a window is cut at its longest pause behind ``earliest``, or where it is quietest; else at its
            full length, and the next one starts by the model's timestamps.
    """

    window: int
    gap: int
    padding: int
    earliest: int
    at_pauses: bool


def window_at(seek: int, spans: Spans, rules: CutRules, quietest: Callable[[int, int], int]) -> tuple[int, int] | None:
    """The first window from ``seek`` on; ``None``: nobody speaks behind it.

    Args:
        spans: speech, known to the end of the audio, or to a whole window behind where it next begins.
        quietest: where in [start, stop) the least speaks.
    """
    ahead = [(max(start, seek), stop) for start, stop in spans if stop > seek]
    if not ahead:
        return None
    start = max(ahead[0][0] - rules.padding, seek)
    latest = start + rules.window
    for (_, before), (behind, _) in pairwise(ahead):
        if before > latest:
            break
        if behind - before >= rules.gap:
            return start, min(before + rules.padding, latest)
    if ahead[-1][1] <= latest:
        return start, min(ahead[-1][1] + rules.padding, latest)
    if not rules.at_pauses:
        return start, latest
    return start, _cut(start + rules.earliest, latest, ahead, quietest)


def _cut(earliest: int, latest: int, spans: Spans, quietest: Callable[[int, int], int]) -> int:
    """The middle of the longest pause between ``earliest`` and ``latest``, or where it is quietest."""
    pauses = [
        (max(before, earliest), min(behind, latest))
        for (_, before), (behind, _) in pairwise(spans)
        if before < latest and behind > earliest
    ]
    if not pauses:
        return quietest(earliest, latest)
    start, stop = max(pauses, key=lambda pause: pause[1] - pause[0])
    return (start + stop) // 2


def speech_within(spans: Spans, start: int, stop: int) -> int:
    """How many samples of [start, stop) are speech."""
    return sum(max(0, min(end, stop) - max(begin, start)) for begin, end in spans)


def next_speech(spans: Spans, seek: int, default: int) -> int:
    """Where speech goes on at ``seek`` or behind; ``default`` where it does not."""
    return next((max(start, seek) for start, stop in spans if stop > seek), default)
