"""Faults of audio files that can be heard all the same: `FaultLog` gathers their places while a file is decoded, and
makes one sentence of all places of a kind.
"""

from __future__ import annotations

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
            clock changes; ``"tracks"``: it has several audio tracks.
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
        self.count, self.seconds, self.end = self.count + 1, self.seconds + end - start, end

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
        """Adds a place: ``kind`` is "damaged", "no number", "gap" or "joined"."""
        self._places.setdefault(kind, _Places()).add(start, end)
        if end - start >= _LEAST_SPAN and kind != "no number":
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
            "joined": "joins recordings: its program or its clock changes {}; what follows is placed after it",
        }
        found = list(self._told)
        for kind, sentence in sentences.items():
            one = self._places.get(kind)
            if one is None or (kind == "gap" and one.seconds < _LEAST_GAP):
                continue
            called = "damaged" if kind == "no number" else kind
            said = f"{self.name} {sentence.format(one)}"
            found.append(AudioFault(one.start, one.end, called, said, one.seconds, kind != "joined"))
        return tuple(found)
