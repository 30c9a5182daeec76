"""`HeldSamples`: the samples of a stream that may still be read."""

from __future__ import annotations

from collections import deque

import numpy as np
from attrs import define, field

from .sources import Samples


@define(eq=False)
class HeldSamples:
    """Samples that were appended and may still be read, counted from the stream's beginning.

    Attributes:
        start: the samples before this one were forgotten.
        stop: the number of samples that were appended so far.
    """

    start: int = field(default=0, init=False)
    stop: int = field(default=0, init=False)
    _parts: deque[tuple[int, Samples]] = field(factory=deque, init=False)  # each with the place of its first sample

    @property
    def count(self) -> int:
        """The number of samples in memory."""
        return sum(len(part) for _, part in self._parts)

    def append(self, samples: Samples) -> None:
        """Adds the next samples, without a copy."""
        if len(samples):
            self._parts.append((self.stop, samples))
            self.stop += len(samples)
            self.forget(self.start)

    def forget(self, before: int) -> None:
        """Drops the parts that end at sample ``before`` or earlier. ``before`` may lie beyond the last sample that was
        appended."""
        self.start = max(self.start, before)
        while self._parts and self._parts[0][0] + len(self._parts[0][1]) <= self.start:
            self._parts.popleft()

    def read(self, start: int, stop: int) -> Samples:
        """Returns a copy of samples ``start`` to ``stop``, which must not be forgotten; fewer if fewer were
        appended."""
        assert start >= self.start, f"sample {start} was forgotten: all before {self.start} were"
        found = np.zeros(max(min(stop, self.stop) - start, 0), np.float32)
        for first, part in self._parts:
            begin, end = max(start, first), min(stop, first + len(part))
            if begin < end:
                found[begin - start : end - start] = part[begin - first : end - first]
        return found
