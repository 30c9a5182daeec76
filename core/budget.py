"""`Budget`: the bytes that all clients of a server together may make it hold.

Whoever stores something for a client takes its bytes from the budget before they are there, through an `Account`.
Closing the account gives back all that it has taken, so a request needs one place where its end is noticed, and none
where parts are counted back. There is no lock: one event loop owns the budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from attrs import define, field

from .errors import Overloaded, RequestTooLarge


@define(eq=False)
class Budget:
    """The bytes that may be held, and those that are.

    Args:
        capacity: the most bytes that all accounts together may hold.
        room: called each time that bytes were given back.
    """

    capacity: int
    room: Callable[[], object] = bool
    held: int = field(default=0, init=False)

    def account(self) -> Account:
        """Opens an account without bytes."""
        return Account(self)


@define(eq=False)
class Account:
    """The bytes that one holder, such as a request, has taken. As a block, the account is closed at its end."""

    _budget: Budget
    held: int = field(default=0, init=False)
    _closed: bool = field(default=False, init=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fits(self, size: int) -> bool:
        """True if waiting is of no use: ``size`` more bytes are free now, or `take` refuses them for good."""
        return self._budget.held + size <= self._budget.capacity or self.held + size > self._budget.capacity

    def take(self, size: int) -> None:
        """Takes ``size`` more bytes, or none at all.

        Raises:
            Overloaded: others hold too much.
            RequestTooLarge: the account alone would have more than the whole budget.
        """
        assert size >= 0, f"{size} bytes cannot be taken; `give` gives back"
        assert not self._closed, "bytes were taken by a holder that has ended"
        budget = self._budget
        if self.held + size > budget.capacity:
            raise RequestTooLarge(
                f"the request needs {self.held + size:,} bytes of memory; allowed for all requests together: "
                f"{budget.capacity:,}. Send less at once"
            )
        if budget.held + size > budget.capacity:
            raise Overloaded(
                f"the requests that run hold {budget.held:,} bytes of memory, and this one needs {size:,} more; "
                f"allowed for all requests together: {budget.capacity:,}. Try again later"
            )
        budget.held += size
        self.held += size

    def give(self, size: int) -> None:
        """Gives ``size`` bytes back. After `close` there is nothing left to give."""
        if self._closed:
            return
        assert 0 <= size <= self.held, f"{size} bytes are given back by a holder of {self.held}"
        self.held -= size
        self._budget.held -= size
        self._budget.room()

    def close(self) -> None:
        """Gives everything back. A second call does nothing."""
        self.give(0 if self._closed else self.held)
        self._closed = True


def unlimited() -> Account:
    """Returns an account of a budget of its own, which is never used up."""
    return Budget(2**62).account()
