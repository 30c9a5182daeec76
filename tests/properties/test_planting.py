"""Planted mistakes are in force within their block alone, and machines know whether they failed."""

from __future__ import annotations

import pytest
from hypothesis.stateful import rule

from triolet.core.ledger import EncoderLedger

from .machines import Machine
from .planting import machine, planted, verdict


def test_a_mistake_is_gone_after_its_block():
    original = vars(EncoderLedger)["drained"]
    with planted("core.ledger:EncoderLedger.drained", "return not self._entries", "return True"):
        assert vars(EncoderLedger)["drained"] is not original
    assert vars(EncoderLedger)["drained"] is original


class Breaks(Machine):
    @rule()
    def breaks(self) -> None:
        raise ValueError("the first error")

    def teardown(self) -> None:
        assert self.failed, "it is called because of an error"


class Works(Machine):
    @rule()
    def works(self) -> None:
        pass

    def teardown(self) -> None:
        assert not self.failed, "it is called because all went well"


def test_the_end_of_a_machine_knows_whether_it_has_failed():
    assert "the first error" in (verdict(machine(Breaks, examples=1)) or "")
    try:
        raise ValueError("an error around it is not its own")
    except ValueError:
        assert verdict(machine(Works, examples=1)) is None


def test_a_fragment_that_is_not_there_is_said_so():
    with pytest.raises(AssertionError, match=r"occurs 0 times in EncoderLedger\.freed"):
        with planted("core.ledger:EncoderLedger.freed", "no such text", ""):
            pass
