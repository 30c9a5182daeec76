"""The encoder-cache actor: owns the ledger of encoder outputs (`core.ledger`), and exchanges messages with the other
actors."""

from __future__ import annotations

import math
from typing import assert_never

import trio
from attrs import define, field

from ..core import events
from ..core.ledger import EncoderLedger
from ..core.ledger_values import Decisions
from . import messages as m
from .emit import Emit
from .inbox import take_all


@define(eq=False)
class EncoderCache:
    """Answers acquires, and sends encode batches and frees.

    One encode batch is in flight at a time: acquires that arrive meanwhile make the next batch. The actor ends when the
    scheduler has closed and the runner has dropped every entry, so that nothing stays resident.
    """

    inbox: trio.MemoryReceiveChannel[m.EncoderCacheMessage]
    to_scheduler: trio.MemorySendChannel[m.SchedulerMessage]
    to_runner: trio.MemorySendChannel[m.EncodeLaneMessage]
    ledger: EncoderLedger
    idle_seconds: float
    emit: Emit
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

    async def _take_messages(self) -> None:
        with trio.move_on_at(self._next_deadline()) as scope:
            for message in await take_all(self.inbox):
                self._handle(message)
        if scope.cancelled_caught:
            self._decide(self.ledger.evict_idle(now=trio.current_time(), idle_seconds=self.idle_seconds))

    def _next_deadline(self) -> float:
        oldest = self.ledger.oldest_idle
        return math.inf if oldest is None else oldest + self.idle_seconds

    def _handle(self, message: m.EncoderCacheMessage) -> None:
        match message:
            case m.Acquire(holder, item, order):
                self.emit(events.EntryAcquired(item.key, holder))
                self._decide(self.ledger.acquire(holder, item, order=order))
            case m.Release(holder, key) if not self.ledger.holds(holder, key):
                pass  # the acquire was refused while its release was on the way
            case m.Release(holder, key):
                self.emit(events.EntryReleased(key, holder))
                self._decide(self.ledger.release(holder, key, now=trio.current_time()))
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
                self._decide(self.ledger.freed(keys))
            case m.SchedulerClosed():
                self._closing = True
                for hold in self.ledger.holds_and_waits():
                    self.emit(events.EntryTakenBack(hold.key, hold.holder))
                self._decide(self.ledger.close(now=trio.current_time()))
            case m.RunnerRestarted(generation, asleep):
                self._generation = generation
                self._asleep = asleep
                self._encoding = False
                self._to_free.clear()
                self.emit(events.OutputsLost(generation))
                self.to_scheduler.send_nowait(message)  # by this actor, so that no `EncoderReady` overtakes it
                self._decide(self.ledger.generation_lost())
            case m.RunnerWoke():
                self._asleep = False
                self.to_scheduler.send_nowait(message)
            case m.RunnerLost():
                self._runner_gone = True
            case _:
                assert_never(message)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def _decide(self, decisions: Decisions) -> None:
        if decisions.shrunk is not None:
            self.emit(events.EncodeShrunk(decisions.shrunk))
        if decisions.retried:
            self.emit(events.EncodeRetried(tuple(decisions.retried)))
        for key in decisions.dropped:  # before the reservations, which may take the room of dropped entries
            self.emit(events.EntryDropped(key))
        for key, size in decisions.reserved:
            self.emit(events.EntryReserved(key, size))
        for hold in decisions.ready:
            self.emit(events.EntryHeld(hold.key, hold.holder))
            self.to_scheduler.send_nowait(m.EncoderReady(hold.holder))
        for refusal in decisions.refused:
            self.emit(events.EntryRefused(refusal.key, refusal.holder, events.error_text(refusal.error)))
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
