"""`Timeline`: places decoded frames at their presentation times."""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from attrs import define, field

from .faults import FaultLog

_Frame = TypeVar("_Frame")

_JITTER = 0.03  # seconds: the times of whole files are rounded, and vary by less than this
_ROUNDING = 0.003  # seconds: where packets are known to be lost, a later time is believed to its rounding
_SLOW = 1.0  # seconds: a clock may be so much slower than the samples; what overlaps is not cut off
_SURE_SECONDS, _SURE_FRAMES = 10.0, 1_000  # frames that go on so long after a jump prove it


@define(eq=False)
class Timeline(Generic[_Frame]):
    """Places the frames of a file one after the other, without overlaps, in the order in which they were decoded.

    A frame that begins where the last one ended follows it. If its time is later, the silence between the two is part
    of the recording: packets were lost, or nothing was recorded. A single wrong time must not move what follows, so
    frames after a jump are held until it is known what it was::

        times      0 1 2 3    7 8 9 ...             the jump lasts: silence from 4 to 7
        times      0 1 2 3    7    5 6 7 ...        the times return: 7 was wrong, and its frame is the one at 4
        times      0 1 2 3    0 1 2 3 ...           the clock was set back: what follows comes after what was heard

    Attributes:
        end: the end of what was placed, in seconds.
        most_gap: a jump forward by more seconds than this sets the clock, too: nothing is missing.
        latest: a time after this one is wrong, in seconds.
        is_hurt: something could not be decoded since the last frame, which explains a gap.
    """

    faults: FaultLog
    end: float = 0.0
    most_gap: float = math.inf
    latest: float = math.inf
    is_hurt: bool = False
    _shift: float = 0.0  # from the file's clock to this one
    _held: list[tuple[float, _Frame]] = field(factory=list, init=False)  # with their seconds
    _held_from: float = 0.0  # the time of the first held frame, and the time at which the last one ends
    _held_to: float = 0.0
    _held_hurt: bool = False

    def add(self, time: float | None, seconds: float, frame: _Frame) -> list[tuple[float, _Frame]]:
        """Adds a frame that lasts ``seconds``; ``time`` is its beginning by the file, if the file says so. Returns the
        frames that are placed now, each with the seconds of silence before it."""
        end = self._held_to if self._held else self.end
        jump = 0.0 if time is None else time + self._shift - end
        follows = -(_JITTER if self._held else _SLOW) <= jump <= (_ROUNDING if self.is_hurt else _JITTER)
        if not follows and self._held:  # one more gap; or, if it is back, it shows that the first jump was wrong
            return [*self.settle(believed=jump > 0 and self._held_from > self.end), *self.add(time, seconds, frame)]
        if not follows:
            self._held_from, self._held_hurt = end + jump, self.is_hurt
        elif self.is_hurt:
            self.faults.add("damaged", end, end)
        self.is_hurt = False
        if follows and not self._held:
            self.end += seconds
            return [(0.0, frame)]
        self._held.append((seconds, frame))
        self._held_to = (end if follows else end + jump) + seconds
        is_sure = self._held_to - self._held_from >= _SURE_SECONDS or len(self._held) >= _SURE_FRAMES
        return self.settle() if is_sure else []

    def settle(self, *, believed: bool = True) -> list[tuple[float, _Frame]]:
        """Places the held frames and returns them. ``believed``: at their own times; otherwise directly after the last
        frame that was placed."""
        held, self._held = self._held, []
        jump = self._held_from - self.end if held and believed else 0.0
        gap = jump if 0 < jump <= self.most_gap and self._held_from <= self.latest else 0.0
        if held and self._held_hurt:
            self.faults.add("damaged", self.end, self.end + gap)
        elif gap and self.end:  # a recording may begin late
            self.faults.add("gap", self.end, self.end + gap)
        if jump and not gap:
            self._shift -= jump
            self.faults.add("joined", self.end, self.end)
        self.end += gap + sum(seconds for seconds, _ in held)
        return [(0.0 if number else gap, frame) for number, (_, frame) in enumerate(held)]

    def finish(self, until: float = 0.0) -> list[tuple[float, _Frame | None]]:
        """Returns what is left after the last frame of a clock, and the silence up to ``until`` by this clock, if the
        end could not be decoded. Another clock begins at `end`."""
        left: list[tuple[float, _Frame | None]] = [*self.settle()]
        if self.is_hurt:
            gap = max(until + self._shift - self.end, 0.0) if self.end else 0.0
            self.faults.add("damaged", self.end, self.end + gap)
            self.end += gap
            left.append((gap, None))
        self._shift, self.is_hurt = self.end, False
        return left
