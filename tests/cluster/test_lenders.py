"""`RayLenders` over a handle that a test answers for; with ``TRIOLET_TEST_RAY=1`` a loan on a real Ray cluster."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Ray's own
    pytest.importorskip("ray.serve")

from ray.exceptions import ActorDiedError, RayTaskError

from triolet.actors import messages as m
from triolet.cluster.lenders import RayLenders
from triolet.core.errors import BorrowFailed, EncodeFailed
from triolet.core.plan import LentOutput
from triolet.core.request import EncoderItem

ITEM = EncoderItem(key="k", payload=None, embeddings=1, size=10)
OUTPUT = LentOutput(key="k", size=10, arrays=())


class Handle:
    """A handle of Serve's, as far as `RayLenders` uses it."""

    def __init__(self, lend: Callable[..., Awaitable[LentOutput]]) -> None:
        self.back: list[tuple[tuple[str, str], ...]] = []
        self.told = asyncio.Event()
        self.lend = self
        self.remote = lend

    def broadcast(self, method: str, loans: tuple[tuple[str, str], ...]) -> Any:
        assert method == "take_back"
        self.back.append(loans)
        return self

    async def results_async(self, timeout_s: float) -> list[None]:
        assert timeout_s > 0
        self.told.set()
        return []


def borrow(lend: Callable[..., Awaitable[LentOutput]], *, withdraws: bool = False) -> tuple[list[Any], Handle]:
    """What one borrow comes to, once its loan was given back."""
    told: list[Any] = []

    async def run() -> Handle:
        handle = Handle(lend)
        lenders = RayLenders(handle, asyncio.get_running_loop(), told.append)
        lenders.ask(1, ITEM)
        if withdraws:
            await asyncio.sleep(0)
            lenders.withdraw(1)
        await handle.told.wait()
        return handle

    return told, asyncio.run(run())


def test_what_a_lender_gives_arrives_and_its_loan_is_given_back():
    asked = []

    async def lend(*arguments: Any) -> LentOutput:
        asked.append(arguments)
        return OUTPUT

    told, handle = borrow(lend)
    ((keys, loan, item),) = asked
    assert (keys, item) == (("k",), ITEM), "the router is told the key"
    assert told == [m.Arrived(1, OUTPUT)]
    assert handle.back == [((loan, "k"),)], "freed when the borrower says so"


def test_a_lender_that_dies_is_a_borrow_that_failed():
    async def lend(*_: Any) -> LentOutput:
        raise ActorDiedError

    ((broken,), _) = borrow(lend)
    assert isinstance(broken.error, BorrowFailed)
    assert isinstance(broken.error.__cause__, ActorDiedError)


def test_an_item_that_the_lender_could_not_encode_is_told_as_it_is():
    failed = EncodeFailed("not finite")

    async def lend(*_: Any) -> LentOutput:
        raise RayTaskError("lend", "there", failed)

    ((broken,), _) = borrow(lend)
    assert broken == m.BorrowBroken(1, failed)


def test_a_borrow_that_is_withdrawn_answers_nothing_and_is_given_back():
    async def lend(*_: Any) -> LentOutput:
        return await asyncio.get_running_loop().create_future()

    told, handle = borrow(lend, withdraws=True)
    assert told == []
    assert len(handle.back) == 1


@pytest.mark.skipif(os.environ.get("TRIOLET_TEST_RAY") != "1", reason="starts a Ray cluster: TRIOLET_TEST_RAY=1")
def test_what_is_encoded_on_one_replica_is_decoded_on_another():
    done = subprocess.run([sys.executable, Path(__file__).with_name("lends.py")], check=False, timeout=300)
    assert done.returncode == 0
