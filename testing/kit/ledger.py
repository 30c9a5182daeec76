"""Triolet's own encoder ledger behind the step protocol. Its encode batches have a budget of their own, so that a step
has none; it asserts that everything is given back once::

    triolet verify triolet.testing.kit.ledger:LedgerSteps --declare budgets=no --declare repeats=no
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from ...core.ledger import EncoderLedger
from ...core.ledger_table import State
from ...core.ledger_values import Hold
from .steps import Declaration, StepPlanned, Wanted

DECLARED = Declaration(budgets=False, repeats=False)


class LedgerSteps:
    """`EncoderLedger` as a `StepCache`. A step frees before it encodes: what it frees is free once it is planned."""

    def __init__(self, room: int) -> None:
        self.ledger, self.steps = EncoderLedger(room), deque[list[str]]()
        self.acquire = partial(self.ledger.acquire, embeddings=1, payload=None)
        self.release, self.close = partial(self.ledger.release, now=0.0), partial(self.ledger.close, now=0.0)

    def ask(self, request: str, key: str, size: int) -> str:
        if not self.ledger.holds(request, key) and self.acquire(request, key, size=size).refused:
            return "never"
        waits = Hold(request, key) in self.ledger.waiting()
        return "later" if waits else "encode" if self.ledger.state(key) is State.RESERVED else "hit"

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:  # noqa: ARG002
        does: dict[str, Callable[..., str | None]] = {"ask": self.ask, "preempt": self.finish}
        answers = [does[word](*told) for word, *told in wanted]
        frees = [key for key, (state, *_) in self.ledger.entries().items() if state is State.FREEING]
        self.ledger.freed(frees)
        self.steps.append([job.key for job in self.ledger.take_encode_batch()])
        return [answer for answer in answers if answer], frees, self.steps[-1]

    def executed(self, failed: Sequence[str]) -> None:
        self.ledger.encoded([key for key in self.steps.popleft() if key not in failed], now=0.0)
        for holder, key in [(holder, lost) for lost in failed for holder in self.ledger.entries()[lost][1]]:
            self.release(holder, key)
        self.ledger.encode_failed(failed, RuntimeError("failed"))

    def finish(self, request: str) -> None:
        for key in [hold.key for hold in self.ledger.holds_and_waits() if hold.holder == request]:
            self.release(request, key)
