"""Triolet's own encoder ledger, adapted to the step protocol. Its encode batches have a budget of their own, so that a
step has none; it asserts that everything is given back once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.ledger_values import Hold
from triolet.core.request import EncoderItem
from triolet_kit.steps import StepDeclaration, StepPlanned, Wanted

DECLARED = StepDeclaration(budgets=False, repeats=False, evicts_within_step=False)


class LedgerSteps:
    """`EncoderLedger` as a `StepCache`. What a step frees is free when the step has run."""

    def __init__(self, room: int) -> None:
        self.ledger, self.steps = EncoderLedger(room), deque[tuple[list[str], list[str]]]()
        self.release, self.close = partial(self.ledger.release, now=0.0), partial(self.ledger.close, now=0.0)

    def ask(self, request: str, key: str, size: int) -> str:
        holds, acquire = self.ledger.holds, self.ledger.acquire
        item = EncoderItem(key=key, payload=None, embeddings=1, size=size)
        if not holds(request, key) and acquire(request, item).refused:
            return "never"
        waits = Hold(request, key) in self.ledger.waiting()
        return "later" if waits else "encode" if self.ledger.state(key) is State.RESERVED else "hit"

    def plan(self, wanted: Sequence[Wanted], budget: int) -> StepPlanned:
        answers = [told for word, *one in wanted if (told := (self.ask if word == "ask" else self.finish)(*one))]
        freeing = [key for key, (state, *_) in self.ledger.entries().items() if state is State.FREEING]
        frees = [key for key in freeing if not any(key in planned for planned, _ in self.steps)]
        self.steps.append((frees, [job.key for job in self.ledger.take_encode_batch()]))
        return answers, *self.steps[-1]

    def executed(self, failed: Sequence[str]) -> None:
        self.ledger.freed(self.steps[0][0])
        self.ledger.encoded([key for key in self.steps.popleft()[1] if key not in failed], now=0.0)
        for holder, key in [(holder, lost) for lost in failed for holder in self.ledger.entries()[lost][1]]:
            self.release(holder, key)
        self.ledger.encode_failed(failed, RuntimeError("failed"))

    def finish(self, request: str) -> None:
        for key in [hold.key for hold in self.ledger.holds_and_waits() if hold.holder == request]:
            self.release(request, key)
