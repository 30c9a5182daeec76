"""Hand-made mistakes of our own code, and what must notice them.

A `Mutant` is one function with one fragment of its source replaced; within `planted` the mistake is in force. A killer
is a property that passes on our code and must fail on the mutant's, for the reason that the mutant's row names.
"""

from __future__ import annotations
import __future__

import functools
import gc
import importlib
import inspect
import linecache
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import pytest
from attrs import field, frozen
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from triolet import EngineConfig
from triolet.testing.schedule import Batches, Schedule, run_scheduled
from triolet.testing.sim import SimExecutor
from triolet.testing.simulation import SCENARIOS, FaultKind, Scenario, simulate
from triolet.testing.sweep import sweep_scenario

from ..actors import test_engine_sim as engine_tests
from . import test_ledger, test_more_promises, test_pages, test_planner

Killer = Callable[[], object]

# -- planting --------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Mutant:
    """``fragment`` of ``function`` becomes ``mistake``; then ``killer`` must fail and say ``reason``, or one of them
    where the order of events decides which promise is broken first.

    ``function`` is a name in the package: ``core.ledger:EncoderLedger.freed``. Fragments are as in the function's
    source without the function's own indentation, and occur in it once.
    """

    name: str
    function: str
    fragment: str
    mistake: str
    killer: Killer = field(repr=False)
    reason: tuple[str, ...] = field(converter=lambda words: (words,) if isinstance(words, str) else words)

    @property
    def room(self) -> str:
        """The module that is mistaken, as ``core.ledger``."""
        return self.function.split(":")[0]


@contextmanager
def planted(function: str, fragment: str, mistake: str) -> Iterator[None]:
    """Within the block ``function`` has ``mistake`` in the place of ``fragment``."""
    module, path = function.split(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(f"triolet.{module}"))
    original = vars(owner)[name]
    setattr(owner, name, _mistaken(original, fragment, mistake))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _mistaken(original: Any, fragment: str, mistake: str) -> object:
    """The function, decorated as in its source, compiled anew in its own module."""
    function: FunctionType = inspect.unwrap(original.fget if isinstance(original, property) else original)
    source = textwrap.dedent(inspect.getsource(function))
    occurrences = source.count(fragment)
    assert occurrences == 1, f"{fragment!r} occurs {occurrences} times in {function.__qualname__}"
    source = source.replace(fragment, mistake)
    filename = f"<mutant of {function.__qualname__}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    code = compile(source, filename, "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    defined: dict[str, object] = {}
    exec(code, function.__globals__, defined)
    return defined[function.__name__]


# -- killing ---------------------------------------------------------------------------------------------------------


def evidence(error: BaseException) -> str:
    """What a failure says: its message, and the functions and the line that it came from."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(evidence(part) for part in error.exceptions)
    frames = traceback.extract_tb(error.__traceback__)
    where = " > ".join(frame.name for frame in frames)
    return f"{type(error).__name__}: {error}\nat {where}\n{frames[-1].line}"


def verdict(killer: Killer) -> str | None:
    """What the killer says; ``None`` where it passes."""
    said = None
    with unheard() as collect:
        try:
            killer()
        except (Exception, BaseExceptionGroup, pytest.fail.Exception) as error:  # noqa: BLE001  (whatever it comes to)
            said = evidence(error)
        if said is not None and "Deadlock" in said:
            collect()
    return said


@contextmanager
def unheard() -> Iterator[Callable[[], object]]:
    """A deadlock that no cancellation ends leaves tasks behind, which complain when they are collected: collect them
    within the block, and hear none of it."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield gc.collect
    finally:
        sys.unraisablehook = hook


def machine(kind: type[RuleBasedStateMachine], *, examples: int = 100) -> Killer:
    """A state machine's promises over a few examples, the same in every run, not shrunk."""
    chosen = settings(
        derandomize=True,
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )

    def kill() -> None:
        try:
            run_state_machine_as_test(kind, settings=chosen)
        except Exception as error:  # noqa: BLE001  (the teardown's complaint hides the one that came first)
            raise first(error) from None

    return kill


def first(error: BaseException) -> BaseException:
    """The error that came before all that were raised on its way out; a `RuntimeError` is the device's, and planned."""
    chain = [error]
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    return next((error for error in reversed(chain) if not isinstance(error, RuntimeError)), error)


def simulation(*names: str) -> Killer:
    """Scenarios under a few schedules: those of ``names``, or all."""

    def kill() -> None:
        for name in names or SCENARIOS:
            for schedule in test_more_promises.SCHEDULES:
                simulate(SCENARIOS[name], schedule)

    return kill


def swept(scenario: str | Scenario, *kinds: FaultKind, schedule: Schedule | None = None) -> Killer:
    """A scenario with faults of ``kinds`` at every step of every task."""

    def kill() -> None:
        chosen = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
        report = sweep_scenario(chosen, schedule or Batches(), kinds=kinds, most_failures=1)
        assert not report.failures, str(report.failures[0])

    return kill


def engine_test(test: Callable[..., Any], **parameters: object) -> Killer:
    """A test of ``tests/actors/test_engine_sim.py`` with its fixtures, outside of pytest; one that deadlocks fails."""

    def kill() -> None:
        for seed in range(4):
            once(Batches(seed))

    def once(schedule: Schedule) -> None:
        trace = engine_tests.Trace()
        with pytest.MonkeyPatch.context() as monkeypatch, without_collector():
            fixtures = {
                "executor": SimExecutor(),
                "trace": trace,
                "config": lambda **changes: EngineConfig(observer=trace.append, **changes),
                "monkeypatch": monkeypatch,
                **parameters,
            }
            arguments = {name: fixtures.get(name) for name in inspect.signature(test).parameters}
            run_scheduled(functools.partial(test, **arguments), schedule=schedule)

    return kill


@contextmanager
def without_collector() -> Iterator[None]:
    """Memory dies by reference count or not at all."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


LEDGER = machine(test_more_promises.DeepLedgerMachine)
PLANNER = machine(test_planner.PlannerMachine)
TIDY_PLANNER = machine(test_more_promises.TidyPlannerMachine)
PAGES = machine(test_pages.PagesMachine)
SIMULATION = simulation()


# -- the table -------------------------------------------------------------------------------------------------------

MUTANTS: tuple[Mutant, ...] = (
    # the ledger
    Mutant(
        name="bytes given back when the free is sent",
        function="core.ledger:EncoderLedger._evict",
        fragment="self._evicted += 1",
        mistake="self._evicted += 1\n    self.taken -= self._entries[key].size",
        killer=LEDGER,
        reason=("books_balance", "self.ledger.taken"),
    ),
    Mutant(
        name="those who wait are not served when bytes come back",
        function="core.ledger:EncoderLedger.freed",
        fragment="    self._serve(draft)\n",
        mistake="",
        killer=LEDGER,
        reason=("nobody_waits_while_there_is_room", "acquires without an answer"),
    ),
    Mutant(
        name="the last byte of the cache is never used",
        function="core.ledger:EncoderLedger._try_reserve",
        fragment="self.taken + wait.size > self.capacity",
        mistake="self.taken + wait.size >= self.capacity",
        killer=LEDGER,
        reason=("nobody_waits_while_there_is_room", "acquires without an answer"),
    ),
    Mutant(
        name="an item that just fits is refused",
        function="core.ledger:EncoderLedger.acquire",
        fragment="if size > self.capacity",
        mistake="if size >= self.capacity",
        killer=test_more_promises.test_an_item_that_just_fits_is_not_refused,
        reason="fits it",
    ),
    Mutant(
        name="an entry on its way out is handed out again",
        function="core.ledger:EncoderLedger._try_serve",
        fragment="return False  # never resurrected: its output may be gone already",
        mistake="entry.state = State.IDLE\n        self._idle[entry.key] = None",
        killer=test_ledger.test_a_freeing_entry_is_never_resurrected,
        reason="test_a_freeing_entry_is_never_resurrected",
    ),
    Mutant(
        name="a reservation that is rolled back stays in the queue",
        function="core.ledger:EncoderLedger._leave",
        fragment="        del self._reserved[key]\n",
        mistake="",
        killer=LEDGER,
        reason="take_encode_batch",
    ),
    Mutant(
        name="an output that nobody waits for any more stays ready",
        function="core.ledger:EncoderLedger.encoded",
        fragment="if entry.holders:",
        mistake="if entry.state is State.ENCODING:",
        killer=test_more_promises.test_an_output_that_nobody_waits_for_any_more_is_idle,
        reason="what nobody holds is idle",
    ),
    Mutant(
        name="bytes on their way back do not count as room to come",
        function="core.ledger:EncoderLedger._make_room",
        fragment="freeing = sum(entry.size for entry in self._entries.values() if entry.state is State.FREEING)",
        mistake="freeing = 0",
        killer=test_more_promises.test_a_waiting_request_evicts_no_more_than_it_needs,
        reason="nothing more is evicted",
    ),
    Mutant(
        name="the entry used last is evicted first",
        function="core.ledger:EncoderLedger._make_room",
        fragment="for key in list(self._idle):",
        mistake="for key in reversed(list(self._idle)):",
        killer=test_more_promises.test_the_entry_that_is_idle_for_the_longest_time_is_evicted_first,
        reason="the oldest go first",
    ),
    Mutant(
        name="an idle entry goes a moment too late",
        function="core.ledger:EncoderLedger.evict_idle",
        fragment="idle_seconds > now",
        mistake="idle_seconds >= now",
        killer=test_more_promises.test_an_idle_entry_is_kept_for_its_time_since_its_last_use,
        reason="when its time is over",
    ),
    Mutant(
        name="the idle time counts from the first use",
        function="core.ledger:EncoderLedger._to_idle",
        fragment="entry.idle_since = now",
        mistake="entry.idle_since = entry.idle_since or now",
        killer=test_more_promises.test_an_idle_entry_is_kept_for_its_time_since_its_last_use,
        reason="its time runs from the last use",
    ),
    Mutant(
        name="last come, first served",
        function="core.ledger:EncoderLedger.acquire",
        fragment="self._waiting.append(",
        mistake="self._waiting.appendleft(",
        killer=test_ledger.test_a_popular_entry_cannot_keep_a_waiting_request_out,
        reason="not ledger.acquire",
    ),
    Mutant(
        name="only one of the holders hears of a failed encoding",
        function="core.ledger:EncoderLedger.encode_failed",
        fragment="for holder in entry.holders)",
        mistake="for holder in list(entry.holders)[:1])",
        killer=test_more_promises.test_every_holder_hears_of_a_failed_encoding,
        reason="every acquire is answered",
    ),
    Mutant(
        name="a lost output is not encoded again for those who read it",
        function="core.ledger:EncoderLedger.generation_lost",
        fragment="if entry.state is not State.RESERVED:",
        mistake="if entry.state is State.ENCODING:",
        killer=LEDGER,
        reason=("acquires without an answer", "self._reserved[key]"),
    ),
    Mutant(
        name="who waits at the close is served after it",
        function="core.ledger:EncoderLedger.close",
        fragment="    self._waiting.clear()\n",
        mistake="",
        killer=test_more_promises.test_who_waits_at_the_close_is_withdrawn,
        reason="after the close",
    ),
    Mutant(
        name="an encode batch overshoots its budget by its last item",
        function="core.ledger:EncoderLedger.take_encode_batch",
        fragment="if jobs and entry.embeddings > left:",
        mistake="if jobs and left <= 0:",
        killer=test_more_promises.test_an_encode_batch_keeps_its_budget_of_embeddings,
        reason="25 embeddings a batch",
    ),
    Mutant(
        name="a wait that is withdrawn does not let those behind it go on",
        function="core.ledger:EncoderLedger.release",
        fragment="    self._serve(draft)\n",
        mistake="",
        killer=LEDGER,
        reason=("nobody_waits_while_there_is_room", "acquires without an answer"),
    ),
    Mutant(
        name="a joined entry has lost its payload",
        function="core.ledger:EncoderLedger._try_serve",
        fragment="    entry.payload = wait.payload\n",
        mistake="",
        killer=test_more_promises.test_an_entry_that_was_idle_can_be_encoded_again_for_who_joins_it,
        reason="has its payload",
    ),
    Mutant(
        name="an idle entry keeps its payload",
        function="core.ledger:EncoderLedger._leave",
        fragment="    entry.payload = None\n",
        mistake="",
        killer=test_more_promises.test_an_entry_that_nobody_wants_keeps_no_payload,
        reason="keeps its payload",
    ),
    # pages and the planner
    Mutant(
        name="pages are given back and kept",
        function="core.planner:Planner._give_back",
        fragment="    sequence.pages = []\n",
        mistake="",
        killer=PLANNER,
        reason=("a_waiting_request_holds_no_pages", "it is not taken"),
    ),
    Mutant(
        name="the last page is never used",
        function="core.pages:PageAllocator.try_take",
        fragment="if count > len(self._free):",
        mistake="if count >= len(self._free):",
        killer=PAGES,
        reason="self.pages.total) or ()",
    ),
    Mutant(
        name="the cross slot used last is taken first",
        function="core.pages:CrossSlots.take",
        fragment="popitem(last=False)",
        mistake="popitem(last=True)",
        killer=test_pages.test_the_least_recently_used_key_loses_its_place,
        reason='slots.resident("a")',
    ),
    Mutant(
        name="a joined cross slot still counts as idle",
        function="core.pages:CrossSlots.join",
        fragment="    self._idle.pop(key, None)\n",
        mistake="",
        killer=PLANNER,
        reason=("now it holds", "self._slots[key]"),
    ),
    Mutant(
        name="the first user who leaves a cross slot makes it idle",
        function="core.pages:CrossSlots.leave",
        fragment="    if slot.users:\n        return\n",
        mistake="",
        killer=PLANNER,
        reason=("now it holds", "self._slots[key]", "left more often than joined"),
    ),
    Mutant(
        name="a cross slot whose write failed can be joined",
        function="core.planner:Planner._doom",
        fragment="        self._slots.write_failed(write.key, write.slot)\n",
        mistake="        pass\n",
        killer=PLANNER,
        reason=("self._slots[part.cross_slot]", "now it holds", "self.true_tokens("),
    ),
    Mutant(
        name="what a step in flight uses is given back",
        function="core.planner:Planner._settle",
        fragment=" or sequence.in_flight",
        mistake="",
        killer=simulation("abort storm", "shutdown while busy", "preemption"),
        reason="got the tokens",
    ),
    Mutant(
        name="a skipped step's news of ended sequences is lost",
        function="core.planner:Planner.step_failed",
        fragment="    if skipped:  #",
        mistake="    if False:  #",
        killer=test_more_promises.test_the_news_of_an_ended_sequence_survives_a_skipped_step,
        reason="the executor remembers",
    ),
    Mutant(
        name="the list of ended sequences is never emptied",
        function="core.planner:Planner._dispatch",
        fragment="    self._to_forget = []\n",
        mistake="",
        killer=TIDY_PLANNER,
        reason="steps without end for nobody",
    ),
    Mutant(
        name="requests start in a step that had to preempt",
        function="core.planner:Planner._plan",
        fragment="(draft.preempted or not self._try_start(sequence, draft))",
        mistake="not self._try_start(sequence, draft)",
        killer=test_more_promises.test_nobody_starts_in_a_step_that_had_to_preempt,
        reason="starts again before",
    ),
    Mutant(
        name="the oldest request is preempted",
        function="core.planner:Planner._preempt_one",
        fragment="max(running",
        mistake="min(running",
        killer=test_more_promises.test_the_youngest_request_gives_way_where_pages_are_short,
        reason="must not wait for the younger",
    ),
    Mutant(
        name="a token that was drawn counts as still to come",
        function="core.planner:Planner.step_done",
        fragment="        sequence.draws -= part.draw\n",
        mistake="",
        killer=PLANNER,
        reason="beyond the tokens that are known",
    ),
    Mutant(
        name="the last token does not end the request",
        function="core.planner:Planner._commit",
        fragment="sequence.generated >= request.max_tokens",
        mistake="sequence.generated > request.max_tokens",
        killer=PLANNER,
        reason="a request never ended",
    ),
    Mutant(
        name="one token more than wanted is drawn",
        function="core.sequence:Sequence.wants_slice",
        fragment="self.generated + self.draws < self.request.max_tokens",
        mistake="self.generated + self.draws <= self.request.max_tokens",
        killer=test_more_promises.test_nothing_is_fed_beyond_the_last_token_that_is_wanted,
        reason="one position for each token",
    ),
    Mutant(
        name="pages taken for a start that finds no cross slot are lost",
        function="core.planner:Planner._try_start",
        fragment="    pages = self._pages.try_take(math.ceil(first / self.limits.page_size))\n    if pages is None:\n",
        mistake=(
            "    pages = self._pages.try_take(math.ceil(first / self.limits.page_size))\n"
            "    if pages is None or self._slots.used == self.limits.cross_slots and item is not None:\n"
        ),
        killer=PLANNER,
        reason=("pages_balance", "does not fit the pages", "statistics.pages_free == self.limits.pages"),
    ),
    Mutant(
        name="a holder that has released is remembered",
        function="core.planner:Planner._release_entry",
        fragment="    del self._holders[sequence.holder]\n",
        mistake="",
        killer=TIDY_PLANNER,
        reason="remembers a holder",
    ),
    Mutant(
        name="every failed step counts as if its requests were alone in it",
        function="core.planner:Planner.step_failed",
        fragment="alone=len(flight.sequences) == 1",
        mistake="alone=True",
        killer=test_planner.test_a_request_that_crashes_every_step_is_found_by_bisection_and_fails_alone,
        reason="isinstance(end, Finish)",
    ),
    Mutant(
        name="a good step forgives nothing",
        function="core.planner:Planner.step_done",
        fragment="            sequence.suspicion = sequence.crashes_alone = 0\n",
        mistake="            pass\n",
        killer=test_more_promises.test_failures_far_apart_are_forgiven,
        reason="no poison",
    ),
    Mutant(
        name="every step after a failed one is skipped",
        function="core.planner:Planner.step_failed",
        fragment="        self._epoch += 1\n",
        mistake="",
        killer=PLANNER,
        reason="a request never ended",
    ),
    Mutant(
        name="a request goes on from where its failed step would have led",
        function="core.planner:Planner._doom",
        fragment="            sequence.phase = Phase.LEAVING\n",
        mistake="            pass\n",
        killer=PLANNER,
        reason="a request never ended",
    ),
    Mutant(
        name="the token budget is not used up",
        function="core.planner:Planner._plan",
        fragment="budget -= self._add_slice",
        mistake="self._add_slice",
        killer=PLANNER,
        reason="the token budget is kept",
    ),
    Mutant(
        name="a replayed request starts where it had been",
        function="core.planner:Planner._give_back",
        fragment="    sequence.dispatched = 0\n",
        mistake="",
        killer=PLANNER,
        reason=("preemption rolls back", "a request never ended"),
    ),
    Mutant(
        name="a waiting request does not ask again for what has lost its place",
        function="core.planner:Planner._startable",
        fragment="        self._ask_for_entry(sequence)  #",
        mistake="        pass  #",
        killer=test_more_promises.test_who_waits_asks_again_where_its_cross_kv_has_lost_its_place,
        reason="as soon as it has something",
    ),
    Mutant(
        name="who finds its cross KV resident keeps its entry",
        function="core.planner:Planner._take_slot",
        fragment="        self._release_entry(sequence)\n",
        mistake="",
        killer=test_more_promises.test_who_finds_its_cross_kv_resident_gives_its_entry_back_at_once,
        reason="holds it until its step",
    ),
    Mutant(
        name="steps that a lost runner will never answer are waited for",
        function="core.planner:Planner.fail_all",
        fragment="        sequence.in_flight = 0\n",
        mistake="",
        killer=test_more_promises.test_a_runner_that_is_gone_leaves_nothing_taken,
        reason="though the runner is gone",
    ),
    Mutant(
        name="one step too many in flight",
        function="core.planner:Planner.next_step",
        fragment="len(self._flights) >= self.limits",
        mistake="len(self._flights) > self.limits",
        killer=PLANNER,
        reason="steps_in_flight",
    ),
    # the scheduler
    Mutant(
        name="the scheduler ends while requests are still running",
        function="actors.scheduler:Scheduler._finished",
        fragment="(self._draining and self.planner.idle)",
        mistake="self._draining",
        killer=engine_test(engine_tests.test_requests_of_outside_tasks_are_drained_when_the_block_ends),
        reason="EngineClosed",
    ),
    Mutant(
        name="messages behind the one that breaks the scheduler are lost",
        function="actors.scheduler:Scheduler._take_messages",
        fragment="""\
        self._unread.extend(await take_all(self.inbox))
        while self._unread:
            self._handle(self._unread.popleft())
""",
        mistake="        for message in await take_all(self.inbox):\n            self._handle(message)\n",
        killer=engine_test(engine_tests.test_messages_behind_the_one_that_breaks_the_scheduler_are_answered),
        reason="Deadlock",
    ),
    Mutant(
        name="a broken scheduler does not wind up",
        function="actors.scheduler:Scheduler.run",
        fragment="    finally:\n",
        mistake="    except ZeroDivisionError:\n        raise\n    else:\n",
        killer=engine_test(engine_tests.test_messages_behind_the_one_that_breaks_the_scheduler_are_answered),
        reason="Deadlock",
    ),
    Mutant(
        name="requests are not told that the runner is gone",
        function="actors.scheduler:Scheduler._handle",
        fragment="            self.planner.fail_all(error)\n",
        mistake="",
        killer=engine_test(engine_tests.test_requests_of_a_crashed_runner_hear_of_it),
        reason="EngineClosed",
    ),
    Mutant(
        name="one step for each batch of messages",
        function="actors.scheduler:Scheduler._dispatch",
        fragment="while not self._runner_gone",
        mistake="if not self._runner_gone",
        killer=test_more_promises.test_two_steps_are_in_flight_while_requests_decode,
        reason="steps at once",
    ),
    Mutant(
        name="a skipped step counts as a failed one",
        function="actors.scheduler:Scheduler._handle",
        fragment="skipped=skipped",
        mistake="skipped=False",
        killer=swept("plain", FaultKind.STEP_FAILS),
        reason="PoisonRequest",
    ),
    Mutant(
        name="a later order to drain puts the deadline off",
        function="actors.scheduler:Scheduler._handle",
        fragment="min(self._deadline, deadline)",
        mistake="deadline",
        killer=test_more_promises.test_a_more_patient_stop_does_not_prolong_an_impatient_one,
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="an ended request's stream is kept",
        function="actors.scheduler:Scheduler._end",
        fragment="self._streams.pop(request_id)",
        mistake="self._streams[request_id]",
        killer=SIMULATION,
        reason="terminal once",
    ),
    # the encoder cache
    Mutant(
        name="the encode lane stays busy after a batch",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._encoding = False\n            self.tell(events.EncodeDone(keys))\n",
        mistake="            self.tell(events.EncodeDone(keys))\n",
        killer=SIMULATION,
        reason="wait for ever",
    ),
    Mutant(
        name="the encode lane stays busy after a failed batch",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._encoding = False\n            self.tell(events.EncodeBroke(keys))\n",
        mistake="            self.tell(events.EncodeBroke(keys))\n",
        killer=swept("plain", FaultKind.ENCODE_FAILS),
        reason="wait for ever",
    ),
    Mutant(
        name="an output that comes after the close is kept",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._evict_if_closing()\n",
        mistake="",
        killer=swept("shutdown while busy", FaultKind.CANCEL),
        reason="still has entries",
    ),
    Mutant(
        name="the ledger is not closed with the scheduler",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="            self._decide(self.ledger.close(now=trio.current_time()))\n",
        mistake="",
        killer=SIMULATION,
        reason="still has entries",
    ),
    Mutant(
        name="every item is a batch of its own",
        function="actors.encoder_cache:EncoderCache._dispatch",
        fragment="if self._encoding or self._runner_gone:",
        mistake="if self._runner_gone:",
        killer=test_more_promises.test_one_encode_batch_is_in_flight_at_a_time,
        reason="encode batches at once",
    ),
    Mutant(
        name="reserved before dropped",
        function="actors.encoder_cache:EncoderCache._decide",
        fragment="""    for key in decisions.dropped:  # first: what is reserved now may take their room
        self.tell(events.EntryDropped(key))
    for key, size in decisions.reserved:
        self.tell(events.EntryReserved(key, size))
""",
        mistake="""    for key, size in decisions.reserved:
        self.tell(events.EntryReserved(key, size))
    for key in decisions.dropped:
        self.tell(events.EntryDropped(key))
""",
        killer=swept("eviction pressure", FaultKind.ENCODE_FAILS),
        reason="books balance",
    ),
    Mutant(
        name="entries are idle since the start of time",
        function="actors.encoder_cache:EncoderCache._handle",
        fragment="self.ledger.release(holder, key, now=trio.current_time())",
        mistake="self.ledger.release(holder, key, now=0.0)",
        killer=test_more_promises.test_an_idle_output_is_kept_for_its_idle_time,
        reason="freed before its time",
    ),
    Mutant(
        name="nobody wakes up for an idle entry",
        function="actors.encoder_cache:EncoderCache._next_idle_deadline",
        fragment="return math.inf if oldest is None else oldest + self.idle_seconds",
        mistake="return math.inf",
        killer=test_more_promises.test_an_idle_output_is_kept_for_its_idle_time,
        reason="outlives its time",
    ),
    # the runner and its worker
    Mutant(
        name="the device's release can be cancelled",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="trio.move_on_after(self.close_seconds, shield=True)",
        mistake="trio.move_on_after(self.close_seconds)",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="a hung call is waited for",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="trio.move_on_after(self.close_seconds, shield=True)",
        mistake="trio.CancelScope(shield=True)",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="a hung worker is not abandoned",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="        self.worker.abandon(self._close_executor)\n",
        mistake="",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="the worker is not stopped",
        function="actors.gpu_runner:GpuRunner._close",
        fragment="    self.worker.stop()\n",
        mistake="",
        killer=simulation("plain"),
        reason="Deadlock",
    ),
    Mutant(
        name="the encode lane forgets what waits behind a call",
        function="actors.gpu_runner:GpuRunner._encode_lane_turn_over",
        fragment="    self._advance_encode_lane()\n",
        mistake="",
        killer=SIMULATION,
        reason="wait for ever",
    ),
    Mutant(
        name="a failed encode blocks its lane",
        function="actors.gpu_runner:GpuRunner._submit_encode",
        fragment="        self._encode_lane_turn_over()\n",
        mistake="            return\n        self._encode_lane_turn_over()\n",
        killer=swept("plain", FaultKind.ENCODE_FAILS),
        reason="wait for ever",
    ),
    Mutant(
        name="a step planned before a failure was known is run",
        function="actors.gpu_runner:GpuRunner._step",
        fragment="plan.epoch == self._broken_epoch",
        mistake="plan.epoch < self._broken_epoch",
        killer=swept("plain", FaultKind.STEP_FAILS),
        reason="PoisonRequest",
    ),
    Mutant(
        name="the runner leaves with the first lane that closes",
        function="actors.gpu_runner:GpuRunner.run",
        fragment="while self._open_lanes or self._running:",
        mistake="while len(self._open_lanes) == 2:",
        killer=SIMULATION,
        reason="the teardown went through",
    ),
    Mutant(
        name="the books do not hear of what was freed",
        function="actors.gpu_runner:GpuRunner._free",
        fragment="    self.memory = executor.memory()\n",
        mistake="    pass\n",
        killer=test_more_promises.test_the_device_holds_what_the_ledger_says,
        reason="books balance",
    ),
    Mutant(
        name="an error keeps the frames that it came through",
        function="actors.worker:_clear_frames",
        fragment="traceback.clear_frames(current.__traceback__)",
        mistake="pass",
        killer=engine_test(engine_tests.test_a_kept_encode_error_keeps_no_payload),
        reason="payload() is None",
    ),
    # the supervisor
    Mutant(
        name="actors are not shielded from the surroundings",
        function="actors.supervisor:_Status.started",
        fragment="        self.child.scope.shield = True\n",
        mistake="",
        killer=swept("plain", FaultKind.CANCEL),
        reason="a part of the engine failed (Cancelled",
    ),
    Mutant(
        name="a start that was cancelled counts as started",
        function="actors.supervisor:_Status.started",
        fragment="if not cancelled:",
        mistake="if self.child is not None:",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="an actor that breaks is never done",
        function="actors.supervisor:Supervisor._run_child",
        fragment="    finally:\n",
        mistake="    else:\n",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="the teardown can be cancelled",
        function="actors.supervisor:Supervisor._supervise",
        fragment="shield=True",
        mistake="shield=False",
        killer=swept("plain", FaultKind.CANCEL),
        reason="Deadlock",
    ),
    Mutant(
        name="a stage of the teardown has no bound",
        function="actors.supervisor:Supervisor._stop_child",
        fragment="trio.move_on_after(seconds)",
        mistake="trio.CancelScope()",
        killer=swept("plain", FaultKind.STEP_HANGS),
        reason="Deadlock",
    ),
    Mutant(
        name="the body goes on after an actor's crash",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="    self._body.cancel()\n",
        mistake="",
        killer=engine_test(engine_tests.test_after_an_actors_crash_nobody_waits_for_the_drain),
        reason="current_time() < 10",
    ),
    Mutant(
        name="the encoder cache is not told that the runner is gone",
        function="actors.supervisor:Supervisor._child_ended",
        fragment="        self._to_encoder_cache.send_nowait(m.RunnerLost())\n",
        mistake="",
        killer=test_more_promises.test_no_stage_of_a_teardown_is_cut_off_after_the_runners_crash,
        reason="cut off",
    ),
    Mutant(
        name="the runner is stopped before the encoder cache",
        function="actors.supervisor:Supervisor._supervise",
        fragment="""        await self._stop_child("encoder cache", self.config.stage_seconds)
        self._to_runner.send_nowait(m.EncodeLaneClosed())
        await self._stop_child("runner", self.config.stage_seconds)
""",
        mistake="""        self._to_runner.send_nowait(m.EncodeLaneClosed())
        await self._stop_child("runner", self.config.stage_seconds)
        await self._stop_child("encoder cache", self.config.stage_seconds)
""",
        killer=SIMULATION,
        reason="ordered teardown",
    ),
    Mutant(
        name="after a crash the drain is waited for",
        function="actors.supervisor:Supervisor.running",
        fragment="if not (self._stop.is_set() or self._hurried):",
        mistake="if not self._hurried:",
        killer=engine_test(engine_tests.test_after_an_actors_crash_nobody_waits_for_the_drain),
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="a drain does not notice that its surroundings were cancelled",
        function="actors.supervisor:Supervisor._hasten",
        fragment="            self._drain_within(0.0)\n",
        mistake="            pass\n",
        killer=test_more_promises.test_a_drain_ends_at_once_where_the_surroundings_are_cancelled,
        reason="DID NOT RAISE",
    ),
    Mutant(
        name="an abort after the end raises",
        function="actors.supervisor:Supervisor.abort",
        fragment="if not self._stopped.is_set():",
        mistake="if self._stopped is not None:",
        killer=test_more_promises.test_an_abort_after_the_end_is_no_error,
        reason="ClosedResourceError",
    ),
    Mutant(
        name="an error of the teardown hides behind a cancellation",
        function="actors.supervisor:Supervisor._raise_end",
        fragment=" and not (ours and _is_cancellation(body_error))",
        mistake="",
        killer=engine_test(engine_tests.test_an_error_of_the_teardown_is_not_lost_behind_a_cancellation),
        reason="DID NOT RAISE",
    ),
)
