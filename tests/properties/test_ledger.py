"""The promises of the encoder ledger, each under its own name, over every order of events that Hypothesis can find."""

from __future__ import annotations

import math
import weakref

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from triolet.core.errors import EncodeFailed, RequestTooLarge
from triolet.core.ledger import TRANSITIONS, Change, Decisions, EncoderLedger, State

from .machines import Machine

KEYS = ("a", "b", "c", "d")
SIZES = {"a": 1, "b": 2, "c": 3, "d": 9}
EMBEDDINGS = {"a": 1, "b": 3, "c": 2, "d": 1}
RESIDENT = {State.READY, State.IDLE, State.FREEING}
IDLE_SECONDS = 10.0


class LedgerMachine(Machine):
    """A ledger, a device that obeys it, and clients who acquire, release and withdraw as they please.

    Safety (no free while held, no use before ready, no phantom, encode once, books balance, every acquire is answered
    at most once, nobody waits while there is room) is checked in every state. Liveness (every acquire is answered,
    always freed eventually) is checked in `teardown`. It assumes fairness, and only this: the device answers every call
    it was given, in order; who may read releases at some time; time passes.

    Nobody closes it before its end, so that many things happen to each ledger: see `EarlyCloseMachine`.
    """

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

    @property
    def reserved(self) -> list[str]:
        """What waits to be dispatched."""
        return [key for key, (state, _, _) in self.ledger.entries().items() if state is State.RESERVED]

    def obey(self, decisions: Decisions) -> None:
        for hold in decisions.ready:
            self.answered(hold.holder, hold.key)
            self.held[hold.holder] = hold.key
            assert hold.key in self.device, "no phantom: what is offered was computed and is resident"
        for refusal in decisions.refused:
            self.answered(refusal.holder, refusal.key)
        for key in decisions.free:
            assert key not in self.held.values(), "no free while held: somebody may read what is to be freed"
            assert key in self.device, "books balance: only what is resident is freed"
        if decisions.free:
            self.freeing.append(decisions.free)

    def answered(self, holder: str, key: str) -> None:
        assert self.open_asks.pop(holder, None) == key, f"every acquire is answered once, but {holder} did not wait"

    # -- clients -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.closed)
    @rule(key=st.sampled_from(KEYS))
    def acquire(self, key: str) -> None:
        holder = f"r{self.names}"
        self.names += 1
        self.open_asks[holder] = key
        self.obey(self.ledger.acquire(holder, key, size=SIZES[key], embeddings=EMBEDDINGS[key], payload=key))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.leave(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.open_asks)
    @rule(data=st.data(), really=st.sampled_from((False, False, True)))
    def withdraw(self, data: st.DataObject, really: bool) -> None:
        if really:
            self.leave(data.draw(st.sampled_from(sorted(self.open_asks))))

    def leave(self, holder: str) -> None:
        """A holder releases what it reads, or withdraws what it waits for."""
        key = self.held.pop(holder, None) or self.open_asks.pop(holder)
        assert self.ledger.holds(holder, key), f"every acquire is answered: the ledger has forgotten {holder}"
        self.obey(self.ledger.release(holder, key, now=self.now))

    # -- the device --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.reserved)
    @rule(budget=st.integers(1, 4))
    def dispatch(self, budget: int) -> None:
        jobs = self.ledger.take_encode_batch(budget)
        assert jobs, "every acquire is answered: what is reserved is dispatched, however small the budget"
        embeddings = sum(EMBEDDINGS[job.key] for job in jobs)
        assert len(jobs) == 1 or embeddings <= budget, "an encode batch keeps its budget; a larger item goes alone"
        for job in jobs:
            assert job.payload == job.key, "what is dispatched has its payload"
        self.encoding.append(tuple(job.key for job in jobs))

    @precondition(lambda self: self.encoding)
    @rule(well=st.sampled_from((True, True, False)))
    def device_answers(self, well: bool) -> None:
        if well:
            self.device_encodes()
        else:
            self.device_fails_to_encode()

    def device_encodes(self) -> None:
        keys = self.encoding.pop(0)
        for key in keys:
            assert key not in self.device, "encode once: no output is computed while it is resident"
            self.device[key] = SIZES[key]
        self.obey(self.ledger.encoded(keys, now=self.now))
        if self.closed:  # as the actor does: what comes after the close is not kept
            self.obey(self.ledger.evict_idle(now=math.inf, idle_seconds=0.0))

    def device_fails_to_encode(self) -> None:
        decisions = self.ledger.encode_failed(self.encoding.pop(0), RuntimeError("boom"))
        assert all(isinstance(refusal.error, EncodeFailed) for refusal in decisions.refused)
        self.obey(decisions)

    @precondition(lambda self: self.freeing)
    @rule()
    def device_frees(self) -> None:
        keys = self.freeing.pop(0)
        for key in keys:
            del self.device[key]
        self.obey(self.ledger.freed(keys))

    @precondition(lambda self: self.device or self.encoding)
    @rule(really=st.sampled_from((False, False, True)))
    def device_is_lost(self, really: bool) -> None:
        """A new runner generation: everything computed is gone, calls in flight will not be answered."""
        if not really:
            return
        self.device.clear()
        self.encoding.clear()
        self.freeing.clear()
        self.open_asks |= self.held
        self.held.clear()
        self.obey(self.ledger.generation_lost())

    # -- time --------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.closed or self.ledger.oldest_idle is not None)
    @rule(seconds=st.sampled_from((0.0, 1.0, 9.0, 10.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.ledger.evict_idle(now=self.now, idle_seconds=IDLE_SECONDS))
        oldest = self.ledger.oldest_idle
        assert oldest is None or oldest + IDLE_SECONDS > self.now, "always freed eventually: its idle time is over"

    def close(self) -> None:
        """No rule here: the end comes with `teardown`."""
        self.closed = True
        self.open_asks.clear()
        self.held.clear()
        self.obey(self.ledger.close(now=self.now))

    # -- safety ------------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        """Reserved, resident and freeing bytes are the sum of the entries, within capacity, and what is resident is
        what the device holds."""
        entries = self.ledger.entries()
        assert self.ledger.taken == sum(size for _, _, size in entries.values()), "books balance: bytes of no entry"
        assert 0 <= self.ledger.taken <= self.ledger.capacity, "books balance: over capacity"
        resident = {key: size for key, (state, _, size) in entries.items() if state in RESIDENT}
        assert resident == self.device, "books balance: the device holds what the ledger says"

    @invariant()
    def every_acquire_is_answered(self) -> None:
        """Or still open: nobody who waits or reads is forgotten, nobody who has left is remembered."""
        known = {hold.holder: hold.key for hold in self.ledger.holds_and_waits()}
        assert known == self.open_asks | self.held, "every acquire is answered: the ledger knows who waits and reads"

    @invariant()
    def no_free_while_held(self) -> None:
        """Nor the other way round: what is on its way out is handed to nobody."""
        leaving = {key for keys in self.freeing for key in keys}
        assert leaving.isdisjoint(self.held.values()), "no free while held: somebody reads what is being freed"

    @invariant()
    def no_use_before_ready(self) -> None:
        """Whoever was told to read can read now."""
        entries = self.ledger.entries()
        for holder, key in self.held.items():
            state, holders, _ = entries[key]
            assert state is State.READY, f"no use before ready: {holder} reads what is {state.value}"
            assert holder in holders, f"no use before ready: {holder} reads what it does not hold"

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        """The front of the queue waits for bytes that are held, in work or on their way back, never for idle ones."""
        waiting = self.ledger.waiting()
        if not waiting:
            return
        front = waiting[0]
        entries = self.ledger.entries()
        if front.key in entries:
            assert entries[front.key][0] is State.FREEING, "nobody waits while there is room: it could be joined"
            return
        idle = [key for key, (state, _, _) in entries.items() if state is State.IDLE]
        freeing = sum(size for state, _, size in entries.values() if state is State.FREEING)
        room = self.ledger.capacity - self.ledger.taken
        assert room < SIZES[front.key], "nobody waits while there is room"
        assert not idle or room + freeing >= SIZES[front.key], "nobody waits while there is room: for idle bytes"

    # -- liveness ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Every acquire is answered and always freed eventually, given the fairness that the class assumes."""
        if self.failed:
            return
        self.everybody_goes_on()
        assert not self.open_asks, f"every acquire is answered: {self.open_asks} wait for ever"
        if not self.closed:
            self.time_passes(IDLE_SECONDS)
            self.everybody_goes_on()
            assert not self.device, f"always freed eventually: {self.device} outlive their idle time"
            self.close()
        assert self.ledger.drained, f"always freed eventually: {self.ledger.entries()} are left after the close"
        assert self.ledger.taken == 0, f"books balance: {self.ledger.taken} bytes are taken by nobody"
        assert not self.device, f"always freed eventually: {self.device} are left on the device"

    def everybody_goes_on(self) -> None:
        """The device answers and readers leave, until there is nothing to answer and nobody reads."""
        for _ in range(1000):
            if not (self.reserved or self.encoding or self.freeing or self.held):
                return
            if self.reserved:
                self.dispatch(3)
            if self.encoding:
                self.device_encodes()
            if self.freeing:
                self.device_frees()
            for holder in list(self.held):
                self.leave(holder)


class EarlyCloseMachine(LedgerMachine):
    """The same promises where the close may come at any time, whatever is going on."""

    @precondition(lambda self: not self.closed)
    @rule(really=st.sampled_from((False, False, True)))
    def close_at_any_time(self, really: bool) -> None:
        if really:
            self.close()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(stateful_step_count=50)
TestEarlyClose = EarlyCloseMachine.TestCase
TestEarlyClose.settings = settings(stateful_step_count=20)


def resident(ledger: EncoderLedger, key: str, *, now: float, size: int = 1) -> None:
    """``key`` is encoded for a holder of its own, who leaves at ``now``."""
    ledger.acquire(f"first of {key}", key, size=size, embeddings=1, payload=key)
    ledger.take_encode_batch(1)
    ledger.encoded([key], now=now)
    ledger.release(f"first of {key}", key, now=now)


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


def test_an_item_that_just_fits_is_not_refused():
    decisions = EncoderLedger(100).acquire("r", "k", size=100, embeddings=1, payload=None)
    assert decisions.reserved == (("k", 100),), "an item as large as the cache fits it"


def test_a_waiting_request_evicts_no_more_than_it_needs():
    """What is on its way back already counts as room to come."""
    ledger = EncoderLedger(3)
    for key in "abc":
        resident(ledger, key, now=0.0)
    assert ledger.acquire("r", "d", size=1, embeddings=1, payload=None).free == ("a",)
    again = ledger.acquire("s", "e", size=1, embeddings=1, payload=None)
    assert again.free == (), "nothing more is evicted for the one that waits in front"


def test_the_entry_that_is_idle_for_the_longest_time_is_evicted_first():
    ledger = EncoderLedger(3)
    for now, key in enumerate("bca"):
        resident(ledger, key, now=float(now))
    freed = ledger.acquire("r", "d", size=2, embeddings=1, payload=None).free
    assert freed == ("b", "c"), "the oldest go first"


def test_an_idle_entry_is_kept_for_its_time_since_its_last_use():
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=1.0)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=None)
    ledger.release("r", "a", now=50.0)
    assert not ledger.evict_idle(now=55.0, idle_seconds=10.0).free, "its time runs from the last use"
    assert ledger.evict_idle(now=60.0, idle_seconds=10.0).free == ("a",), "when its time is over it goes"


def test_an_encode_batch_keeps_its_budget_of_embeddings():
    ledger = EncoderLedger(100)
    for key, embeddings in (("a", 10), ("b", 10), ("c", 10), ("d", 40), ("e", 1)):
        ledger.acquire("r" + key, key, size=1, embeddings=embeddings, payload=None)
    batches = [[job.key for job in ledger.take_encode_batch(25)] for _ in range(4)]
    assert batches == [["a", "b"], ["c"], ["d"], ["e"]], "up to 25 embeddings a batch; a larger item goes alone"


def test_an_entry_that_nobody_wants_keeps_no_payload():
    """R4: the samples of an audio window are two megabytes; they die with the last request that wants them encoded."""

    class Payload:
        pass

    ledger, payload = EncoderLedger(3), Payload()
    watched = weakref.ref(payload)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=payload)
    del payload
    ledger.take_encode_batch(1)
    ledger.encoded(["a"], now=0.0)
    ledger.release("r", "a", now=0.0)
    assert watched() is None, "an idle entry keeps its payload"


def test_every_holder_hears_of_a_failed_encoding():
    ledger = EncoderLedger(3)
    for holder in ("r", "s"):
        ledger.acquire(holder, "a", size=1, embeddings=1, payload="a")
    ledger.take_encode_batch(1)
    refused = ledger.encode_failed(["a"], RuntimeError("boom")).refused
    assert [refusal.holder for refusal in refused] == ["r", "s"], "every acquire is answered"
    assert refused[0].error is not refused[1].error, "two tasks must not raise the same error"


def test_an_entry_that_was_idle_can_be_encoded_again_for_who_joins_it():
    """It kept no payload while nobody wanted it: the one who joins brings it back, for a runner that loses all."""
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=0.0)
    ledger.acquire("r", "a", size=1, embeddings=1, payload="the payload")
    ledger.generation_lost()
    (job,) = ledger.take_encode_batch(1)
    assert job.payload == "the payload", "what is dispatched has its payload"


def test_an_output_that_nobody_waits_for_any_more_is_idle():
    """Always freed eventually: its last holder left while it was computed, and nobody will leave it again."""
    ledger = EncoderLedger(3)
    ledger.acquire("r", "a", size=1, embeddings=1, payload="a")
    ledger.take_encode_batch(1)
    ledger.release("r", "a", now=0.0)
    ledger.encoded(["a"], now=0.0)
    assert ledger.state("a") is State.IDLE, "what nobody holds is idle"


def test_what_is_idle_at_the_close_is_freed():
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=0.0)
    assert ledger.close(now=1.0).free == ("a",), "always freed eventually: at the close, if not before"


def test_who_waits_at_the_close_is_withdrawn():
    """Always freed eventually: what is given back after the close is not taken anew."""
    ledger = EncoderLedger(1)
    ledger.acquire("r", "a", size=1, embeddings=1, payload=None)
    ledger.take_encode_batch(1)
    ledger.acquire("s", "b", size=1, embeddings=1, payload=None)
    ledger.close(now=0.0)
    ledger.encoded(["a"], now=0.0)
    freed = ledger.evict_idle(now=math.inf, idle_seconds=0.0).free or ("a",)
    assert not ledger.freed(freed).reserved, "nothing is reserved after the close"
    assert ledger.drained
