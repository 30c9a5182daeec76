"""The table of mutants: which replica a request goes to."""

from __future__ import annotations

from . import test_routing
from .mutants import Mutant, machine
from .test_routing import RoutingMachine

ROUTING = machine(RoutingMachine, examples=150)

MUTANTS: tuple[Mutant, ...] = (
    # decisions
    Mutant(
        name="a busy holder is taken",
        function="core.routing:Router._holder",
        fragment="self._replicas[one].load < most",
        mistake="self._replicas[one].load < 2 * most",
        killer=ROUTING,
        reason="nobody busy is taken",
    ),
    Mutant(
        name="on the ring a busy replica is taken",
        function="core.routing:Router._hashed",
        fragment=" and self._replicas[one].load < most",
        mistake="",
        killer=ROUTING,
        reason="nobody busy is taken",
    ),
    Mutant(
        name="a barred replica is taken",
        function="core.routing:Router._hashed",
        fragment="one not in barred and ",
        mistake="",
        killer=ROUTING,
        reason="that may be taken",
    ),
    Mutant(
        name="only the most telling key is looked up",
        function="core.routing:Router._holder",
        fragment="for key in keys:",
        mistake="for key in keys[:1]:",
        killer=ROUTING,
        reason="is not computed elsewhere",
    ),
    Mutant(
        name="the ring is entered at the most telling key",
        function="core.routing:Router._hashed",
        fragment="keys[-1]",
        mistake="keys[0]",
        killer=ROUTING,
        reason="first two on the ring",
    ),
    Mutant(
        name="of three on the ring the best is taken, which other routers do not look at",
        function="core.routing:Router._hashed",
        fragment="islice(able, 2)",
        mistake="islice(able, 3)",
        killer=test_routing.test_what_nobody_holds_goes_past_a_replica_that_has_to_encode,
        reason="first != second",
    ),
    Mutant(
        name="the first on the ring is taken, whatever is to be encoded there",
        function="core.routing:Router._hashed",
        fragment="islice(able, 2)",
        mistake="islice(able, 1)",
        killer=test_routing.test_what_nobody_holds_goes_past_a_replica_that_has_to_encode,
        reason="first != second",
    ),
    Mutant(
        name="on the ring requests count as encodings do",
        function="core.routing:Router._hashed",
        fragment="key=self.encodings",
        mistake="key=self._burden",
        killer=test_routing.test_what_nobody_holds_goes_past_a_replica_that_has_to_encode,
        reason="make nobody wait",
    ),
    Mutant(
        name="of two the worse one is taken",
        function="core.routing:Router._better_of_two",
        fragment="return min(able[first], able",
        mistake="return max(able[first], able",
        killer=ROUTING,
        reason="never the better of two",
    ),
    Mutant(
        name="the same one may be drawn twice",
        function="core.routing:Router._better_of_two",
        fragment="second + (second >= first)",
        mistake="second",
        killer=ROUTING,
        reason="never the better of two",
    ),
    Mutant(
        name="of two the one with the smaller load is taken, whatever it has to encode",
        function="core.routing:Router._burden",
        fragment="one.encodings, one.load",
        mistake="one.load, one.encodings",
        killer=test_routing.test_of_two_holders_the_one_that_has_to_encode_is_passed_over,
        reason="assert",
    ),
    # books
    Mutant(
        name="an end is not counted",
        function="core.routing:Router.ended",
        fragment="self._count(there, -1)",
        mistake="pass",
        killer=ROUTING,
        reason=("loads_are_those_of_the_requests_that_run", "busy_is_who_exceeds_the_mean"),
    ),
    Mutant(
        name="a replica that leaves keeps its part of the mean load",
        function="core.routing:Router.left",
        fragment="self._load -= gone.load",
        mistake="pass",
        killer=ROUTING,
        reason="busy_is_who_exceeds_the_mean",
    ),
    Mutant(
        name="loads that are told add up",
        function="core.routing:Router.told_load",
        fragment="others - told.others)",
        mistake="others)",
        killer=ROUTING,
        reason="loads_are_those_of_the_requests_that_run",
    ),
    Mutant(
        name="what a request needs is encoded for ever",
        function="core.routing:Router.ended",
        fragment="there.missed.difference_update(keys)",
        mistake="pass",
        killer=ROUTING,
        reason="encodings_to_come_are_those_of_what_was_not_held",
    ),
    Mutant(
        name="a hit counts as an encoding",
        function="core.routing:Router.sent",
        fragment=" if key not in there.keys",
        mistake="",
        killer=ROUTING,
        reason="encodings_to_come_are_those_of_what_was_not_held",
    ),
    Mutant(
        name="what is told makes a router forget what it has sent",
        function="core.routing:Router.told",
        fragment="(*keys, *sorted(told.asked))",
        mistake="keys",
        killer=ROUTING,
        reason="memory_is_bounded_and_of_those_who_are_there",
    ),
    Mutant(
        name="memory is not bounded",
        function="core.routing:Router._note",
        fragment="len(held) > self.limits.most_keys",
        mistake="len(held) > 2 * self.limits.most_keys",
        killer=ROUTING,
        reason="memory_is_bounded_and_of_those_who_are_there",
    ),
    Mutant(
        name="who has gone stays on the ring",
        function="core.routing:Router._points",
        fragment="name not in self._replicas and name in self._on_ring",
        mistake="False",
        killer=ROUTING,
        reason=("KeyError", "memory_is_bounded_and_of_those_who_are_there"),
    ),
    Mutant(
        name="who comes is not on the ring",
        function="core.routing:Router.joined",
        fragment="self._changed.add(replica)",
        mistake="pass",
        killer=ROUTING,
        reason=("first two on the ring", "memory_is_bounded_and_of_those_who_are_there"),
    ),
)
