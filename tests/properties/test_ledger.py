"""The promises of the encoder ledger, each under its own name, over every order of events that Hypothesis can find."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from triolet.core.errors import EncodeFailed, RequestTooLarge
from triolet.core.ledger import TRANSITIONS, Change, Decisions, EncoderLedger, State

KEYS = ("a", "b", "c", "d")
SIZES = {"a": 1, "b": 2, "c": 3, "d": 9}
RESIDENT = {State.READY, State.IDLE, State.FREEING}


class LedgerMachine(RuleBasedStateMachine):
    """A ledger, a device that obeys it, and clients who acquire and release as they please."""

    @initialize(capacity=st.integers(1, 6))
    def open(self, capacity: int) -> None:
        self.ledger = EncoderLedger(capacity)
        self.now = 0.0
        self.names = 0
        self.open_asks: dict[str, str] = {}  # holder -> key, asked and not answered
        self.held: dict[str, str] = {}  # holder -> key, answered with ready and not released
        self.encoding: list[tuple[str, ...]] = []
        self.freeing: list[tuple[str, ...]] = []
        self.device: dict[str, int] = {}  # outputs that are resident, with their bytes
        self.closed = False

    def obey(self, decisions: Decisions) -> None:
        for hold in decisions.ready:
            assert self.open_asks.pop(hold.holder) == hold.key, "every acquire is answered once"
            self.held[hold.holder] = hold.key
            assert hold.key in self.device, "no phantom: what is offered was computed and is resident"
        for refusal in decisions.refused:
            assert self.open_asks.pop(refusal.holder) == refusal.key
        for key in decisions.free:
            assert key not in self.held.values(), "no free while held"
            assert key in self.device, "only what is resident is freed"
        if decisions.free:
            self.freeing.append(decisions.free)

    @precondition(lambda self: not self.closed)
    @rule(key=st.sampled_from(KEYS))
    def acquire(self, key: str) -> None:
        holder = f"r{self.names}"
        self.names += 1
        self.open_asks[holder] = key
        self.obey(self.ledger.acquire(holder, key, size=SIZES[key], embeddings=1, payload=key))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.held or self.closed:
            return
        holder = data.draw(st.sampled_from(sorted(self.held)))
        key = self.held.pop(holder)
        self.obey(self.ledger.release(holder, key, now=self.now))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if not self.open_asks or self.closed:
            return
        holder = data.draw(st.sampled_from(sorted(self.open_asks)))
        key = self.open_asks.pop(holder)
        self.obey(self.ledger.release(holder, key, now=self.now))

    @rule(budget=st.integers(1, 3))
    def dispatch(self, budget: int) -> None:
        jobs = self.ledger.take_encode_batch(budget)
        assert len(jobs) <= budget, "an encode batch keeps its budget (every item here has one embedding)"
        for job in jobs:
            assert job.payload == job.key, "what is dispatched still has its payload"
        if jobs:
            self.encoding.append(tuple(job.key for job in jobs))

    @rule()
    def device_encodes(self) -> None:
        if not self.encoding:
            return
        keys = self.encoding.pop(0)
        for key in keys:
            assert key not in self.device, "encode once: no output is computed while it is resident"
            self.device[key] = SIZES[key]
        self.obey(self.ledger.encoded(keys, now=self.now))
        self.evict_if_closed()

    @rule()
    def device_fails_to_encode(self) -> None:
        if not self.encoding:
            return
        decisions = self.ledger.encode_failed(self.encoding.pop(0), RuntimeError("boom"))
        assert all(isinstance(refusal.error, EncodeFailed) for refusal in decisions.refused)
        self.obey(decisions)

    @rule()
    def device_frees(self) -> None:
        if not self.freeing:
            return
        keys = self.freeing.pop(0)
        for key in keys:
            del self.device[key]
        self.obey(self.ledger.freed(keys))

    @rule()
    def device_is_lost(self) -> None:
        """A new runner generation: everything computed is gone, calls in flight will not be answered."""
        self.device.clear()
        self.encoding.clear()
        self.freeing.clear()
        for holder, key in self.held.items():
            self.open_asks[holder] = key
        self.held.clear()
        self.obey(self.ledger.generation_lost())

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.ledger.evict_idle(now=self.now, idle_seconds=10.0))
        oldest = self.ledger.oldest_idle
        assert oldest is None or oldest + 10.0 > self.now

    @rule()
    def close(self) -> None:
        self.closed = True
        self.open_asks.clear()
        self.held.clear()
        self.obey(self.ledger.close(now=self.now))

    def evict_if_closed(self) -> None:
        if self.closed:
            self.obey(self.ledger.evict_idle(now=float("inf"), idle_seconds=0.0))

    # -- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        """Reserved, resident and freeing bytes are the sum of the entries, within capacity, and no less than what the
        device holds."""
        entries = self.ledger.entries()
        assert self.ledger.taken == sum(size for _, _, size in entries.values())
        assert 0 <= self.ledger.taken <= self.ledger.capacity
        resident = {key: size for key, (state, _, size) in entries.items() if state in RESIDENT}
        assert resident == self.device

    @invariant()
    def no_use_before_ready(self) -> None:
        """Whoever was told to read can read now."""
        for holder, key in self.held.items():
            state, holders, _ = self.ledger.entries()[key]
            assert state is State.READY
            assert holder in holders

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        """The front of the queue waits for bytes that are held, in work or on their way back, never for idle ones."""
        waiting = self.ledger.waiting()
        if not waiting or self.closed:
            return
        front = waiting[0]
        entries = self.ledger.entries()
        if front.key in entries:
            assert entries[front.key][0] is State.FREEING
            return
        idle = [key for key, (state, _, _) in entries.items() if state is State.IDLE]
        freeing = sum(size for state, _, size in entries.values() if state is State.FREEING)
        room = self.ledger.capacity - self.ledger.taken
        assert room < SIZES[front.key]
        assert not idle or room + freeing >= SIZES[front.key]

    def teardown(self) -> None:
        """Always freed eventually, and every acquire is answered: once clients release what they hold and the device
        answers, nothing stays open; after close nothing is resident."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(1000):
            if not (self.open_asks or self.held or self.encoding or self.freeing):
                break
            self.dispatch(3)
            self.device_encodes()
            self.device_frees()
            for holder, key in list(self.held.items()):
                del self.held[holder]
                self.obey(self.ledger.release(holder, key, now=self.now))
        assert not self.open_asks, f"acquires without an answer: {self.open_asks}"
        if not self.closed:
            self.close()
        while self.encoding or self.freeing:
            self.device_encodes()
            self.device_frees()
        assert self.ledger.drained
        assert self.ledger.taken == 0
        assert not self.device


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=40)


def test_an_item_larger_than_the_cache_is_refused_at_once_with_both_sizes():
    """E11: it would wait for ever."""
    decisions = EncoderLedger(100).acquire("r", "k", size=101, embeddings=1, payload=None)
    (refusal,) = decisions.refused
    assert isinstance(refusal.error, RequestTooLarge)
    assert "101" in str(refusal.error)
    assert "100" in str(refusal.error)


def test_a_popular_entry_cannot_keep_a_waiting_request_out():
    """Hits that come after a waiting request wait behind it, so the entry's last holder leaves one day."""
    ledger = EncoderLedger(1)
    ledger.acquire("r0", "hot", size=1, embeddings=1, payload=None)
    ledger.take_encode_batch(1)
    ledger.encoded(["hot"], now=0.0)
    assert not ledger.acquire("r1", "cold", size=1, embeddings=1, payload=None)
    assert not ledger.acquire("r2", "hot", size=1, embeddings=1, payload=None)
    assert ledger.release("r0", "hot", now=1.0).free == ("hot",)
    assert ledger.freed(["hot"]).reserved == (("cold", 1),)


def test_a_freeing_entry_is_never_resurrected():
    """E6: the late free would delete the new output. The acquire waits for `freed` and reserves anew."""
    ledger = EncoderLedger(1)
    ledger.acquire("r0", "a", size=1, embeddings=1, payload=None)
    ledger.take_encode_batch(1)
    ledger.encoded(["a"], now=0.0)
    ledger.release("r0", "a", now=0.0)
    assert ledger.evict_idle(now=100.0, idle_seconds=1.0).free == ("a",)
    assert not ledger.acquire("r1", "a", size=1, embeddings=1, payload=None)
    assert ledger.state("a") is State.FREEING
    assert ledger.freed(["a"]).reserved == (("a", 1),)
    assert ledger.state("a") is State.RESERVED


def test_the_table_has_no_way_out_of_absent_but_reserve_and_no_state_without_a_way_to_absent():
    """Read off the table itself: every life begins with a reservation, and every state can end."""
    assert [change for state, change in TRANSITIONS if state is State.ABSENT] == [Change.RESERVE]
    reach = {State.ABSENT}
    for _ in State:
        reach |= {old for (old, _), new in TRANSITIONS.items() if new in reach}
    assert reach == set(State)


def test_a_release_of_what_is_not_held_is_our_bug_and_said_so():
    ledger = EncoderLedger(10)
    ledger.acquire("r", "k", size=1, embeddings=1, payload=None)
    with pytest.raises(AssertionError, match="does not hold"):
        ledger.release("somebody else", "k", now=0.0)
