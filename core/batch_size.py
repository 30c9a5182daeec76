"""How much one launch on the device may take: less after one was too large for its memory, and more again with time."""

from __future__ import annotations

from attrs import define, field

_PATIENCE = 32  # good launches before one that had to shrink may grow; twice as many where one that had grown fails
_MOST_PATIENCE = 4096


@define(eq=False)
class BatchSize:
    """``budget`` is what a launch may take now, up to ``most``: tokens of a step, embeddings of an encode batch."""

    most: int
    budget: int = field(init=False)
    _patience: int = field(default=_PATIENCE, init=False)
    _grown: bool = field(default=False, init=False)  # since a launch was too large
    _good: int = field(default=0, init=False)  # launches since the budget last changed

    def __attrs_post_init__(self) -> None:
        self.budget = self.most

    def too_large(self, size: int) -> None:
        """A launch of ``size``, two or more, was too large: the next ones are at most half of it."""
        self.budget = max(1, min(self.budget, size) // 2)
        self._good = 0
        if self._grown:
            self._grown, self._patience = False, min(2 * self._patience, _MOST_PATIENCE)

    def done(self) -> None:
        """A launch went well. What had to shrink grows again, twofold, after a while without a failure. The while is
        longer each time that this was too early, else a request that needs more steps than that would start anew for
        ever."""
        self._good += 1
        if self._good < self._patience:
            return
        self._good = 0
        if self.budget < self.most:
            self.budget = min(2 * self.budget, self.most)
            self._grown = True
        else:
            self._grown, self._patience = False, _PATIENCE
