"""Which models are loaded: never over budget, none taken from its users, everybody answered once and in order, nobody
kept out for ever."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
from attrs import define, field
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule

from triolet.core.residency import Decision, Grant, Load, ModelState, Refuse, Residency, Size, Unload

from ..machines import Machine

NAMES = ("a", "b", "c", "d")
IDLE, RETRY = 5.0, 2.0
ROOM, OVERDRAWN = " needs the room", "what was loaded"
NUMBERS = st.integers(0, 99)


@define(eq=False)
class Ward:
    """Carries decisions out, and keeps books of its own beside them."""

    residency: Residency
    sizes: dict[str, int]  # what each model is thought to need
    now: float = 0.0
    waiting: dict[int, str] = field(factory=dict)  # uses by ticket
    using: dict[int, str] = field(factory=dict)
    orders: dict[int, str] = field(factory=dict)
    sizing: set[str] = field(factory=set)
    loading: set[str] = field(factory=set)
    ready: set[str] = field(factory=set)
    leaving: set[str] = field(factory=set)
    held: dict[str, int] = field(factory=dict)
    known: dict[str, int] = field(factory=dict)  # bytes, as far as was told
    used_at: dict[str, int] = field(factory=dict)  # a count of grants and ends
    idle_since: dict[str, float] = field(factory=dict)
    grown: bool = False  # a model holds more than was thought
    closing: bool = False
    answers: dict[int, str] = field(factory=dict)
    failed_at: dict[str, float] = field(factory=dict)
    turns: dict[int, set[str]] = field(factory=dict)  # by waiting ticket: models that were loaded while its own was not
    _count: int = 0

    @property
    def budget(self) -> float:
        return math.inf if self.residency.budget is None else self.residency.budget

    @property
    def total(self) -> int:
        return sum(self.held.values())

    def touch(self, name: str) -> None:
        self._count += 1
        self.used_at[name] = self._count

    # -- facts -------------------------------------------------------------------------------------------------------

    def want(self, name: str, *, at_once: bool = False) -> int:
        ticket = self.residency.want(name, at_once=at_once)
        self.waiting[ticket], self.turns[ticket] = name, set()
        if at_once:
            self.failed_at.pop(name, None)
        early = name in self.absent and self.now < self.failed_at.get(name, -math.inf) + RETRY
        self.follow()
        assert early or self.closing or self.answers.get(ticket) in {None, "granted"}, "refused for nothing"
        assert not early or self.answers.get(ticket) == "refused", "a use after a failure"
        return ticket

    def order(self, name: str) -> None:
        self.orders[self.residency.order_unload(name)] = name
        self.follow()

    def end(self, ticket: int) -> None:
        name = self.using.pop(ticket, None)
        self.waiting.pop(ticket, None)
        self.orders.pop(ticket, None)
        if name is not None and name in self.ready:
            self.idle_since[name] = self.now
            if name in self.idle:
                self.touch(name)
        self.residency.end(ticket, self.now)
        self.follow()

    def answer_size(self, name: str, works: bool) -> None:
        self.sizing.discard(name)
        if works:
            self.known[name] = self.sizes[name]
            self.residency.sized(name, self.sizes[name])
            self.follow()
        else:
            self.fail(name)

    def fail(self, name: str) -> None:
        """Whoever waits hears of it."""
        waited = [ticket for ticket, its in self.waiting.items() if its == name]
        self.failed_at[name] = self.now
        self.residency.failed(name, self.now)
        self.follow()
        assert all(self.answers.get(ticket) == "refused" for ticket in waited), "a failure that nobody hears of"

    def answer_load(self, name: str, works: bool, more: int = 0) -> None:
        self.loading.discard(name)
        if works:
            held = min(max(0, self.sizes[name] + more), self.residency.budget or 10**6)
            self.grown |= held > self.held[name]
            self.held[name] = self.known[name] = held
            self.ready.add(name)
            self.touch(name)
            self.idle_since[name] = self.now
            self.failed_at.pop(name, None)
            self.residency.opened(name, held, self.now)
            wanted, ordered = name in self.waiting.values(), name in self.orders.values()
            self.follow()
            assert ordered or self.closing or name not in self.waiting.values(), "a turn that does not serve all"
            assert wanted or name in self.leaving, "nobody waits for it, and it stays"
        else:
            del self.held[name]
            self.known.pop(name, None)
            self.fail(name)

    def crash(self, name: str) -> None:
        """The engine fails; its users are nobody's any more."""
        self.ready.discard(name)
        self.leaving.add(name)
        self.using = {ticket: used for ticket, used in self.using.items() if used != name}
        self.residency.leaving(name)
        self.follow()

    def gone(self, name: str) -> None:
        self.leaving.discard(name)
        del self.held[name]
        self.residency.closed(name)
        self.follow()

    def close(self) -> None:
        self.closing = True
        self.residency.close()
        self.follow()

    # -- decisions ---------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        decisions, left_before = self.residency.decide(self.now), set(self.leaving)
        for decision in decisions:
            self._carry_out(decision)
        self._check_victims([one for one in decisions if isinstance(one, Unload)], left_before)
        assert self.residency.decide(self.now) == (), "it had not decided all that follows"
        for name in NAMES:
            self._check_figures(name)
        assert self.total == self.residency.held, "the bytes differ from the books"

    def _carry_out(self, decision: Decision) -> None:
        match decision:
            case Grant(ticket) if ticket in self.orders:
                name = self.orders.pop(ticket)
                assert not {name} & (self.loading | self.ready | self.leaving), "an order is answered while it is there"
                self._answer(ticket, "gone")
            case Grant(ticket):
                name = self.waiting.pop(ticket)
                assert name in self.ready, "a use begins without an engine"
                assert all(ticket < other for other, its in self.waiting.items() if its == name), "out of order"
                assert all(ticket < other for other, its in self.orders.items() if its == name), "it is to go"
                self.using[ticket] = name
                self.touch(name)
                self._answer(ticket, "granted")
            case Refuse(ticket):
                del self.waiting[ticket]
                self._answer(ticket, "refused")
            case Size(name):
                assert self.residency.budget is not None, "nobody needs to know"
                assert name in self.absent - self.known.keys(), "known already"
                self.sizing.add(name)
            case Load(name):
                self._load(name)
            case Unload(name, why):
                self._unload(name, why)

    def _answer(self, ticket: int, answer: str) -> None:
        assert ticket not in self.answers, "answered twice"
        self.answers[ticket] = answer

    def _load(self, name: str) -> None:
        assert not {name} & (self.sizing | self.loading | self.ready | self.leaving), "loaded twice"
        assert self.residency.budget is None or name in self.known, "nobody knows how large it is"
        needs = self.known.get(name, 0)
        assert self.total + needs <= self.budget, "over budget"
        mine = [ticket for ticket, its in self.waiting.items() if its == name]
        for other in self.absent:
            earlier = [ticket for ticket, its in self.waiting.items() if its == other and ticket < min(mine)]
            assert not earlier or other not in self.known, f"{other} waits for longer"
        ordered = set(self.orders.values())  # whose waiting uses do not all begin when it is opened
        for ticket, its in self.waiting.items():
            if its in self.absent & self.known.keys() and name not in ordered:
                assert name not in self.turns[ticket], f"{ticket} waits for a second turn of {name}"
                self.turns[ticket].add(name)
        self.loading.add(name)
        self.held[name] = needs

    def _unload(self, name: str, why: str) -> None:
        assert name in self.ready, "what is not there is unloaded"
        if not self.closing:
            assert name not in self.using.values(), "taken from its users"
        if why.startswith("idle"):
            assert self.now >= self.idle_since[name] + IDLE, "it had more time"
            assert name not in self.waiting.values(), "somebody waits for it"
        self.ready.discard(name)
        self.leaving.add(name)

    def _check_victims(self, unloads: list[Unload], left_before: set[str]) -> None:
        """Who makes room: as few as are needed, and those that were not used for longest."""
        rooms = [one for one in unloads if one.why.endswith(ROOM)]
        if not rooms:
            return
        heads = {one.why.removesuffix(ROOM) for one in rooms}
        assert len(heads) == 1, "two at once have others give way"
        needs = 0 if heads == {OVERDRAWN} else self.known[heads.pop()]
        lacking = needs - (self.budget - self.total) - sum(self.held[name] for name in left_before)
        victims = {one.name for one in rooms}
        together = sum(self.held[name] for name in victims)
        assert together >= lacking, "they give way for nothing"
        for victim in victims:
            assert together - self.held[victim] < lacking, f"{victim} gives way for nothing"
            for other in self.idle:
                older = self.used_at[other] < self.used_at[victim] and self.held[other] >= self.held[victim]
                assert not older, f"{victim} gives way, and {other} was not used for longer"

    def _check_figures(self, name: str) -> None:
        model = self.residency.models[name]
        assert len(model.users) == list(self.using.values()).count(name)
        assert len(model.waiting) == list(self.waiting.values()).count(name)
        assert model.held == self.held.get(name, 0)
        found = {
            ModelState.LOADING: self.loading | self.sizing,
            ModelState.READY: self.ready,
            ModelState.UNLOADING: self.leaving,
        }.get(model.state)
        assert (name in self.absent) if found is None else (name in found), f"{name} is {model.state}"

    @property
    def absent(self) -> set[str]:
        return set(NAMES) - self.sizing - self.loading - self.ready - self.leaving

    @property
    def idle(self) -> set[str]:
        return self.ready - set(self.using.values())

    @property
    def under_way(self) -> set[str]:
        return self.sizing | self.loading | self.leaving


class ResidencyMachine(Machine):
    """Uses come and go as they like; models are sized, loaded and unloaded, or fail, when they like."""

    ward: Ward
    two_fit = False  # of models that are all equally large

    @initialize(
        budget=st.one_of(st.none(), st.integers(3, 10)),
        sizes=st.lists(st.integers(0, 10), min_size=4, max_size=4),
        idle=st.sampled_from([IDLE, math.inf]),
    )
    def begin(self, budget: int | None, sizes: list[int], idle: float) -> None:
        if self.two_fit:
            budget, sizes = 4, [2, 2, 2, 2]
        residency = Residency(NAMES, budget, idle, RETRY)
        most = 10 if budget is None else budget
        self.ward = Ward(residency, {name: min(size, most) for name, size in zip(NAMES, sizes, strict=True)})
        for name in NAMES[:2] if self.two_fit else ():
            self.ward.want(name)
            self.ward.answer_size(name, works=True)
            self.ward.answer_load(name, works=True)

    def pick(self, found: Any, number: int) -> Any:
        return sorted(found)[number % len(found)]

    # -- users -------------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), at_once=st.sampled_from([False, False, False, True]))
    def want(self, name: str, at_once: bool) -> None:
        self.ward.want(name, at_once=at_once)

    @precondition(lambda self: self.ward.using)
    @rule(number=NUMBERS)
    def end(self, number: int) -> None:
        self.ward.end(self.pick(self.ward.using, number))

    @precondition(lambda self: self.ward.waiting)
    @rule(number=NUMBERS)
    def withdraw(self, number: int) -> None:
        self.ward.end(self.pick(self.ward.waiting, number))

    @rule(name=st.sampled_from(NAMES))
    def order(self, name: str) -> None:
        self.ward.order(name)

    @precondition(lambda self: self.ward.orders)
    @rule(number=NUMBERS)
    def withdraw_order(self, number: int) -> None:
        self.ward.end(self.pick(self.ward.orders, number))

    # -- models ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.ward.sizing)
    @rule(number=NUMBERS, works=st.sampled_from([True, True, True, False]))
    def size(self, number: int, works: bool) -> None:
        self.ward.answer_size(self.pick(self.ward.sizing, number), works)

    @precondition(lambda self: self.ward.loading)
    @rule(number=NUMBERS, works=st.sampled_from([True, True, True, False]), more=st.sampled_from([0, 0, -1, 2]))
    def load(self, number: int, works: bool, more: int) -> None:
        self.ward.answer_load(self.pick(self.ward.loading, number), works, more)

    @precondition(lambda self: self.ward.leaving)
    @rule(number=NUMBERS)
    def gone(self, number: int) -> None:
        self.ward.gone(self.pick(self.ward.leaving, number))

    @precondition(lambda self: self.ward.ready)
    @rule(number=NUMBERS)
    def crash(self, number: int) -> None:
        self.ward.crash(self.pick(self.ward.ready, number))

    @rule(seconds=st.floats(0.5, 6.0))
    def pass_time(self, seconds: float) -> None:
        self.ward.now += seconds
        self.ward.follow()

    # -- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def the_budget_holds(self) -> None:
        """But where a model turned out to be larger than was thought: then idle ones go."""
        ward = self.ward
        if ward.total <= ward.budget:
            ward.grown = False
        assert ward.grown or ward.total <= ward.budget, "over budget"
        staying = ward.total - sum(ward.held[name] for name in ward.leaving)
        assert staying <= ward.budget or ward.using or ward.loading, "idle ones stay, over budget"

    @invariant()
    def who_waits_has_a_reason(self) -> None:
        """No wake-up is lost: where nothing is under way, and no model is used, nobody waits."""
        ward = self.ward
        if not ward.under_way and not ward.using:
            assert not ward.waiting, f"{ward.waiting} wait for nothing"
            assert not ward.orders, f"{ward.orders} wait for nothing"

    @invariant()
    def ready_models_wait_for_nobody_but_who_needs_their_room(self) -> None:
        ward = self.ward
        for ticket, name in ward.waiting.items():
            if name not in ward.ready:
                continue
            before = [order for order, its in ward.orders.items() if its == name and order < ticket]
            heads = [other for other, its in ward.waiting.items() if its in ward.absent and other < ticket]
            assert before or heads or ward.total > ward.budget, f"use {ticket} of {name} waits behind nobody"

    @invariant()
    def an_alarm_is_set_for_whoever_is_idle(self) -> None:
        ward = self.ward
        for name, model in ward.residency.models.items():
            is_quiet = name in ward.idle and name not in ward.waiting.values()
            deadline = ward.idle_since[name] + ward.residency.idle_seconds if is_quiet else math.inf
            assert ward.residency.deadline_of(model) == deadline > ward.now

    def teardown(self) -> None:
        if not hasattr(self, "ward") or self.failed:
            return
        self.everybody_is_served_at_last()
        self.all_ends()

    def everybody_is_served_at_last(self) -> None:
        """However busy it is: in each round new uses of every model come, those that began two rounds before end, so
        that models are never idle of their own accord, and all that is under way is answered."""
        ward = self.ward
        waited = [*ward.waiting, *ward.orders]
        began: dict[int, int] = {}  # in which round each use did
        for number in range(8 * (len(NAMES) + len(waited))):
            for name in NAMES:
                ward.want(name)
            for ticket in [one for one in ward.using if began.setdefault(one, number) <= number - 2]:
                ward.end(ticket)
            self.answer_all()
            if all(ticket in ward.answers for ticket in waited):
                return
        raise AssertionError(f"kept out: {[ticket for ticket in waited if ticket not in ward.answers]}")

    def answer_all(self) -> None:
        ward = self.ward
        ward.now += 0.1
        for name in sorted(ward.sizing):
            ward.answer_size(name, works=True)
        for name in sorted(ward.loading):
            ward.answer_load(name, works=True)
        for name in sorted(ward.leaving):
            ward.gone(name)

    def all_ends(self) -> None:
        ward = self.ward
        ward.close()
        assert not ward.waiting, "somebody waits for what never comes"
        assert not ward.ready
        for name in sorted(ward.loading):
            ward.answer_load(name, works=name in {"a", "b"})
        for name in sorted(ward.sizing):
            ward.answer_size(name, works=name in {"a", "c"})
        for name in sorted(ward.leaving):
            ward.gone(name)
        assert not ward.held
        assert not ward.orders
        assert not ward.under_way


class TwoFitMachine(ResidencyMachine):
    """So little room, both of it in use, that tasks often wait for each other."""

    two_fit = True


TestResidency = ResidencyMachine.TestCase
TestTwoFit = TwoFitMachine.TestCase
TestTwoFit.settings = settings(max_examples=200)


def test_an_order_to_unload_a_model_that_is_being_sized_is_answered_at_once():
    """Sizing may download the checkpoint, and nothing is loaded yet."""
    residency = Residency(("a",), 10, math.inf, 60.0)
    residency.want("a")
    assert residency.decide(0.0) == (Size("a"),)
    order = residency.order_unload("a")
    assert residency.decide(1.0) == (Grant(order),)
    residency.sized("a", 5)
    assert residency.decide(2.0) == (Load("a"),)
