"""The encoder-cache actor: owns the ledger of encoder outputs (`core.ledger`), and exchanges messages with the other
actors.

An output that is lent is copied off the device as soon as the loan is ready, and the copy is sent to the borrower. If
the borrower is lost, the loan ends with its term. This cannot spoil a copy: the encode lane frees an output only after
its copy was made.
"""

from __future__ import annotations

import math
from typing import assert_never

import trio
from attrs import define, field

from ..core import events
from ..core.errors import BorrowFailed, EngineClosed
from ..core.ledger import EncoderLedger
from ..core.ledger_values import Decisions, Hold
from . import messages as m
from .emit import Emit
from .inbox import take_all


@define(eq=False)
class EncoderCache:
    """Answers acquires, and sends encode batches and frees.

    With ``lenders`` the ledger borrows: the actor asks ``lenders`` for the entries that are reserved. A loan that was
    not released ends after ``loan_seconds``.

    One encode batch is in flight at a time: acquires that arrive meanwhile make the next batch. The actor ends when the
    scheduler has closed and the runner has dropped every entry, so that nothing stays resident.
    """

    inbox: trio.MemoryReceiveChannel[m.EncoderCacheMessage]
    to_scheduler: trio.MemorySendChannel[m.SchedulerMessage]
    to_runner: trio.MemorySendChannel[m.EncodeLaneMessage]
    ledger: EncoderLedger
    idle_seconds: float
    emit: Emit
    lenders: m.Lenders | None = None
    loan_seconds: float = 30.0
    _loans: dict[str, m.Lent | None] = field(factory=dict, init=False)  # open loans; ``None``: the copy was handed over
    _borrows: dict[int, tuple[str, int]] = field(factory=dict, init=False)  # not yet answered: key and size, by number
    _asked: int = field(default=0, init=False)
    _to_free: list[str] = field(factory=list, init=False)  # keys to free, not yet sent
    _encoding: bool = field(default=False, init=False)
    _closing: bool = field(default=False, init=False)
    _asleep: bool = field(default=False, init=False)  # whether the runner is, as last reported
    _runner_gone: bool = field(default=False, init=False)
    _generation: int = field(default=0, init=False)  # the runner's, as last reported

    @trio.lowlevel.enable_ki_protection
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until the scheduler has closed and no entry is left, or the runner is gone."""
        task_status.started()
        while not (self._closing and (self.ledger.drained or self._runner_gone)):
            await self._take_messages()
            self._send_frees()  # before the batch, so that frees need not wait for it
            self._dispatch()
            self._borrow()

    async def _take_messages(self) -> None:
        with trio.move_on_at(self._next_deadline()) as scope:
            for message in await take_all(self.inbox):
                self._handle(message)
        if scope.cancelled_caught:
            now = trio.current_time()
            self._decide(self.ledger.end_loans(now=now, loan_seconds=self.loan_seconds))
            self._decide(self.ledger.evict_idle(now=now, idle_seconds=self.idle_seconds))

    def _next_deadline(self) -> float:
        idle, loan = self.ledger.oldest_idle, self.ledger.oldest_loan
        return min(
            math.inf if idle is None else idle + self.idle_seconds,
            math.inf if loan is None else loan + self.loan_seconds,
        )

    def _handle(self, message: m.EncoderCacheMessage) -> None:
        match message:
            case m.Acquire(holder, item, order):
                self.emit(events.EntryAcquired(item.key, holder))
                self._decide(self.ledger.acquire(holder, item, order=order, now=trio.current_time()))
            case m.Release(holder, key) if not self.ledger.holds(holder, key):
                pass  # the acquire was refused while its release was on the way
            case m.Release(holder, key):
                if lent := self._loans.pop(holder, None):
                    lent.refuse(BorrowFailed(f"the loan of {key} was given back before its copy was made"))
                self.emit(events.EntryReleased(key, holder))
                self._decide(self.ledger.release(holder, key, now=trio.current_time()))
            case m.Lend() | m.TakenOut() | m.TakeOutBroken():
                self._handle_loan(message)
            case m.Arrived() | m.BorrowBroken() | m.PutInDone() | m.PutInBroken():
                self._handle_borrow(message)
            case m.Encoded(keys):
                self._encoding = False
                self.emit(events.EncodeDone(keys))
                self._decide(self.ledger.encoded(keys, now=trio.current_time()))
            case m.EncodeBroken(keys, error):
                self._encoding = False
                self.emit(events.EncodeBroke(keys, events.error_text(error)))
                self._decide(self.ledger.encode_failed(keys, error))
            case m.Freed(keys):
                self.emit(events.EntryFreed(keys))
                self._decide(self.ledger.freed(keys, now=trio.current_time()))
            case m.SchedulerClosed():
                self._closing = True
                self._end_loans()
                for key in self._withdraw_borrows():
                    self._borrow_broke(key, EngineClosed("the engine that borrows is stopping"))
                for hold in self.ledger.holds_and_waits():
                    self.emit(events.EntryTakenBack(hold.key, hold.holder))
                self._decide(self.ledger.close(now=trio.current_time()))
            case m.RunnerRestarted(generation, asleep):
                self._generation = generation
                self._asleep = asleep
                self._encoding = False
                self._to_free.clear()
                self._withdraw_borrows()
                self.emit(events.OutputsLost(generation))
                self.to_scheduler.send_nowait(message)  # by this actor, so that no `EncoderReady` overtakes it
                self._decide(self.ledger.generation_lost())
            case m.RunnerWoke():
                self._asleep = False
                self.to_scheduler.send_nowait(message)
            case m.RunnerLost():
                self._runner_gone = True
                self._end_loans()
                self._withdraw_borrows()
            case _:
                assert_never(message)

    # -- loans -------------------------------------------------------------------------------------------------------

    def _handle_loan(self, message: m.Lend | m.TakenOut | m.TakeOutBroken) -> None:
        match message:
            case m.Lend(_, _, lent) if self._closing or self._runner_gone:
                lent.refuse(EngineClosed("the engine that lends is stopping"))
            case m.Lend(loan, item, lent):
                self._loans[loan] = lent
                self.emit(events.EntryAcquired(item.key, loan))
                self._decide(self.ledger.acquire(loan, item, loan=True, now=trio.current_time()))
            case m.TakenOut(loan, output):
                waiting = self._loans.get(loan)
                if waiting is not None:  # else the loan has ended meanwhile
                    self._loans[loan] = None
                    waiting.put(output)
            case m.TakeOutBroken(loan, key, error):
                self._end_loan(Hold(loan, key), error)

    def _end_loan(self, hold: Hold, error: Exception) -> None:
        """Ends a loan that is still open. If the borrower has no copy yet, it gets ``error``."""
        if hold.holder not in self._loans:
            return
        lent = self._loans.pop(hold.holder)
        if lent is not None:
            lent.refuse(error)
        if self.ledger.holds(hold.holder, hold.key):
            self.emit(events.EntryReleased(hold.key, hold.holder))
            self._decide(self.ledger.release(hold.holder, hold.key, now=trio.current_time()))

    def _end_loans(self) -> None:
        for hold in self.ledger.holds_and_waits():
            self._end_loan(hold, EngineClosed("the engine that lends is stopping"))

    # -- borrows -----------------------------------------------------------------------------------------------------

    def _borrow(self) -> None:
        if self.lenders is None or self._asleep or self._runner_gone:
            return
        for item in self.ledger.take_borrows():
            self._asked += 1
            self._borrows[self._asked] = (item.key, item.size)
            self.emit(events.BorrowSent((item.key,)))
            self.lenders.ask(self._asked, item)

    def _handle_borrow(self, message: m.Arrived | m.BorrowBroken | m.PutInDone | m.PutInBroken) -> None:
        match message:
            case m.Arrived(number) | m.BorrowBroken(number) if number not in self._borrows:
                pass  # withdrawn while the answer was on its way
            case m.Arrived(number, output):
                key, size = self._borrows.pop(number)
                if (output.key, output.size) == (key, size):
                    self.to_runner.send_nowait(m.PutIn(output, self._generation))
                else:
                    gave = f"gave {output.size} bytes of {output.key}, but {size} bytes of {key} were asked for"
                    self._borrow_broke(key, BorrowFailed(f"a lender {gave}: start it with the same settings"))
            case m.BorrowBroken(number, error):
                key, _ = self._borrows.pop(number)
                self._borrow_broke(key, error)
            case m.PutInDone(key):
                self.emit(events.BorrowDone((key,)))
                self._decide(self.ledger.borrowed(key, now=trio.current_time()))
            case m.PutInBroken(key, error):
                self._borrow_broke(key, error)

    def _borrow_broke(self, key: str, error: Exception) -> None:
        self.emit(events.BorrowBroke((key,), events.error_text(error)))
        self._decide(self.ledger.borrow_failed(key, error))

    def _withdraw_borrows(self) -> tuple[str, ...]:
        """Withdraws the borrows that have no answer yet, and returns their keys."""
        keys = tuple(key for key, _ in self._borrows.values())
        for number in self._borrows:
            assert self.lenders is not None, "only a ledger that borrows has borrows"
            self.lenders.withdraw(number)
        self._borrows.clear()
        return keys

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, decisions: Decisions) -> None:
        if decisions.shrunk is not None:
            self.emit(events.EncodeShrunk(decisions.shrunk))
        if decisions.retried:
            self.emit(events.EncodeRetried(tuple(decisions.retried)))
        for hold in decisions.lapsed:  # the ledger has released them
            self.emit(events.EntryReleased(hold.key, hold.holder))
            self._end_loan(hold, BorrowFailed(f"the copy of {hold.key} took longer than {self.loan_seconds} s"))
        for key in decisions.dropped:  # before the reservations, which may take the room of dropped entries
            self.emit(events.EntryDropped(key))
        for key, size in decisions.reserved:
            self.emit(events.EntryReserved(key, size))
        for hold in decisions.ready:
            self.emit(events.EntryHeld(hold.key, hold.holder))
            if hold.holder not in self._loans:
                self.to_scheduler.send_nowait(m.EncoderReady(hold.holder))
            elif self._loans[hold.holder] is not None:  # else this is the output encoded again, after a restart
                self.to_runner.send_nowait(m.TakeOut(hold.holder, hold.key, self._generation))
        for refusal in decisions.refused:
            self.emit(events.EntryRefused(refusal.key, refusal.holder, events.error_text(refusal.error)))
            if refusal.holder in self._loans:
                self._end_loan(Hold(refusal.holder, refusal.key), refusal.error)
            else:
                self.to_scheduler.send_nowait(m.EncoderRefused(refusal.holder, refusal.error))
        self._to_free += decisions.free

    def _send_frees(self) -> None:
        """Sends the runner one message with all keys to free that follow from the last batch of messages. So their room
        comes back at once.
        """
        keys, self._to_free = tuple(self._to_free), []
        if keys and not self._runner_gone:
            self.emit(events.FreeSent(keys))
            self.to_runner.send_nowait(m.Free(keys, self._generation))

    def _dispatch(self) -> None:
        if self._encoding or self._asleep or self._runner_gone:
            return
        items = self.ledger.take_encode_batch()
        if not items:
            return
        self._encoding = True
        self.emit(events.EncodeDispatched(tuple(item.key for item in items), sum(item.embeddings for item in items)))
        self.to_runner.send_nowait(m.Encode(items, self._generation))
