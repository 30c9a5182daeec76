"""The properties are tested themselves: each mistake in the table must be noticed, and for its reason."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis.stateful import rule

from triolet.core.ledger import EncoderLedger

from . import (
    mutants_of_actors,
    mutants_of_alignment,
    mutants_of_core,
    mutants_of_flights,
    mutants_of_ledger,
    mutants_of_live,
    mutants_of_liveness,
    mutants_of_recovery,
    mutants_of_residency,
    mutants_of_routing,
    mutants_of_searches,
    mutants_of_sharing,
    mutants_of_speech,
    mutants_of_switching,
    mutants_of_tools,
    mutants_of_walks,
)
from .machines import Machine
from .mutants import Mutant, machine, planted, verdict

MUTANTS = (
    *mutants_of_core.MUTANTS,
    *mutants_of_ledger.MUTANTS,
    *mutants_of_sharing.MUTANTS,
    *mutants_of_actors.MUTANTS,
    *mutants_of_recovery.MUTANTS,
    *mutants_of_speech.MUTANTS,
    *mutants_of_switching.MUTANTS,
    *mutants_of_walks.MUTANTS,
    *mutants_of_live.MUTANTS,
    *mutants_of_liveness.MUTANTS,
    *mutants_of_alignment.MUTANTS,
    *mutants_of_searches.MUTANTS,
    *mutants_of_tools.MUTANTS,
    *mutants_of_residency.MUTANTS,
    *mutants_of_flights.MUTANTS,
    *mutants_of_routing.MUTANTS,
)
KILLERS = {mutant.killer: f"that of: {mutant.name}" for mutant in MUTANTS}
LEAST = {
    "core.ledger": 8,
    "core.planning.planner": 8,
    "core.planning.acts": 8,
    "core.planning.acquirer": 3,
    "core.planning.prefix": 8,
    "core.planning.pages": 8,
    "core.planning.holds": 4,
    "core.planning.quarantine": 3,
    "core.residency": 15,
    "core.routing": 15,
    "core.beams": 3,
    "core.beam_pages": 3,
    "actors.scheduler": 4,
    "actors.encoder_cache": 4,
    "actors.gpu_runner": 5,
    "actors.supervisor": 5,
    "actors.switch_interval": 4,
    "api.residents": 8,
    "api.speech.spans": 6,
    "api.live.agreement": 5,
    "api.live.endpoints": 6,
    "api.live.words": 3,
    "api.tools.reader": 3,
    "api.tools.scanner": 5,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mistake_is_noticed_and_for_its_reason(mutant: Mutant):
    with planted(mutant.function, mutant.fragment, mutant.mistake):
        said = verdict(mutant.killer)
    assert said is not None, f"the mutant lives: {mutant}"
    assert any(word in said for word in mutant.reason), f"killed, but not because of {mutant.reason}: {said[-2000:]}"


@pytest.mark.thorough
@pytest.mark.parametrize("killer", KILLERS, ids=KILLERS.get)
def test_a_killer_passes_where_there_is_no_mistake(killer):
    said = verdict(killer)
    assert said is None, said


def test_every_room_has_its_mutants():
    counts = Counter(mutant.room for mutant in MUTANTS)
    few = {room: counts[room] for room, least in LEAST.items() if counts[room] < least}
    assert not few, f"fewer mutants than {LEAST}: {few}"
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS), "two mutants share a name"
    assert all(word for mutant in MUTANTS for word in mutant.reason), "an empty reason is in every failure"


def test_a_mutant_is_gone_after_its_block():
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
