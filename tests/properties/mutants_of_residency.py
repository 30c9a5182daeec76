"""The table of mutants: which models are loaded, and the tasks that hold their engines open."""

from __future__ import annotations

from ..api import test_engines
from .mutants import Mutant, engine_test, machine
from .test_residency import ResidencyMachine, TwoFitMachine

RESIDENCY = machine(ResidencyMachine, examples=150)
RESIDENCY_LONG = machine(ResidencyMachine, examples=800)  # for what takes a rare world
TWO_FIT = machine(TwoFitMachine, examples=150)
CONTEXT = engine_test(test_engines.test_the_engine_does_not_live_in_the_context_of_the_use_that_loads_it)
DRAIN = engine_test(test_engines.test_cancelling_the_surroundings_ends_the_drain)
HANGS = engine_test(test_engines.test_a_load_that_hangs_does_not_hold_up_the_end)
HEARS = engine_test(test_engines.test_an_engine_that_fails_before_its_user_hears_of_it_is_not_handed_out, seeds=6)
IDLE = engine_test(test_engines.test_models_become_idle_each_in_its_own_time)
LEAST = engine_test(test_engines.test_the_least_recently_used_model_gives_way_and_no_other)
NO_DRAIN = engine_test(test_engines.test_aclose_without_a_drain_begins_none)
MORE = engine_test(test_engines.test_a_model_that_holds_more_than_was_thought_has_idle_ones_give_way)
OWN_ERRORS = engine_test(test_engines.test_a_load_that_fails_is_told_to_all_who_wait_each_by_an_error_of_its_own)
TURNS = engine_test(
    test_engines.test_a_model_in_use_is_not_unloaded_and_later_uses_of_it_wait_behind_who_needs_its_room
)

MUTANTS: tuple[Mutant, ...] = (
    # decisions
    Mutant(
        name="a model in use gives way",
        function="core.residency:Residency._served_one",
        fragment="all(victim.is_idle for victim in victims)",
        mistake="all(victim.state is ModelState.READY for victim in victims)",
        killer=RESIDENCY,
        reason="taken from its users",
    ),
    Mutant(
        name="later uses of a model that gives way do not wait",
        function="core.residency:Residency._claim",
        fragment="min(limits[victim.name], head.ticket)",
        mistake="limits[victim.name]",
        killer=RESIDENCY,
        reason="kept out",
    ),
    Mutant(
        name="every end of a use changes who gives way",
        function="core.residency:Residency.end",
        fragment="if not model.users:",
        mistake="if model:",
        killer=TWO_FIT,
        reason="kept out",
    ),
    Mutant(
        name="the most recently used gives way first",
        function="core.residency:Residency._victims",
        fragment="not model.is_idle, model.recency)",
        mistake="not model.is_idle, -model.recency)",
        killer=LEAST,
        reason="rarr",
    ),
    Mutant(
        name="more give way than are needed",
        function="core.residency:Residency._victims",
        fragment="if _held(chosen) - candidate.held >= lacking:",
        mistake="if _held(chosen) - candidate.held > lacking + 99:",
        killer=RESIDENCY_LONG,
        reason=("gives way for nothing", "it had not decided all that follows"),
    ),
    Mutant(
        name="who needs little room overtakes",
        function="core.residency:Residency._head",
        fragment="key=lambda found: found[0]",
        mistake="key=lambda found: found[1].needs or 0",
        killer=RESIDENCY,
        reason="waits for longer",
    ),
    Mutant(
        name="what is on its way out counts no more",
        function="core.residency:Residency._free",
        fragment="self.budget - self.held",
        mistake="self.budget - self.held + _held(self._in(ModelState.UNLOADING))",
        killer=RESIDENCY,
        reason=("over budget", "it had not decided all that follows"),
    ),
    Mutant(
        name="what it was thought to need stays in the books",
        function="core.residency:Residency.opened",
        fragment="model.held = model.needs = held",
        mistake="model.needs = held",
        killer=RESIDENCY,
        reason=("the bytes differ", "figures.bytes"),
    ),
    Mutant(
        name="what turned out too much has nobody give way",
        function="core.residency:Residency._head",
        fragment="if self._free >= 0:",
        mistake="if self.budget:",
        killer=MORE,
        reason="states(engines)",
    ),
    Mutant(
        name="a failed load is tried again at once",
        function="core.residency:Residency._answer_absent",
        fragment="now < model.failed_at + self.retry_seconds",
        mistake="now < model.failed_at",
        killer=RESIDENCY,
        reason=("a failure that nobody hears of", "a use after a failure"),
    ),
    Mutant(
        name="uses that wait at the end are not told",
        function="core.residency:Residency._answer_absent",
        fragment="if self._closing or (absent and failed):",
        mistake="if absent and (self._closing or failed):",
        killer=RESIDENCY,
        reason="waits for what never comes",
    ),
    Mutant(
        name="a use that was cancelled still waits",
        function="core.residency:Residency.end",
        fragment="    model.waiting.pop(ticket, None)\n",
        mistake="",
        killer=RESIDENCY,
        reason=("figures.waiting", "KeyError"),
    ),
    Mutant(
        name="an order to unload waits for later uses",
        function="core.residency:Residency._unload_spare",
        fragment="elif model.orders:",
        mistake="elif model.orders and not model.waiting:",
        killer=RESIDENCY,
        reason=("wait for nothing", "kept out"),
    ),
    Mutant(
        name="a load that nobody waits for any more stays",
        function="core.residency:Residency._unload_spare",
        fragment="not model.waiting and not model.wanted",
        mistake="not model.waiting and self._closing",
        killer=RESIDENCY,
        reason="nobody waits for it, and it stays",
    ),
    Mutant(
        name="a use does not begin the idle time anew",
        function="core.residency:Residency.end",
        fragment="model.idle_since = model.last_use = now",
        mistake="model.last_use = now",
        killer=TWO_FIT,
        reason=("it had more time", "next_deadline", "it is over time"),
    ),
    Mutant(
        name="the users of an engine that failed stay",
        function="core.residency:Residency.leaving",
        fragment="    model.users.clear()\n",
        mistake="",
        killer=RESIDENCY,
        reason=("figures.users", "KeyError"),
    ),
    Mutant(
        name="a task waits behind somebody who waits for it",
        function="core.residency:Residency._served_one",
        fragment="self._grant_urgent(urgent)",
        mistake="pass",
        killer=TWO_FIT,
        reason=("waits for an order that waits for its own task", "wait for nothing", "kept out"),
    ),
    Mutant(
        name="a task has room made behind somebody who waits for it",
        function="core.residency:Residency._served_one",
        fragment="first = self._head(urgent)",
        mistake="first = None",
        killer=TWO_FIT,
        reason=("wait for nothing", "kept out"),
    ),
    Mutant(
        name="two tasks wait for each other",
        function="core.residency:Residency._served_one",
        fragment="spared=self._stuck(limits)",
        mistake="spared=set()",
        killer=TWO_FIT,
        reason=("wait for nothing", "kept out"),
    ),
    Mutant(
        name="a task orders a model away while it uses one",
        function="core.residency:Residency.order_unload",
        fragment="if owner in self._owners(self._models.values()):",
        mistake="if owner in self._owners([model]):",
        killer=TWO_FIT,
        reason=("others wait for what it uses", "wait for nothing", "kept out"),
    ),
    # tasks
    Mutant(
        name="an engine lives in the context of a use",
        function="api.residents:Residents._start",
        fragment="self._context.copy().run(start)",
        mistake="start()",
        killer=CONTEXT,
        reason="set(seen)",
    ),
    Mutant(
        name="a load holds up the end",
        function="api.residents:Residents.close",
        fragment="if drain == 0 or is_loading:",
        mistake="if drain == 0:",
        killer=HANGS,
        reason="Deadlock",
    ),
    Mutant(
        name="an end without a drain begins one",
        function="api.residents:Residents.close",
        fragment="if drain == 0 or not self.closing:",
        mistake="if drain and not self.closing:",
        killer=NO_DRAIN,
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="the end does not hear of a cancellation",
        function="api.residents:Residents._hasten",
        fragment="if self.closing:",
        mistake="if not self.closing:",
        killer=DRAIN,
        reason=("Deadlock", "scope.cancelled_caught", "DID NOT RAISE"),
    ),
    Mutant(
        name="a use of an engine that has just failed is not begun anew",
        function="api.residents:Residents.use",
        fragment="while engine is None:",
        mistake="if engine is None:",
        killer=HEARS,
        reason=("users.order", "didn't yield"),
    ),
    Mutant(
        name="a use that ends is not told",
        function="api.residents:Residents._leave",
        fragment="self._residency.end(use.ticket, anyio.current_time())",
        mistake="pass",
        killer=TURNS,
        reason=("users.order", "AssertionError"),
    ),
    Mutant(
        name="an idle model is forgotten",
        function="api.residents:Residents._follow",
        fragment="if self.closing or self._residency.next_deadline() < self._alarm:",
        mistake="if self.closing:",
        killer=IDLE,
        reason="states(engines)",
    ),
    Mutant(
        name="all who wait get the same error",
        function="api.residents:Residents._tell",
        fragment="use.error = retold(error)",
        mistake="use.error = error",
        killer=OWN_ERRORS,
        reason="is not",
    ),
)
