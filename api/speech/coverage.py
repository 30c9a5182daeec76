"""The coverage of an audio: which seconds became text, were silent, or failed. Pure functions; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..outputs.results import Stretch

Times = Sequence[tuple[float, float]]  # in order, apart
_SLIGHT = 1.0  # seconds: shorter speech between segments is breath, laughter, or the edge of a word


def coverage(duration: float, told: Times, heard: Times, *, slight: float = _SLIGHT) -> tuple[Stretch, ...]:
    """Divides ``[0, duration)`` into stretches.

    Args:
        told: the times of the segments.
        heard: the times in which voice activity found speech; empty if it did not listen.
        slight: speech without text counts as silent if it is shorter than this.
    """
    stretches, at = list[Stretch](), 0.0
    for start, end in (*told, (duration, duration)):
        stretches += _untold(at, min(start, duration), heard, slight)
        if end > start:
            stretches.append(Stretch(start=max(at, start), end=end, kind="speech"))
        at = max(at, end)
    return tuple(_joined(stretches))


def _untold(start: float, end: float, heard: Times, slight: float) -> list[Stretch]:
    """The stretches of a gap between segments."""
    found, at = list[Stretch](), start
    for begin, stop in heard:
        first, last = max(begin, start), min(stop, end)
        if last - first < slight:
            continue
        if first > at:
            found.append(Stretch(start=at, end=first, kind="silent"))
        found.append(Stretch(start=first, end=last, kind="failed"))
        at = last
    if end > at:
        found.append(Stretch(start=at, end=end, kind="silent"))
    return found


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Joins neighbouring stretches of the same kind."""
    found: list[Stretch] = []
    for one in stretches:
        if found and found[-1].kind == one.kind and found[-1].end >= one.start:
            found[-1] = Stretch(start=found[-1].start, end=one.end, kind=one.kind)
        else:
            found.append(one)
    return found
