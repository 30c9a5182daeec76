"""Who crashes the steps: suspects, how they are told apart, and when one of them is poison.

The requests of a failed step are suspects until they run well. They are tried in halves, so that the one that crashes
the steps is found by bisection, and when it has crashed alone too often for chance (`triolet.core.evidence`) it fails.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from attrs import define, field

from .errors import PoisonRequest
from .evidence import Evidence
from .sequence import Sequence


@define(eq=False)
class Blame:
    """What is known against whom. ``crashes_alone``: how many at least make a request poison."""

    crashes_alone: int
    _evidence: Evidence = field(factory=Evidence, init=False)

    def step_done(self) -> None:
        """A step went well. It clears those who drew a token in it, see `clear`, and nobody else."""
        self._evidence.step_done()

    def step_failed(self, sequences: Iterable[Sequence]) -> None:
        """A step with ``sequences`` failed; `accuse` each of them."""
        self._evidence.step_failed(sequence.request.id for sequence in sequences)

    def accuse(self, sequence: Sequence, error: Exception, *, alone: bool, steps: int) -> PoisonRequest | None:
        """``sequence`` was in the failed step, ``alone`` or not; its error, where it is now known for poison.

        Args:
            steps: how many it takes to its next token.
        """
        sequence.suspicion += 1
        sequence.crashes_alone += alone
        enough = self._evidence.crashes_to_blame(sequence.request.id, self.crashes_alone, steps=steps)
        if sequence.ended or sequence.crashes_alone < enough:
            return None
        poison = PoisonRequest(
            f"request {sequence.request.id} crashed its step {sequence.crashes_alone} times, alone in it; the other "
            f"requests go on. The last error was {type(error).__name__}: {error}"
        )
        poison.__cause__ = error
        self._evidence.blamed(sequence.request.id)
        return poison

    def clear(self, sequence: Sequence) -> None:
        """It drew a token: whatever crashed the steps it was in, it was not the request."""
        if sequence.suspicion:
            self._evidence.cleared(sequence.request.id)
            sequence.suspicion = sequence.crashes_alone = 0

    def gone(self, sequence: Sequence) -> None:
        """It has ended."""
        if sequence.suspicion:
            self._evidence.cleared(sequence.request.id)

    @staticmethod
    def halves(candidates: Collection[Sequence]) -> Iterator[list[Sequence]]:
        """Half of the candidates that were part of the most failed steps since they last ran well.

        They run in a step of their own, so that the one that crashes it is found by bisection: the half that fails
        again is then the most suspicious. Requests beyond suspicion run in the steps that have no suspects to run.

        Where those wait for room, the other half may run, and then those that are less suspicious: they may be the ones
        that have it.
        """
        for level in sorted({sequence.suspicion for sequence in candidates if sequence.suspicion}, reverse=True):
            group = [sequence for sequence in candidates if sequence.suspicion == level]
            half = max(1, len(group) // 2)
            yield group[:half]
            yield group[half:]
