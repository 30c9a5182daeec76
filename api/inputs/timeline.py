"""`Timeline` places decoded frames at their presentation times. `FaultLog` gathers what is wrong with a file that can
be heard all the same, and makes one sentence of all places of a kind.
"""

from __future__ import annotations

import math
from typing import Generic, TypeVar

from attrs import define, field, frozen

_ADVICE = "Copy or download the file again, or repair it and accept the loss"
_LEAST_GAP = 0.1  # seconds in all: shorter gaps are told by nobody who counts time, as by FFmpeg's aresample
_LEAST_SPAN = 1.0  # seconds: shorter places are counted, but not kept


@frozen
class AudioFault:
    """All that is wrong with a file in one way. Times are in seconds from the beginning of the audio.

    Args:
        start: the first place.
        end: the end of the last place.
        kind: ``"damaged"``: packets that cannot be decoded, or samples that are no numbers; ``"cut short"``: the file
            ends before the end that it states; ``"gap"``: its times leave out a part; ``"joined"``: its program or its
            clock changes; ``"channels"``: its channels cancel each other; ``"tracks"``: it has several audio tracks.
        message: the sentence for the user.
        seconds: how much of the audio is silence instead, or is missing at the end.
        is_loss: something may not have been heard, so that `strict` refuses the file.
    """

    start: float
    end: float
    kind: str
    message: str
    seconds: float = 0.0
    is_loss: bool = True


@define
class _Places:
    """Places of one kind: their number, the seconds without sound, and the first and the last place."""

    count: int = 0
    seconds: float = 0.0
    start: float = 0.0
    end: float = 0.0

    def add(self, start: float, end: float) -> None:
        if not self.count:
            self.start = start
        self.count += start != self.end or not self.count  # a place may go on
        self.seconds, self.end = self.seconds + end - start, end

    def __str__(self) -> str:
        where = (
            f"at {self.start:.2f} s"
            if self.count == 1
            else f"in {self.count:,} places, the first at {self.start:.2f} s"
        )
        return f"{where} ({self.seconds:.2f} s in all)"


@define(eq=False)
class FaultLog:
    """The faults of the file that messages call ``name``.

    Attributes:
        lost: the places of a second or more that have no sound, (start, end) in seconds, in order.
    """

    name: str
    lost: list[tuple[float, float]] = field(factory=list, init=False)
    _places: dict[str, _Places] = field(factory=dict, init=False)
    _told: list[AudioFault] = field(factory=list, init=False)

    def add(self, kind: str, start: float, end: float) -> None:
        """Adds a place: ``kind`` is "damaged", "no number", "gap", "joined" or "channels"."""
        self._places.setdefault(kind, _Places()).add(start, end)
        if end - start >= _LEAST_SPAN and kind not in ("no number", "channels"):
            self.lost.append((start, end))

    def tell(self, fault: AudioFault) -> None:
        """Adds a fault with a sentence of its own."""
        self._told.append(fault)

    def cut_short(self, promised: str, found: str, start: float, end: float) -> None:
        """Adds that the file ends at ``start`` instead of ``end``."""
        lacks = f"its header promises {promised}, but it has {found}: nothing could be read from {start:.2f} s on"
        said = f"{self.name} is cut short: {lacks}. {_ADVICE}"
        self.tell(AudioFault(start, end, "cut short", said, end - start))

    @property
    def faults(self) -> tuple[AudioFault, ...]:
        """The faults so far."""
        sentences = {
            "damaged": "is damaged: what could not be decoded {} counts as silence. " + _ADVICE,
            "no number": "has samples that are NaN, infinite or too large {}; they count as silence. " + _ADVICE,
            "gap": "has no sound {} by its own times, which counts as silence",
            "channels": "has channels that cancel each other {}; one of them is read there",
            "joined": "joins recordings: its program or its clock changes {}; what follows is placed after it",
        }
        found = list(self._told)
        for kind, sentence in sentences.items():
            one = self._places.get(kind)
            if one is None or (kind == "gap" and one.seconds < _LEAST_GAP):
                continue
            called = "damaged" if kind == "no number" else kind
            said, is_loss = f"{self.name} {sentence.format(one)}", kind not in ("joined", "channels")
            found.append(AudioFault(one.start, one.end, called, said, one.seconds * is_loss, is_loss))
        return tuple(found)


# ---- times -----------------------------------------------------------------------------------------------------------


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
