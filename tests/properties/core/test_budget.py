"""The promises of a server's budget: no more is taken than its capacity, nor anything that no account has. It is whole
when every account is closed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, invariant, rule

from triolet.core.budget import Account, Budget
from triolet.core.errors import Overloaded, RequestTooLarge

from ..machines import Machine

CAPACITY = 100
SIZES = st.integers(0, CAPACITY + 20)


class BudgetMachine(Machine):
    """Accounts that take, give and close in any order."""

    accounts = Bundle("accounts")

    def __init__(self) -> None:
        super().__init__()
        self.rooms = 0
        self.budget = Budget(CAPACITY, self.hear)
        self.held: dict[Account, int] = {}

    def hear(self) -> None:
        self.rooms += 1

    @rule(target=accounts)
    def open(self) -> Account:
        account = self.budget.account()
        self.held[account] = 0
        return account

    @rule(account=accounts, size=SIZES)
    def take(self, account: Account, size: int) -> None:
        if account not in self.held:
            return
        alone, free = self.held[account] + size > CAPACITY, CAPACITY - sum(self.held.values())
        assert account.fits(size) == (alone or size <= free)
        if alone:
            with pytest.raises(RequestTooLarge, match=r"allowed for all requests together: 100\. Send less"):
                account.take(size)
        elif size > free:
            with pytest.raises(Overloaded, match=r"allowed for all requests together: 100\. Try again"):
                account.take(size)
        else:
            account.take(size)
            self.held[account] += size

    @rule(account=accounts, share=st.integers(0, 4))
    def give(self, account: Account, share: int) -> None:
        """A part, or all. After the end there is nothing to give."""
        size, rooms = self.held.get(account, 0) * share // 4, self.rooms
        account.give(size)
        if account in self.held:
            self.held[account] -= size
            assert self.rooms == rooms + 1, "who waits looks again"

    @rule(account=accounts)
    def close(self, account: Account) -> None:
        """As often as anybody likes."""
        account.close()
        self.held.pop(account, None)

    @invariant()
    def the_books_are_right(self) -> None:
        assert self.budget.held == sum(self.held.values()) <= CAPACITY
        assert all(account.held == held for account, held in self.held.items())

    def teardown(self) -> None:
        for account in list(self.held):
            with account:
                pass
        assert self.budget.held == 0


TestBudget = BudgetMachine.TestCase
TestBudget.settings = settings(max_examples=settings.default.max_examples // 4)


def test_nobody_takes_after_the_end_or_gives_what_he_has_not() -> None:
    account = Budget(CAPACITY).account()
    account.take(10)
    with pytest.raises(AssertionError, match="11 bytes are given back by a holder of 10"):
        account.give(11)
    account.close()
    with pytest.raises(AssertionError, match="a holder that has ended"):
        account.take(1)
