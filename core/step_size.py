"""`BatchSize` by the planner's words."""

from __future__ import annotations

from .batch_size import BatchSize


class StepSize(BatchSize):
    """How many tokens a step may feed now."""

    @property
    def tokens(self) -> int:
        """`BatchSize.budget`."""
        return self.budget

    def step_done(self) -> None:
        """`BatchSize.done`."""
        self.done()
