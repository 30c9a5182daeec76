"""The promises of the encoder ledger, each under its own name, over every order of events that Hypothesis can find."""

from __future__ import annotations

import weakref
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from triolet.core import ledger as ledger_module
from triolet.core.batch_size import BatchSize
from triolet.core.errors import EncodeFailed
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import RESIDENT, TRANSITIONS, Change, State
from triolet.core.ledger_values import Decisions

from ..machines import Machine, bytes_by_state, item

KEYS = ("a", "b", "c", "d")
SIZES = {"a": 1, "b": 2, "c": 3, "d": 9}
EMBEDDINGS = {"a": 1, "b": 3, "c": 2, "d": 1}
IDLE_SECONDS = 10.0


class LedgerMachine(Machine):
    """A ledger, a device that obeys it, and clients who acquire, release and withdraw as they please.

    Safety (no free while held, no use before ready, no phantom, encode once, books balance, every acquire is answered
    at most once, in order, nobody waits while there is room, what failed is tried again) is checked in every state.
    Liveness (every acquire is answered, always freed eventually) is checked in `teardown`. It assumes fairness, and
    only this: the device answers every call it was given, in order; who may read releases at some time; time passes.

    Nobody closes it before its end, so that many things happen to each ledger: see `EarlyCloseMachine`.
    """

    @initialize(capacity=st.integers(1, 6))
    def open(self, capacity: int) -> None:
        self.ledger = EncoderLedger(capacity, BatchSize(8))
        self.places: dict[str, tuple[int, int]] = {}  # of each holder: (order, arrival)
        self.best: dict[str, tuple[int, int]] = {}  # of each entry: of those who have acquired it since nobody held it
        self.holders: dict[str, set[str]] = {}  # of each entry, after the last fact
        self.queue: list[str] = []  # who waited after the last fact
        self.failed_in_batch: set[str] = set()  # keys that are tried again before all others
        self.failures_alone: Counter[str] = Counter()
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
        """What waits to be encoded."""
        return [key for key, (state, _, _) in self.ledger.entries().items() if state is State.RESERVED]

    def obey(self, decisions: Decisions) -> None:
        for hold in decisions.ready:
            self.answered(hold.holder, hold.key)
            self.held[hold.holder] = hold.key
            assert hold.key in self.device, "no phantom: what is offered was computed and is resident"
        for refusal in decisions.refused:
            self.answered(refusal.holder, refusal.key)
        for key, _ in decisions.reserved:
            self.failures_alone[key] = 0
        for key in decisions.free:
            assert key not in self.held.values(), "no free while held: somebody may read what is to be freed"
            assert key in self.device, "books balance: only what is resident is freed"
        if decisions.free:
            self.freeing.append(tuple(decisions.free))
        self.served_in_order()
        self.note_places()

    def served_in_order(self) -> None:
        """Whoever was served by this fact comes before all who wait still."""
        waiting = [hold.holder for hold in self.ledger.waiting()]
        assert waiting == sorted(waiting, key=self.places.__getitem__), "in order: the queue is not"
        here = self.held.keys() | self.open_asks.keys()
        served = [self.places[holder] for holder in self.queue if holder in here and holder not in waiting]
        if served and waiting:
            assert max(served) < self.places[waiting[0]], "in order: somebody was served before one that comes first"
        self.queue = waiting

    def note_places(self) -> None:
        holders = {key: set(names) for key, (_, names, _) in self.ledger.entries().items() if names}
        best = {key: min(self.places[name] for name in names) for key, names in holders.items()}
        for key, names in holders.items():
            if names & self.holders.get(key, set()):
                best[key] = min(best[key], self.best[key])
        self.holders, self.best = holders, best

    def answered(self, holder: str, key: str) -> None:
        assert self.open_asks.pop(holder, None) == key, f"every acquire is answered once, but {holder} did not wait"

    # -- clients -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.closed)
    @rule(key=st.sampled_from(KEYS), order=st.sampled_from((0, 0, 0, 1, -1)))
    def acquire(self, key: str, order: int = 0) -> None:
        holder = f"r{self.names}"
        self.names += 1
        self.open_asks[holder] = key
        self.places[holder] = (order, self.names)
        self.queue.append(holder)
        asked = item(key, size=SIZES[key], embeddings=EMBEDDINGS[key], payload=key)
        self.obey(self.ledger.acquire(holder, asked, order=order))

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
        reserved = sorted(self.reserved, key=self.best.__getitem__)
        jobs = self.ledger.take_encode_batch(budget)
        assert jobs, "every acquire is answered: what is reserved is dispatched, however small the budget"
        embeddings = sum(EMBEDDINGS[job.key] for job in jobs)
        budget = min(budget, self.ledger.batch_size.budget)
        assert len(jobs) == 1 or embeddings <= budget, "an encode batch keeps its budget; a larger item goes alone"
        if not self.failed_in_batch & set(reserved):
            assert [job.key for job in jobs] == reserved[: len(jobs)], "in order: an entry is encoded before its turn"
        self.failed_in_batch -= {job.key for job in jobs}
        for job in jobs:
            assert job.payload == job.key, "what is dispatched has its payload"
        self.encoding.append(tuple(job.key for job in jobs))

    @precondition(lambda self: self.encoding)
    @rule(error=st.sampled_from((None, None, RuntimeError("boom"), MemoryError("full"))))
    def device_answers(self, error: Exception | None) -> None:
        if error is None:
            self.device_encodes()
        else:
            self.device_fails_to_encode(error)

    def device_encodes(self) -> None:
        keys = self.encoding.pop(0)
        for key in keys:
            assert key not in self.device, "encode once: no output is computed while it is resident"
            self.device[key] = SIZES[key]
            self.failures_alone[key] = 0
        self.obey(self.ledger.encoded(keys, now=self.now))

    def device_fails_to_encode(self, error: Exception) -> None:
        keys = self.encoding.pop(0)
        held = [key for key in keys if self.ledger.entries()[key][1]]
        budget = self.ledger.batch_size.budget
        decisions = self.ledger.encode_failed(keys, error)
        assert all(isinstance(refusal.error, EncodeFailed) for refusal in decisions.refused)
        too_large = isinstance(error, MemoryError) and len(keys) > 1
        assert not too_large or decisions.shrunk == self.ledger.batch_size.budget < budget, "what is too large shrinks"
        if len(keys) == 1:
            self.failures_alone[keys[0]] += 1
        given_up = held if len(keys) == 1 and self.failures_alone[keys[0]] > 1 else []
        assert {refusal.key for refusal in decisions.refused} == set(given_up), "tried again: refused too early or late"
        assert decisions.retried == ([] if given_up else list(held)), "tried again: what is held, and not given up"
        self.failed_in_batch |= set() if too_large else set(decisions.retried)
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
        told = self.ledger.statistics().bytes_by_state
        assert told == bytes_by_state(self.ledger), "books balance: the bytes of each state"
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
        """They wait for bytes that are held, in work or on their way back, never for idle ones; the first in line not
        for those either that others wait for."""
        waiting = self.ledger.waiting()
        if not waiting:
            return
        front = waiting[0]
        entries = self.ledger.entries()
        states = {key: state for key, (state, _, _) in entries.items()}
        room = self.ledger.capacity - self.ledger.taken
        if front.key in entries:
            assert states[front.key] is State.FREEING, "nobody waits while there is room: it could be joined"
        else:
            assert room < SIZES[front.key], "nobody waits while there is room"
        freeing = sum(size for state, _, size in entries.values() if state is State.FREEING)
        idle = {key for key, state in states.items() if state is State.IDLE}
        assert not idle or room + freeing >= SIZES[front.key], "nobody waits while there is room: for idle bytes"
        awaited = {hold.key for hold in waiting}
        lacking = sum(SIZES[key] for key in awaited if states.get(key) in {None, State.FREEING})
        assert not idle - awaited or room + freeing >= lacking, "nobody waits while there is room: behind the first"

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


TestEarlyClose = EarlyCloseMachine.TestCase
TestEarlyClose.settings = settings(stateful_step_count=20)


class Rows(dict[tuple[State, Change, bool], State]):
    """The table of transitions, and which of its rows were looked up."""

    def __init__(self) -> None:
        super().__init__(TRANSITIONS)
        self.seen: set[tuple[State, Change, bool]] = set()

    def get(self, row, default=None):
        self.seen.add(row)
        return super().get(row, default)


def test_the_ledger_keeps_every_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples in which a transition never happened would prove nothing of it: a soak must have had each."""
    rows = Rows()
    monkeypatch.setattr(ledger_module, "TRANSITIONS", rows)
    run_state_machine_as_test(LedgerMachine, settings=settings(stateful_step_count=50))
    never = [f"{old.value} {change.value} {held}" for old, change, held in rows.keys() - rows.seen]
    assert settings.get_current_profile_name() != "soak" or not never, f"rows that no example went through: {never}"


def resident(ledger: EncoderLedger, key: str, *, now: float, size: int = 1) -> None:
    """``key`` is encoded for a holder of its own, who leaves at ``now``."""
    ledger.acquire(f"first of {key}", item(key, size=size, payload=key))
    ledger.take_encode_batch(1)
    ledger.encoded([key], now=now)
    ledger.release(f"first of {key}", key, now=now)


def test_those_who_wait_evict_no_more_than_they_need():
    """What is on its way back already counts as room to come, and two who wait for one entry need its room once."""
    ledger = EncoderLedger(3)
    for key in "abc":
        resident(ledger, key, now=0.0)
    assert ledger.acquire("r", item("d")).free == ["a"], "nothing more is evicted"
    assert ledger.acquire("s", item("d")).free == [], "nothing more is evicted"
    assert ledger.acquire("t", item("e")).free == ["b"], "room for each who waits"
    assert ledger.freed("ab").reserved == [("d", 1), ("e", 1)], "room that comes back together serves together"


def test_what_others_wait_for_is_evicted_for_the_first_in_line_only():
    ledger = EncoderLedger(2)
    resident(ledger, "a", now=0.0)
    resident(ledger, "b", now=0.0)
    assert ledger.acquire("q", item("c")).free == ["a"]
    assert not ledger.acquire("r", item("b")).free
    assert not ledger.acquire("s", item("d")).free, "somebody before it waits for b"
    assert ledger.acquire("t", item("e", size=2), order=-1).free == ["b"], "the first has it"


def test_the_entry_that_is_idle_for_the_longest_time_is_evicted_first():
    ledger = EncoderLedger(3)
    for now, key in enumerate("bca"):
        resident(ledger, key, now=float(now))
    freed = ledger.acquire("r", item("d", size=2)).free
    assert freed == ["b", "c"], "the oldest go first"


def test_an_idle_entry_is_kept_for_its_time_since_its_last_use():
    ledger = EncoderLedger(3)
    resident(ledger, "a", now=1.0)
    ledger.acquire("r", item("a"))
    ledger.release("r", "a", now=50.0)
    assert not ledger.evict_idle(now=55.0, idle_seconds=10.0).free, "its time runs from the last use"
    assert ledger.evict_idle(now=60.0, idle_seconds=10.0).free == ["a"], "when its time is over it goes"


def test_an_entry_that_nobody_wants_keeps_no_payload():
    """R4: the samples of an audio window are two megabytes; they die with the last request that wants them encoded."""

    class Payload:
        pass

    ledger, payload = EncoderLedger(3), Payload()
    watched = weakref.ref(payload)
    ledger.acquire("r", item("a", payload=payload))
    del payload
    ledger.take_encode_batch(1)
    ledger.encoded(["a"], now=0.0)
    ledger.release("r", "a", now=0.0)
    assert watched() is None, "an idle entry keeps its payload"


def test_every_holder_gets_an_error_of_its_own_with_the_cause():
    """Two tasks must not raise the same object."""
    ledger, error, refused = EncoderLedger(3), RuntimeError("boom"), []
    for holder in ("r", "s"):
        ledger.acquire(holder, item("a", payload="a"))
    while not refused:
        assert ledger.take_encode_batch(1)
        refused = ledger.encode_failed(["a"], error).refused
    assert [refusal.holder for refusal in refused] == ["r", "s"]
    assert refused[0].error is not refused[1].error
    assert all(
        type(one.error) is EncodeFailed and one.error.__cause__ is error and "boom" in str(one.error) for one in refused
    )
