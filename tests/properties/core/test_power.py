"""Sleeping and waking: the last wish counts, and what is so follows it as soon as what is under way has ended."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from triolet.core.power import Order, Power, PowerState


class PowerMachine(RuleBasedStateMachine):
    """The runner answers when it likes; orders never cross."""

    def __init__(self) -> None:
        super().__init__()
        self.power = PowerState()
        self.under_way: Order | None = None
        self.held = True  # whether the runner has the device
        self.last_order: Order | None = None  # of the users
        self.failed = False  # the last wake did, and nobody has wished for anything since

    def follow(self) -> None:
        order = self.power.next_order()
        if order is None:
            return
        assert self.under_way is None, "an order while another is under way"
        assert self.held is (order is Order.SLEEP), "an order for what is so already"
        self.under_way = order

    @rule(order=st.sampled_from(Order))
    def order(self, order: Order) -> None:
        self.power.order(order)
        self.last_order, self.failed = order, False
        self.follow()

    @precondition(lambda self: self.power.power is Power.AWAKE)
    @rule()
    def doze(self) -> None:
        self.power.doze()
        self.last_order = None
        self.follow()

    @rule()
    def work_comes(self) -> None:
        ordered = self.power.ordered
        self.power.work_came()
        assert self.power.ordered is ordered, "work ends no sleep that was ordered"
        if not ordered:
            self.failed = False
            assert self.power.will_wake
        self.follow()

    @precondition(lambda self: self.under_way is not None)
    @rule(works=st.booleans())
    def runner_answers(self, works: bool) -> None:
        order, self.under_way = self.under_way, None
        if order is Order.SLEEP and not works:
            self.power.failed(order)
            self.last_order = None
        elif order is Order.SLEEP:
            self.held = False
            self.power.slept()
        elif works:
            self.held = True
            self.power.woke()
        else:
            self.power.failed(order)
            self.failed = True
        self.follow()
        assert not (self.failed and self.under_way), "it tries again at once, and for ever"

    @invariant()
    def work_is_done_only_where_the_device_is_held(self) -> None:
        assert self.power.may_work == (self.held and self.under_way is None)

    @invariant()
    def the_last_wish_counts(self) -> None:
        if self.last_order is Order.SLEEP:
            assert self.power.ordered
            assert not self.power.will_wake
        if self.last_order is Order.WAKE and not self.failed:
            assert self.power.will_wake

    @invariant()
    def nothing_is_left_undone(self) -> None:
        """Where nothing is under way, what is so is what is wanted."""
        if self.under_way is None:
            assert self.held is self.power.will_wake


TestPower = PowerMachine.TestCase
TestPower.settings = settings(max_examples=settings.default.max_examples // 4)
