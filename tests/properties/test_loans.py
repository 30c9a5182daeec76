"""A lender and its borrowers, with a network between them that delivers in any order, and engines that are lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis.strategies as st
from attrs import define, field, frozen
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import RESIDENT, State
from triolet.core.ledger_values import Decisions, Hold

from .machines import Machine, item

KEYS = {"a": 1, "b": 2, "c": 3}  # and their sizes
BORROWERS = ("x", "y")
IDLE_SECONDS, LOAN_SECONDS = 10.0, 5.0


@define(eq=False)
class Side:
    """One engine: its ledger, a device that obeys it, its holders. ``lend`` is told of what is ready for borrowers."""

    ledger: EncoderLedger
    lend: Callable[[Hold], None] = lambda _: None
    refuse: Callable[[Hold, Exception], None] = lambda *_: None
    device: dict[str, int] = field(factory=dict)
    encoding: list[tuple[str, ...]] = field(factory=list)
    freeing: list[tuple[str, ...]] = field(factory=list)
    asks: dict[str, str] = field(factory=dict)  # of here, not answered
    held: dict[str, str] = field(factory=dict)
    loans: dict[str, str] = field(factory=dict)  # ready, and not back as far as is known here
    encoded: Counter[str] = field(factory=Counter)

    def acquire(self, holder: str, key: str, now: float, *, loan: bool = False) -> None:
        if not loan:
            self.asks[holder] = key
        self.obey(self.ledger.acquire(holder, item(key, size=KEYS[key], payload=key), loan=loan, now=now))

    def obey(self, decisions: Decisions) -> None:
        for hold in decisions.lapsed:
            del self.loans[hold.holder]
        for hold in decisions.ready:
            assert hold.key in self.device, "no phantom"
            if hold.holder in self.asks:
                self.held[hold.holder] = self.asks.pop(hold.holder)
            else:
                self.loans[hold.holder] = hold.key
                self.lend(hold)
        for refusal in decisions.refused:
            if self.asks.pop(refusal.holder, None) is None:
                self.refuse(Hold(refusal.holder, refusal.key), refusal.error)
        for key in decisions.free:
            assert key not in self.held.values(), "no free while held"
            assert key not in self.loans.values(), "no free while lent"
        if decisions.free:
            self.freeing.append(tuple(decisions.free))

    def release(self, holder: str, now: float) -> None:
        key = self.held.pop(holder, None) or self.loans.pop(holder)
        self.obey(self.ledger.release(holder, key, now=now))

    def put_in(self, key: str) -> None:
        assert key not in self.device, "encode once: it is resident already"
        self.device[key] = KEYS[key]

    def works(self, now: float) -> bool:
        """The device does one thing of each kind, if it has any to do."""
        busy = False
        if jobs := self.ledger.take_encode_batch(2):
            self.encoding.append(tuple(job.key for job in jobs))
        if self.encoding:
            busy, keys = True, self.encoding.pop(0)
            for key in keys:
                self.put_in(key)
                self.encoded[key] += 1
            self.obey(self.ledger.encoded(keys, now=now))
        if self.freeing:
            busy, keys = True, self.freeing.pop(0)
            for key in keys:
                del self.device[key]
            self.obey(self.ledger.freed(keys, now=now))
        return busy


@frozen
class Flight:
    """Something on the network about a loan: "ask", "lent", "refused" or "returned"."""

    what: str
    loan: str
    key: str
    error: Exception | None = None


class LoansMachine(Machine):
    """Safety in every state, on both sides: no free while held or lent, no phantom, books balance, encode once.
    Liveness in `teardown`: every acquire is answered, and always freed eventually, whoever was lost on the way.

    Fairness: devices answer, the network delivers, or tells that the other end is lost; holders of here release.
    """

    @initialize(capacities=st.tuples(*[st.integers(2, 5)] * 3), encode=st.booleans())
    def open(self, capacities: tuple[int, ...], encode: bool) -> None:
        self.capacities, self.encode = capacities, encode
        self.now, self.names = 0.0, 0
        self.flights: list[Flight] = []
        self.asked: dict[str, tuple[str, str]] = {}  # loan -> borrower and key, as long as the borrower waits for it
        self.may_encode: set[tuple[str, str]] = set()  # borrowers, and keys that a lender did not give them
        self.lender = self.new_lender()
        self.borrowers = {name: self.new_borrower(index) for index, name in enumerate(BORROWERS)}

    def new_lender(self) -> Side:
        return Side(EncoderLedger(self.capacities[2]), self.lends, self.refuses)

    def new_borrower(self, index: int) -> Side:
        return Side(EncoderLedger(self.capacities[index], borrows=True, encodes=self.encode))

    def lends(self, hold: Hold) -> None:
        self.flights.append(Flight("lent", hold.holder, hold.key))

    def refuses(self, hold: Hold, error: Exception) -> None:
        self.flights.append(Flight("refused", hold.holder, hold.key, error))

    def name(self, prefix: str) -> str:
        self.names += 1
        return f"{prefix}{self.names}"

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.lender, *self.borrowers.values())

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(where=st.sampled_from((*BORROWERS, *BORROWERS, "lender")), key=st.sampled_from(sorted(KEYS)))
    def acquire(self, where: str, key: str) -> None:
        side = self.lender if where == "lender" else self.borrowers[where]
        side.acquire(self.name("r"), key, self.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if readers := [(side, holder) for side in self.sides for holder in side.held]:
            side, holder = data.draw(st.sampled_from(readers))
            side.release(holder, self.now)

    @rule(which=st.integers(0, 2))
    def device_works(self, which: int) -> None:
        before = self.sides[which].encoded.copy()
        self.sides[which].works(self.now)
        for key in self.sides[which].encoded - before:
            allowed = which == 0 or (BORROWERS[which - 1], key) in self.may_encode
            assert allowed, "encode once: a borrower encodes what a lender would have given it"

    @rule(borrower=st.sampled_from(BORROWERS))
    def borrow(self, borrower: str) -> None:
        for job in self.borrowers[borrower].ledger.take_borrows():
            loan = self.name("loan")
            self.asked[loan] = (borrower, job.key)
            self.flights.append(Flight("ask", loan, job.key))

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def arrives(self, data: st.DataObject) -> None:
        self.deliver(data.draw(st.sampled_from(self.flights)))

    def deliver(self, flight: Flight) -> None:
        self.flights.remove(flight)
        match flight.what:
            case "ask":
                self.lender.acquire(flight.loan, flight.key, self.now, loan=True)
            case "returned":
                if flight.loan in self.lender.loans:  # else its term is over
                    self.lender.release(flight.loan, self.now)
            case "lent":
                self.flights.append(Flight("returned", flight.loan, flight.key))
                if flight.loan in self.asked:
                    borrower, key = self.asked.pop(flight.loan)
                    self.may_encode.discard((borrower, key))
                    self.borrowers[borrower].put_in(key)
                    self.borrowers[borrower].obey(self.borrowers[borrower].ledger.borrowed(key, now=self.now))
            case "refused":
                assert flight.error is not None
                self.fails(flight.loan, flight.error)

    def fails(self, loan: str, error: Exception) -> None:
        if loan not in self.asked:
            return
        borrower, key = self.asked.pop(loan)
        self.may_encode.add((borrower, key))
        self.borrowers[borrower].obey(self.borrowers[borrower].ledger.borrow_failed(key, error))

    @rule(really=st.sampled_from((False, False, True)))
    def lender_is_lost(self, really: bool) -> None:
        if really:
            self.lender = self.new_lender()
            self.flights.clear()
            for loan in list(self.asked):
                self.fails(loan, RuntimeError("the lender is lost"))

    @rule(really=st.sampled_from((False, False, True)), which=st.integers(0, 1))
    def borrower_is_lost(self, really: bool, which: int) -> None:
        """Its messages may be lost, or arrive late: those that are under way stay there."""
        if really:
            self.borrowers[BORROWERS[which]] = self.new_borrower(which)
            for loan in [loan for loan, (name, _) in self.asked.items() if name == BORROWERS[which]]:
                del self.asked[loan]
                self.flights = [one for one in self.flights if one.loan != loan or one.what == "ask"]

    @rule(seconds=st.sampled_from((1.0, 4.0, 10.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides:
            side.obey(side.ledger.end_loans(now=self.now, loan_seconds=LOAN_SECONDS))
            side.obey(side.ledger.evict_idle(now=self.now, idle_seconds=IDLE_SECONDS))

    # -- safety ------------------------------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        for side in self.sides:
            entries = side.ledger.entries()
            assert side.ledger.taken == sum(size for _, _, size in entries.values()), "books balance: bytes of no entry"
            assert side.ledger.taken <= side.ledger.capacity, "books balance: over capacity"
            resident = {key: size for key, (state, _, size) in entries.items() if state in RESIDENT}
            assert resident == side.device, "books balance: the device holds what the ledger says"

    @invariant()
    def what_is_on_its_way_has_its_bytes_on_both_sides(self) -> None:
        for borrower, key in self.asked.values():
            assert self.borrowers[borrower].ledger.state(key) is State.BORROWING, "books balance: not reserved for it"
        for key in self.lender.loans.values():
            assert self.lender.ledger.state(key) in {State.READY, State.LENT}, "no free while lent"

    # -- liveness ----------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.failed:
            return
        self.everybody_goes_on()
        assert not any(side.asks for side in self.sides), "every acquire is answered"
        self.time_passes(IDLE_SECONDS)
        self.everybody_goes_on()
        assert not any(side.device for side in self.sides), "always freed eventually"
        assert not any(side.ledger.taken for side in self.sides), "books balance"

    def everybody_goes_on(self) -> None:
        for _ in range(300):
            busy = [side.works(self.now) for side in self.sides]
            for name in BORROWERS:
                self.borrow(name)
            busy.append(bool(self.flights))
            while self.flights:
                self.deliver(self.flights[0])
            for side in self.sides:
                for holder in list(side.held):
                    busy.append(True)
                    side.release(holder, self.now)
            if not any(busy):
                if not self.lender.loans:
                    return
                self.time_passes(LOAN_SECONDS)  # of borrowers that were lost


TestLoans = LoansMachine.TestCase
TestLoans.settings = settings(stateful_step_count=50)
