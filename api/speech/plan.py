"""Plans of the windows to read: all of the audio, or only the speech in it."""

from __future__ import annotations

import math
from typing import Protocol

from attrs import frozen

from ..inputs.audio import Samples
from .cuts import CutRules, Spans, next_speech, speaks, window_at
from .hearing import Hearing


class AudioWindows(Protocol):
    """Audio that is decoded as it is asked for. Positions are samples from its beginning."""

    @property
    def duration(self) -> float | None:
        """Seconds; ``None`` while nobody knows. What a header promises may change at the end."""

    @property
    def broken(self) -> str | None:
        """The reason why the audio breaks off, once its end was reached."""

    async def window(self, start: int, length: int) -> Samples:
        """Mono samples, float32, a copy; fewer than ``length`` at the end of the audio."""

    def forget(self, before: int) -> None:
        """Drops the samples before ``before``, which nobody will ask for again."""


MOST_WINDOWS = 8  # as long as so many may a piece be: somebody who never pauses is cut all the same
Clips = tuple[tuple[int, int | None], ...]  # [start, stop) in order; None: to the end of the audio


class Plan(Protocol):
    """Decides which samples are read next."""

    @property
    def speech(self) -> Spans:
        """The speech, as far as is known; nothing where nobody listens."""

    async def next(self, seek: int, limit: int | None = None, *, ahead: bool = False) -> tuple[int, int] | None:
        """The next window, [start, stop), at ``seek`` or later, and before ``limit``; ``None``: nothing is left. It
        may reach past the end of the audio. ``ahead``: the caller looks ahead, so that earlier samples are kept."""

    async def piece(self, seek: int, windows: int) -> tuple[int, int] | None:
        """The next windows together, no longer than ``windows`` full ones: they may be read apart from all else. Where
        somebody speaks at its end the piece goes on, up to `MOST_WINDOWS`, so that no word is cut."""


@frozen(eq=False)
class PlainPlan:
    """Reads everything in ``clips``, in windows of up to ``window`` samples."""

    window: int
    clips: Clips

    @property
    def speech(self) -> Spans:
        return ()

    async def next(self, seek: int, limit: int | None = None, *, ahead: bool = False) -> tuple[int, int] | None:
        del ahead  # it forgets nothing
        for first, last in self.clips:
            start, stop = max(first, seek), _least(last, limit)
            if stop is None or start < stop:
                return start, start + self.window if stop is None else min(start + self.window, stop)
        return None

    async def piece(self, seek: int, windows: int) -> tuple[int, int] | None:
        del windows  # nobody listens, so that no pause is known
        return await self.next(seek)


@frozen(eq=False)
class VoicedPlan:
    """Reads where somebody speaks, in ``clips``."""

    hearing: Hearing
    rules: CutRules
    clips: Clips

    @property
    def speech(self) -> Spans:
        return self.hearing.spans

    async def next(self, seek: int, limit: int | None = None, *, ahead: bool = False) -> tuple[int, int] | None:
        for first, last in self.clips:
            begin, end = max(first, seek), _least(last, limit)
            if end is not None and begin >= end:
                continue
            found = await self._within(begin, math.inf if end is None else end, ahead=ahead)
            if found is not None:
                return found
        return None

    async def piece(self, seek: int, windows: int) -> tuple[int, int] | None:
        found = await self.next(seek)
        if found is None:
            return None
        start, stop = found
        while True:
            unbroken = speaks(self.speech, stop)
            most = (MOST_WINDOWS if unbroken else windows) * self.rules.window
            following = await self.next(stop, ahead=True) if stop - start < most else None
            if following is None or self._clip_ends(stop, following[0]):
                return start, stop
            if following[1] - start > most:
                return start, start + most if unbroken else stop
            stop = following[1]

    def _clip_ends(self, start: int, stop: int) -> bool:
        """True if a clip ends in [start, stop)."""
        return any(last is not None and start <= last < stop for _, last in self.clips)

    async def _within(self, begin: int, end: float, *, ahead: bool) -> tuple[int, int] | None:
        """The next window of one clip. Listens until the next speech is known for a whole window and a gap after it."""
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


def _least(first: int | None, second: int | None) -> int | None:
    known = [one for one in (first, second) if one is not None]
    return min(known) if known else None
