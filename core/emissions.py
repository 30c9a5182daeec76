"""The greedy reading of an encoder output, frame by frame: labels of frames become emissions, each with its frames.

Three kinds of models are read so. CTC (Graves et al. 2006) labels each frame, and equal labels of neighbouring frames
are one emission. An RNN transducer (Graves 2012) stays at a frame until its label is blank, and a transducer with
durations (TDT, Xu et al. 2023) says with each label how many frames it goes on. Their limits are those of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, frozen


@define(eq=False)
class Place:
    """The place of a sequence in its encoder output."""

    frames: int  # of the encoder output
    left: int  # the number of labels that may still be read, blanks included
    frame: int = 0  # the next one to read
    symbols: int = 0  # the emissions at this frame
    label: int = -1  # the one read last; -1: none
    emitted: tuple[int, int] | None = None  # the frames ``[first, stop)`` of the last emission; None: nothing is left
    known: int = 0  # the tokens that the prediction network has read before the sequence began
    searched: bool = True  # whether the emission after the last token was searched for

    @property
    def over(self) -> bool:
        """True if nothing is emitted any more."""
        return self.frame >= self.frames or self.left <= 0


@frozen(kw_only=True)
class Emissions:
    """The rules by which labels become emissions."""

    blank: int  # the label that emits nothing
    most_symbols: int = 0  # at one frame; 0: the model is CTC, and each frame has one label
    durations: int = 0  # the number of durations, 0 to ``durations - 1``, that a model says with its labels; 0: none

    def begin(self, frames: int) -> Place:
        """Returns the place before the first frame. As many labels may be read as if each frame had the most symbols:
        labels that last 0 frames come to an end."""
        return Place(frames, max(self.most_symbols, 1) * frames)

    def search(self, place: Place, labels: Sequence[int], durations: Sequence[int] = ()) -> int | None:
        """Moves ``place`` on until a frame emits. Returns the index of its label; ``None``: more frames are needed, or
        the place is over.

        Args:
            labels: the labels of the frames from ``place.frame`` on, all read after the same tokens.
            durations: the duration that the model says with each label, if it says any.
        """
        first, place.emitted = place.frame, None
        while not place.over and place.frame - first < len(labels):
            at, index = place.frame, place.frame - first
            before, place.label = place.label, labels[index]
            repeated = not self.most_symbols and place.label == before
            emits = place.label != self.blank and not repeated
            place.left -= 1
            place.symbols += emits
            stays = bool(self.most_symbols) and place.symbols < self.most_symbols
            step = durations[index] if self.durations else int(not (emits and stays))
            place.frame += max(step, not emits)
            if place.frame > at:
                place.symbols = 0
            if emits:
                place.emitted = (at, at + (step if self.durations else 1))
                return index
        return None
