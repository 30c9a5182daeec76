"""The table of mutants: after each of these mistakes somebody waits for ever, and no token is wrong."""

from __future__ import annotations

from functools import partial

from .mutants import Mutant
from .test_liveness import play_all
from .test_standing_still import wander

WANDER = partial(wander, 500)
PLAYS = partial(play_all, range(200))
STILL = ("a request never ended", "nobody moves", "no end after")

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        name="the room that victims give back counts as seen by the one they gave way to",
        function="core.planning.planner:Planner._move",
        fragment="    for sequence in draft.lost:",
        mistake=(
            "    if draft.blocked is not None:\n"
            "        self._room.found_none(draft.blocked)\n"
            "    for sequence in draft.lost:"
        ),
        killer=WANDER,
        reason=STILL,
    ),
    Mutant(
        name="a sequence that lost what made it ready does not wait for it",
        function="core.planning.planner:Planner._move",
        fragment="        self._acquirer.waits(sequence)\n",
        mistake="        self._acquirer.waits_no_more(sequence)\n",
        killer=WANDER,
        reason=STILL,
    ),
    Mutant(
        name="a sequence that runs does not ask for its next images",
        function="core.planning.acquirer:Acquirer.has_read",
        fragment="self._wanting.put(sequence, sequence.key)",
        mistake="pass",
        killer=PLAYS,
        reason=STILL,
    ),
    Mutant(
        name="who gave up its encoder output for an earlier one does not seek it again",
        function="core.planning.acquirer:Acquirer._withdraw_for",
        fragment="    self._seeking.put(last, last.key)\n",
        mistake="",
        killer=PLAYS,
        reason=STILL,
    ),
    Mutant(
        name="only the first half of the suspects has a turn",
        function="core.planning.quarantine:Quarantine.turns",
        fragment="        yield frozenset(group[half:])\n",
        mistake="        return\n",
        killer=PLAYS,
        reason=STILL,
    ),
    Mutant(
        name="nobody acquires behind a refusal before something else happens",
        function="core.planning.acquirer:Acquirer.release",
        fragment="        self._stale = True\n",
        mistake="",
        killer=PLAYS,
        reason=STILL,
    ),
    Mutant(
        name="a first chunk that is small waits though nobody else is in the step",
        function="core.planning.acts:Acts._first_share",
        fragment="length < min(wanted, self.limits.page_size) and draft.parts",
        mistake="length < min(wanted, self.limits.page_size)",
        killer=PLAYS,
        reason=STILL,
    ),
)
