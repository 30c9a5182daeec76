"""How many tokens a step may feed: less after one was too large for the device's memory, and more again with time."""

from __future__ import annotations

from attrs import define, field

_PATIENCE = 32  # good steps before one that had to shrink may grow; twice as many where one that had grown fails
_MOST_PATIENCE = 4096


@define(eq=False)
class StepSize:
    """``tokens`` is what a step may feed now, up to ``most``."""

    most: int
    tokens: int = field(init=False)
    _patience: int = field(default=_PATIENCE, init=False)
    _grown: bool = field(default=False, init=False)  # since a step was too large
    _good_steps: int = field(default=0, init=False)  # since it last changed

    def __attrs_post_init__(self) -> None:
        self.tokens = self.most

    def too_large(self, tokens: int) -> None:
        """A step of ``tokens``, two or more, was too large: the next ones are at most half of it."""
        self.tokens = min(self.tokens, tokens) // 2
        self._good_steps = 0
        if self._grown:
            self._grown, self._patience = False, min(2 * self._patience, _MOST_PATIENCE)

    def step_done(self) -> None:
        """A step went well. Steps that had to shrink grow again, twofold, after a while without a failure. The while is
        longer each time that this was too early, else a request that needs more steps than that would start anew for
        ever."""
        self._good_steps += 1
        if self._good_steps < self._patience:
            return
        self._good_steps = 0
        if self.tokens < self.most:
            self.tokens = min(2 * self.tokens, self.most)
            self._grown = True
        else:
            self._grown, self._patience = False, _PATIENCE
