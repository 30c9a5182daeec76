"""Draft tokens from the text itself (prompt lookup decoding): the tokens that followed an earlier occurrence of the
last tokens."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field


@define(eq=False)
class Lookup:
    """An index of a growing list of tokens: for each run of up to ``match`` tokens, the place of its last occurrence.
    So each token adds up to ``match`` entries.
    """

    match: int
    _ends: dict[tuple[int, ...], int] = field(factory=dict, init=False)  # the index of the token after each run
    _seen: int = field(default=0, init=False)  # tokens whose runs are added; never the last token: nothing follows it

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Returns up to ``count`` tokens that may follow ``tokens``. Takes the longest run of last tokens that the
        index has, and returns the tokens that followed its last occurrence. ``tokens`` may only grow from call to call.
        """
        for length in range(min(self.match, len(tokens)), 0, -1):
            begin = self._ends.get(tuple(tokens[-length:]))
            if begin is not None:
                return tuple(tokens[begin : begin + count])
        return ()

    def learn(self, tokens: Sequence[int], most: int) -> int:
        """Adds the runs that end at the next ``most`` tokens or fewer, and returns the number of these tokens."""
        before, self._seen = self._seen, max(self._seen, min(len(tokens) - 1, self._seen + most))
        for end in range(before + 1, self._seen + 1):
            for length in range(1, min(self.match, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        return self._seen - before
