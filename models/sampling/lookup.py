"""Draft tokens from the text itself: what followed the last tokens where they occurred before (prompt lookup
decoding)."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field


@define(eq=False)
class Lookup:
    """The last places of each short run in a growing list of tokens. Adding a token costs ``match`` entries.

    ``match``: the longest run that is looked for.
    """

    match: int
    _ends: dict[tuple[int, ...], int] = field(factory=dict, init=False)  # a run, and where what follows it begins
    _seen: int = field(default=0, init=False)  # tokens whose runs are in; the last one's are not: nothing follows yet

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Returns up to ``count`` tokens that may follow ``tokens``, which may only have grown since the last call:
        what followed the longest run of its last tokens, where that occurred last in what is learned."""
        for length in range(min(self.match, len(tokens)), 0, -1):
            begin = self._ends.get(tuple(tokens[-length:]))
            if begin is not None:
                return tuple(tokens[begin : begin + count])
        return ()

    def learn(self, tokens: Sequence[int], most: int) -> int:
        """Adds the runs of up to ``most`` further ``tokens``, from the beginning on; returns how many it added."""
        before, self._seen = self._seen, max(self._seen, min(len(tokens) - 1, self._seen + most))
        for end in range(before + 1, self._seen + 1):
            for length in range(1, min(self.match, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        return self._seen - before
