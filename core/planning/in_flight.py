"""`InFlightStep`: a step that was dispatched and is not answered yet."""

from __future__ import annotations

from attrs import define

from ..ledger_values import Hold
from ..plan import StepPlan
from .sequence import Sequence


@define(eq=False)
class InFlightStep:
    """A dispatched step, and the sequences that its answer concerns."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    writes: tuple[Sequence, ...]  # sequences whose cross KV the step writes
    reads: tuple[Hold, ...]  # holds of the encoder outputs that the step reads

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The ids of the step's requests."""
        return tuple([sequence.request.id for sequence in self.sequences])

    @property
    def samples(self) -> tuple[str, ...]:
        """The ids of the requests that get a token from the step, or go on with their beam search."""
        pairs = zip(self.sequences, self.plan.chunks, strict=True)
        return tuple([one.request.id for one, chunk in pairs if chunk.samples and one.request.reads is None])
