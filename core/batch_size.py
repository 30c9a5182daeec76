"""The largest size of one launch on the device. It is halved after a launch that was too large for memory, and grows
again in time.
"""

from __future__ import annotations

from attrs import define, field

_PATIENCE = 32  # good launches until a smaller budget grows; doubles if the grown budget is too large
_MOST_PATIENCE = 4096


@define(eq=False)
class BatchSize:
    """The size that a launch may have: ``budget`` now, and at most ``most``. It counts the tokens of a step, or the
    embeddings of an encode batch.
    """

    most: int
    budget: int = field(init=False)
    _patience: int = field(default=_PATIENCE, init=False)
    _grown: bool = field(default=False, init=False)  # whether the budget has grown since a launch was too large
    _good: int = field(default=0, init=False)  # launches since the budget last changed

    def __attrs_post_init__(self) -> None:
        self.budget = self.most

    def too_large(self, size: int) -> None:
        """Notes that a launch of ``size``, two or more, was too large. The next launches have at most half of
        ``size``."""
        self.budget = max(1, min(self.budget, size) // 2)
        self._good = 0
        if self._grown:
            self._grown, self._patience = False, min(2 * self._patience, _MOST_PATIENCE)

    def done(self) -> None:
        """Notes that a launch went well. After ``_patience`` good launches a smaller budget doubles. The patience
        doubles each time that the budget grew too early. Otherwise a request with more steps than ``_patience`` would
        fail and start anew for ever.
        """
        self._good += 1
        if self._good < self._patience:
            return
        self._good = 0
        if self.budget < self.most:
            self.budget = min(2 * self.budget, self.most)
            self._grown = True
        else:
            self._grown, self._patience = False, _PATIENCE
