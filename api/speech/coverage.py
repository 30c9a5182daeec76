"""The coverage of an audio: which seconds became text, were silent, failed, were excluded, or were not read. All
functions are pure. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from ..outputs.results import Stretch

Times = Sequence[tuple[float, float]]  # in order, apart
_SLIGHT = 1.0  # seconds: shorter speech between segments is breath, laughter, or the edge of a word


def coverage(
    duration: float,
    segments: Times,
    heard: Times,
    *,
    clips: Times = ((0.0, math.inf),),
    unread: Times = (),
    lost: Times = (),
    slight: float = _SLIGHT,
) -> tuple[Stretch, ...]:
    """Divides ``[0, duration)`` into stretches.

    Args:
        segments: the times of the segments.
        heard: the times in which voice activity found speech; empty if it did not listen.
        clips: the times that were asked for.
        unread: the times that are not read yet.
        lost: the times of which the file has no sound, because it is damaged or leaves them out.
        slight: speech without text counts as silent if it is shorter than this.
    """
    left: Times = [(0.0, duration)]
    speech, left = _parted(left, segments)
    asked, excluded = _parted(left, clips)
    missing, left = _parted(asked, unread)
    voiced, _ = _parted(left, heard)
    unheard, _ = _parted(left, lost)
    failed = [one for one in _union(voiced, unheard) if one[1] - one[0] >= slight]
    kinds = {
        "speech": speech,
        "excluded": excluded,
        "unread": missing,
        "failed": failed,
        "silent": _without(left, failed),
    }
    found = [Stretch(start=start, end=end, kind=kind) for kind, times in kinds.items() for start, end in times]
    return tuple(_joined(sorted(found, key=lambda one: one.start)))


def _parted(times: Times, by: Times) -> tuple[Times, Times]:
    """Returns the parts of ``times`` within ``by``, and those outside."""
    outside = list(_without(times, by))
    return list(_without(times, outside)), outside


def _without(times: Times, taken: Times) -> Iterator[tuple[float, float]]:
    """Yields what is left of ``times`` without ``taken``, in one pass over both."""
    others = iter([*taken, (math.inf, math.inf)])
    begin, stop = next(others)
    for start, end in times:
        at = start
        while at < end:
            while stop <= at:
                begin, stop = next(others)
            if at < begin:
                yield at, min(begin, end)
            at = stop if begin < end else end


def _union(first: Times, second: Times) -> Times:
    """Returns the times that are in one of both, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted([*first, *second]):
        last = found.pop() if found and start <= found[-1][1] else (start, end)
        found.append((last[0], max(end, last[1])))
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
