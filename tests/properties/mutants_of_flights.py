"""The table of mutants: what is done with requests whose replica was lost."""

from __future__ import annotations

from . import test_flights
from .mutants import Mutant, machine
from .test_flights import ClusterMachine

FLIGHTS = machine(ClusterMachine, examples=300)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="what a lost replica still says counts",
        function="core.flights:Flight.lost",
        fragment="self.attempt += 1\n    self.losses",
        mistake="self.losses",
        killer=test_flights.test_what_a_lost_replica_says_while_the_next_attempt_waits_is_late,
        reason="assert",
    ),
    Mutant(
        name="what was on a lost replica goes among others again",
        function="core.flights:Flight.lost",
        fragment="self.place = Place.IN_QUARANTINE\n",
        mistake="pass\n",
        killer=FLIGHTS,
        reason="a request ends one replica that has others",
    ),
    Mutant(
        name="who was in quarantine with others when it was lost is taken for poison",
        function="core.flights:Flight.lost",
        fragment="alone and tried_alone",
        mistake="tried_alone",
        killer=FLIGHTS,
        reason="who is condemned was alone",
    ),
    Mutant(
        name="who is the only suspect is taken for poison by two kills",
        function="core.flights:Flight.lost",
        fragment="alone and tried_alone",
        mistake="alone",
        killer=FLIGHTS,
        reason="an innocent one",
    ),
    Mutant(
        name="a suspect that was cleared is taken for poison",
        function="core.flights:Flight.lost",
        fragment=" or self.cleared",
        mistake="",
        killer=test_flights.test_who_is_cleared_is_no_suspect_of_the_next_loss,
        reason="assert",
    ),
    Mutant(
        name="trials begin beside one that is to be alone",
        function="core.flights:Trials.begin",
        fragment="any(trial.alone for trial in tried) or ",
        mistake="",
        killer=test_flights.test_suspects_that_come_later_wait_for_the_one_that_is_tried_alone,
        reason="begun beside it",
    ),
    Mutant(
        name="a trial alone does not wait for those that run together",
        function="core.flights:Trials.begin",
        fragment="(self._alone and tried)",
        mistake="False",
        killer=test_flights.test_a_trial_alone_waits_for_those_that_run_together,
        reason="begun beside it",
    ),
    Mutant(
        name="who is cleared is forgotten as company",
        function="core.flights:Trials.begin",
        fragment="len(self._there) > 1",
        mistake="len(begun) > 1",
        killer=FLIGHTS,
        reason="who is condemned was alone",
    ),
    Mutant(
        name="a trial that has ended well keeps the others waiting",
        function="core.flights:Trials.cleared",
        fragment="self._there[request_id].cleared = True",
        mistake="pass",
        killer=test_flights.test_suspects_that_come_later_wait_for_the_one_that_is_tried_alone,
        reason="begins when it is cleared",
    ),
    Mutant(
        name="a suspect that ran among others is taken for alone",
        function="core.flights:Flight.lost",
        fragment="self._lost_apart > 1 if self._apart else ",
        mistake="",
        killer=test_flights.test_a_suspect_that_runs_among_others_is_not_alone,
        reason="assert",
    ),
)
