"""Plans of the windows to read: all of the audio, or only the speech in it.

`window_at` cuts a window at a pause that voice activity has found; it and its helpers are pure functions. `Plan` hears
the recording as far as a cut needs. All positions are in samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from .hearing import Hearing

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


# ---- plans -----------------------------------------------------------------------------------------------------------


MOST_WINDOWS = 8  # the longest piece: after that, even the speech of somebody who never pauses is cut
Clips = tuple[tuple[int, float], ...]  # [start, stop) in samples, in order; infinity: the end of the audio


@frozen(eq=False)
class Plan:
    """Decides which samples of ``clips`` are read next: those in which ``hearing`` finds speech, or all if there is no
    ``hearing``."""

    rules: CutRules
    clips: Clips
    hearing: Hearing | None = None

    @property
    def speech(self) -> Spans:
        """The speech that is known so far; empty without ``hearing``."""
        return () if self.hearing is None else self.hearing.spans

    async def next(self, seek: int, limit: float = math.inf, *, ahead: bool = False) -> tuple[int, int] | None:
        """Returns the next window, [start, stop), at ``seek`` or later and before ``limit``, or ``None`` if nothing is
        left. The window may reach past the end of the audio. ``ahead``: the caller looks ahead, so that earlier samples
        are kept."""
        for first, last in self.clips:
            begin, end = max(first, seek), min(last, limit)
            if begin < end and (found := await self._within(begin, end, ahead=ahead)) is not None:
                return found
        return None

    async def piece(self, seek: int, windows: int) -> tuple[int, int] | None:
        """Returns the next windows together, as one piece that may be read apart from all others. A piece has up to
        ``windows`` full windows, or up to `MOST_WINDOWS` if somebody speaks at its end, so that no word is cut. Without
        ``hearing`` no pause is known, and a piece is one window.
        """
        found = await self.next(seek)
        if found is None or self.hearing is None:
            return found
        start, stop = found
        while True:
            unbroken = speaks(self.speech, stop)
            most = (MOST_WINDOWS if unbroken else windows) * self.rules.window
            following = await self.next(stop, ahead=True) if stop - start < most else None
            if following is None or any(stop <= last < following[0] for _, last in self.clips):
                return start, stop
            if following[1] - start > most:
                return start, start + most if unbroken else stop
            stop = following[1]

    async def _within(self, begin: int, end: float, *, ahead: bool) -> tuple[int, int] | None:
        """Returns the next window of one clip. Hears the recording until the speech of a whole window, and of a gap
        after it, is known.
        """
        if self.hearing is None:
            return begin, int(min(begin + self.rules.window, end))
        needed = self.rules.window + self.rules.gap + self.rules.padding
        while True:
            start = next_speech(self.hearing.spans, begin, self.hearing.settled)
            if not ahead:
                self.hearing.skip(max(start - self.rules.padding, begin))  # a silence of hours takes no memory
            if self.hearing.ended or self.hearing.heard >= min(start + needed, end):
                break
            await self.hearing.hear(int(min(start + needed, end)))
        spans = [(max(a, begin), int(min(b, end))) for a, b in self.hearing.spans if b > begin and a < end]
        found = window_at(begin, spans, self.rules)
        return None if found is None else (found[0], int(min(found[1], end)))  # padding ends with the clip
