"""Loans between replicas: `RayLenders` borrows encoder outputs for a replica, and `Loan` passes on a lender's answer.

An output travels through Ray's object store, as the result of `Replica.lend`. The borrower gives its loans back in
batches, and to all lenders, because a handle of Serve reaches either any replica or every one. A lender ignores loans
that it did not make. A loan that is never given back ends with its term.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from attrs import define, field
from ray.exceptions import ActorDiedError, RayTaskError

from ..actors import messages as m
from ..core.errors import BorrowFailed, DeviceLost, EncodeFailed, LenderLost, RunnerCrashed
from ..core.plan import LentOutput
from ..core.request import EncoderItem
from .asyncio_thread import NamedTasks

_RETURN_SECONDS = 0.1  # between two batches of loans that are given back
_ASK_SECONDS = 60.0  # for one answer: there may be no lender, now and later


@define(eq=False)
class Loan:
    """A `triolet.actors.messages.Lent` that passes the answer of the engine to the replica's asyncio loop."""

    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[LentOutput]

    def put(self, output: LentOutput) -> None:
        """Answers with the output."""
        self._hand(self.answer.set_result, output)

    def refuse(self, error: Exception) -> None:
        """Answers with an error."""
        self._hand(self.answer.set_exception, error)

    def _hand(self, answer: Callable[[Any], None], value: object) -> None:
        def answer_once() -> None:
            if not self.answer.done():
                answer(value)

        with suppress(RuntimeError):  # the loop has ended, and nobody waits for the answer
            self.loop.call_soon_threadsafe(answer_once)


@define(eq=False)
class RayLenders:
    """The `triolet.actors.messages.Lenders` of a replica. `ask` and `withdraw` are called in the trio loop. The work is
    done in ``loop``, and ``tell`` is called there.
    """

    handle: Any  # the handle of the deployment that only encodes
    loop: asyncio.AbstractEventLoop
    tell: Callable[[m.Arrived | m.BorrowBroken], None]
    _name: str = field(factory=lambda: uuid4().hex[:8], init=False)  # other borrowers count from 1, too
    _tasks: NamedTasks = field(init=False)
    _back: list[tuple[str, str]] = field(factory=list, init=False)  # loans and keys that are not given back yet
    _telling: asyncio.Task[None] | None = field(default=None, init=False)

    @_tasks.default
    def _make_tasks(self) -> NamedTasks:
        return NamedTasks(self.loop)

    def ask(self, number: int, item: EncoderItem) -> None:
        """Asks a lender for ``item``. ``number`` identifies the borrow."""
        self._tasks.start(number, partial(self._borrow, number, item))

    def withdraw(self, number: int) -> None:
        """Withdraws the borrow ``number``."""
        self._tasks.cancel(number)

    # -- in the asyncio loop -----------------------------------------------------------------------------------------

    async def _borrow(self, number: int, item: EncoderItem) -> None:
        loan = f"{self._name}/{number}"
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                output = await self.handle.lend.remote((item.key,), loan, item)
        except Exception as error:  # noqa: BLE001  (the borrower waits for an answer in any case)
            self.tell(m.BorrowBroken(number, _failure(error)))
        else:
            self.tell(m.Arrived(number, output))
        finally:
            self._give_back(loan, item.key)

    def _give_back(self, loan: str, key: str) -> None:
        self._back.append((loan, key))
        if self._telling is None:
            self._telling = self.loop.create_task(self._tell_back())

    async def _tell_back(self) -> None:
        while self._back:
            await asyncio.sleep(_RETURN_SECONDS)
            back, self._back = tuple(self._back), []
            with suppress(Exception):  # the loans end with their terms
                await self.handle.broadcast("take_back", back).results_async(timeout_s=_ASK_SECONDS)
        self._telling = None


def _failure(error: Exception) -> Exception:
    """Returns the error that the borrower gets for ``error``. `EncodeFailed`: the lender could not encode the item, so
    the item fails for good. `LenderLost`: the item may have ended the lender, so the borrower does not encode it.
    `BorrowFailed`: any other error.
    """
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, EncodeFailed):
        return cause
    died = isinstance(cause, ActorDiedError) and not cause.preempted
    kind = LenderLost if died or isinstance(cause, DeviceLost | RunnerCrashed) else BorrowFailed
    failure = kind(
        f"a lender did not give the encoder output ({type(cause).__name__}: {cause}); ask another lender, or encode "
        "it here"
    )
    failure.__cause__ = cause
    return failure
