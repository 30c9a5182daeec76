"""The kit for schedulers: it finds what is planted, by the promise that it breaks, and nothing where nothing is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import settings
from transformers_scheduler import DECLARED, TransformersScheduler
from triolet_scheduler import TrioletScheduler

from triolet_kit.findings import ALWAYS_FREED, RAISES_NOTHING, SPEAKS, BrokenPromise, Promise
from triolet_kit.paged_device import BALANCE, GIVEN_AWAY, PagedDevice
from triolet_kit.scheduler_play import FREE_FOLLOWS, REFUSED, STARVES, TERMINAL
from triolet_kit.scheduler_workloads import answer, draw
from triolet_kit.schedulers import (
    PROMISES,
    Chunk,
    Item,
    Limits,
    MakeScheduler,
    NewRequest,
    SchedulerDeclaration,
    SchedulerWorkload,
    Step,
    examine_scheduler,
    play_scheduler,
    replay_scheduler,
)

from .mutants_of_schedulers import (
    MUTANTS,
    DeliversOneTooMany,
    FreesTwice,
    GoesOnBehindTheEnd,
    HashesWithoutParent,
    LeaksOnPreemption,
    SamplesOneTooMany,
    ServesTheLastFirst,
)
from .small_scheduler import Sequence, SmallScheduler
from .small_states import MUTANTS_OF_STATES, StatefulScheduler

STATES = SchedulerDeclaration(settled=True, refuses=True, states=True)
STRICT = SchedulerDeclaration(settled=True, refuses=True)
WORKLOADS = 1000


def soaked(few: int, many: int) -> int:
    return many if settings.get_current_profile_name() == "soak" else few


def broken(
    make: MakeScheduler, declared: SchedulerDeclaration, workloads: int = WORKLOADS
) -> Iterator[tuple[int, Promise]]:
    """Each workload that breaks a promise, by its number, and the promise."""
    for number in range(1, workloads + 1):
        try:
            play_scheduler(make, draw(declared, Random(f"0 {number}")), declared)
        except BrokenPromise as error:
            yield number, error.promise


@pytest.mark.parametrize(("mutant", "promise"), MUTANTS.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_bug_is_found_by_its_promise(mutant: type[SmallScheduler], promise: Promise) -> None:
    assert promise in (found for _, found in broken(mutant, STRICT))


def test_every_promise_is_broken_by_a_mutant() -> None:
    assert {*MUTANTS.values(), *MUTANTS_OF_STATES.values(), RAISES_NOTHING} == set(PROMISES)


@pytest.mark.parametrize(("mutant", "promise"), MUTANTS_OF_STATES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_a_bug_of_states_is_found_by_its_promise(mutant: type[SmallScheduler], promise: Promise) -> None:
    assert promise in (found for _, found in broken(mutant, STATES))


def test_nothing_is_found_where_states_are_sound() -> None:
    """And the search comes to hits."""
    seen = examine_scheduler(StatefulScheduler, STATES, workloads=soaked(150, 20_000), must_happen=["state hits"])
    seen.raise_if_any()
    assert not seen.thin


def test_nothing_is_found_in_a_sound_scheduler() -> None:
    played = soaked(500, 100_000)
    assert not list(broken(SmallScheduler, STRICT, played))


def test_nothing_is_found_in_our_planner_and_ledger() -> None:
    """Strictly: pages settle before another sequence gets them."""
    assert not list(broken(TrioletScheduler, SchedulerDeclaration(settled=True), soaked(200, 100_000)))
    assert not list(broken(TrioletScheduler, SchedulerDeclaration(settled=True, states=True), soaked(100, 100_000)))


@pytest.mark.parametrize(
    "declared",
    [
        SchedulerDeclaration(settled=True, refuses=True, fair=False),
        SchedulerDeclaration(settled=False, refuses=True),
        SchedulerDeclaration(settled=True, refuses=True, missed_free="harmless"),
        SchedulerDeclaration(settled=True, refuses=True, priorities=False),
        SchedulerDeclaration(settled=True, refuses=True, decodes_all=True),
        SchedulerDeclaration(settled=True, refuses=True, aborts=False),
    ],
    ids=["not fair", "not settled", "misses are harmless", "no priorities", "decodes all", "no aborts"],
)
def test_a_declaration_hides_no_broken_promise_of_another_kind(declared: SchedulerDeclaration) -> None:
    hidden = set() if declared.settled else {FREE_FOLLOWS}
    hidden |= set() if declared.aborts else {GIVEN_AWAY, ALWAYS_FREED}
    mutants = {promise: mutant for mutant, promise in MUTANTS.items() if promise not in {STARVES, *hidden}}
    for promise, mutant in mutants.items():
        assert promise in (found for _, found in broken(mutant, declared)), f"{mutant.__name__} under {declared}"


def test_who_does_not_promise_fairness_may_let_others_pass() -> None:
    assert not list(broken(ServesTheLastFirst, SchedulerDeclaration(settled=True, fair=False), 300))


def test_a_finding_is_a_table_of_steps_worst_first() -> None:
    findings = examine_scheduler(HashesWithoutParent, STRICT, workloads=30)
    told = str(findings)
    assert "prefix hits are what was computed: another position (wrong output, without an error; workload" in told
    assert "Why it matters: A request skips the computation of its prompt" in told
    assert "what happens" in told
    assert "in pages" in told
    assert findings.found[0].workload.startswith("SchedulerWorkload(limits=Limits(")


@pytest.mark.parametrize(("mutant", "number"), [(FreesTwice, 40), (LeaksOnPreemption, 30), (HashesWithoutParent, 10)])
def test_the_regression_test_fails_on_the_faulty_scheduler_and_passes_on_the_mended_one(
    mutant: type[SmallScheduler], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("my_engine")
    monkeypatch.setitem(sys.modules, "my_engine", module)
    findings = examine_scheduler(mutant, STRICT, workloads=number, subject="my_engine:make")
    assert findings
    source = findings.tests()
    for make, sound in ((mutant, False), (SmallScheduler, True)):
        module.make = make
        space: dict[str, object] = {}
        exec(compile(source, "test_found.py", "exec"), space)
        tests = [test for name, test in space.items() if name.startswith("test_")]
        assert len(tests) == len(findings)
        for test, finding in zip(tests, findings, strict=True):
            if sound:
                test()
            else:
                with pytest.raises(AssertionError, match=finding.promise.name):
                    test()


def test_the_answer_of_a_request_is_what_the_device_gives_it() -> None:
    request = NewRequest(id="r0", tokens=(1, 2, 1), max_tokens=6)
    got = []

    class Told(SmallScheduler):
        def update(self, step, tokens):  # type: ignore[no-untyped-def]
            got.extend(tokens.values())
            return super().update(step, tokens)

    limits = Limits(pages=8, page_size=2, max_step_tokens=4, max_running=1, room=1, steps_in_flight=1)
    workload = SchedulerWorkload(limits=limits, requests=(request,), operations=(("ask", 0), ("plan", 0)))
    play_scheduler(Told, workload)
    assert tuple(got[: len(answer(request))]) == answer(request)


def test_an_error_of_the_scheduler_is_a_finding() -> None:
    class Raises(SmallScheduler):
        def schedule(self):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError("in the step loop")

    [finding] = examine_scheduler(Raises, workloads=3)
    assert finding.promise.name == "raises nothing"
    assert "ZeroDivisionError: in the step loop" in finding.what


def found_in(make: MakeScheduler, **options: object) -> str:
    return str(examine_scheduler(make, workloads=40, **options))  # type: ignore[arg-type]


def test_what_goes_on_behind_its_end_is_told_as_that() -> None:
    """Not only as tokens that nobody has, or as a request that never ends."""
    assert "has got the end-of-text (0), and the scheduler does not end it" in found_in(GoesOnBehindTheEnd)
    one_step = SchedulerDeclaration(steps_in_flight=1)  # a second one in flight samples the token too many first
    assert "tokens, and the scheduler does not end it" in found_in(DeliversOneTooMany, declared=one_step)
    assert "a step samples token" in found_in(SamplesOneTooMany)


class DecodesAll(SmallScheduler):
    """A step has a token of each request that decodes, without a look at the budget, or else parts of prompts."""

    prefills = True

    def schedule(self):  # type: ignore[no-untyped-def]
        self.prefills = True
        step = super().schedule()
        if step is None:
            self.prefills = False
            step = super().schedule()
        return step

    def go_on(self, sequence):  # type: ignore[no-untyped-def]
        if self.prefills != (sequence.wanted < 2):
            self.left = self.left if self.prefills else 1
            super().go_on(sequence)


class Reserves(SmallScheduler):
    """A request runs if the token behind its last one fits too, and three more."""

    def fits(self, request):  # type: ignore[no-untyped-def]
        return super().fits(replace(request, max_tokens=request.max_tokens + 4))


class Discards(SmallScheduler):
    """Who is preempted loses the tokens that steps in flight sample for it."""

    def go_on(self, sequence):  # type: ignore[no-untyped-def]
        lost = [one for one in self.running if one.in_flight == one.sampling == 1 and one is not sequence]
        if sequence in self.running and self.missing(sequence, sequence.fed + 1) > self.available() and lost:
            self.preempt(lost[-1])
        super().go_on(sequence)

    def update(self, step, tokens):  # type: ignore[no-untyped-def]
        for at, (one, life, chunk) in enumerate(self.flights[0]):
            if chunk.samples and life != one.life:
                one.sampling -= 1
                self.flights[0][at] = one, life, evolve(chunk, samples=False)
        return super().update(step, tokens)


class NobodyLeaves(SmallScheduler):
    """There is no abort."""

    finish = None  # type: ignore[assignment]


class TokenByToken(SmallScheduler):
    """It has no pages."""

    def __attrs_post_init__(self) -> None:
        assert self.limits.page_size == 1
        super().__attrs_post_init__()


@pytest.mark.parametrize(
    ("engine", "option", "otherwise"),
    [
        (DecodesAll, {"decodes_all": True}, BALANCE),
        (NobodyLeaves, {"aborts": False}, SPEAKS),
        (Reserves, {"headroom": 4}, REFUSED),
        (Discards, {"discards": True}, TERMINAL),
        (TokenByToken, {"page_sizes": (1,)}, RAISES_NOTHING),
    ],
)
def test_an_engine_is_sound_under_its_declaration(
    engine: type[SmallScheduler], option: dict[str, Any], otherwise: Promise
) -> None:
    unfair = evolve(STRICT, fair=False)
    assert not list(broken(engine, evolve(unfair, **option), 300))
    assert otherwise in (found for _, found in broken(engine, unfair))


def test_requests_are_values_of_one_class_whoever_asks() -> None:
    """The kit's own ones too, and those of regression tests: engines hash them and make others of them."""

    class Keeps(SmallScheduler):
        def add_request(self, request):  # type: ignore[no-untyped-def]
            {request: request.items, request.items: None}  # noqa: B018
            return super().add_request(replace(request, priority=0))

    examine_scheduler(Keeps, SchedulerDeclaration(priorities=False), workloads=50).raise_if_any()


@pytest.mark.parametrize(
    ("method", "answer", "told"),
    [
        ("schedule", [], r"schedule returned \[\]; allowed: None, or a step with chunks"),
        ("schedule", SimpleNamespace(chunks=["r0"]), "the chunk 'r0' .*; allowed: chunks with request, start"),
        ("schedule", SimpleNamespace(chunks=[Chunk("r0", 0.5, 1, [0], samples=False)]), "allowed: a text, and numbers"),
        ("schedule", SimpleNamespace(chunks=(), encodes="i0"), "what a step encodes is 'i0'"),
        ("schedule", SimpleNamespace(chunks=(), frees=None), "what a step frees is None"),
        ("update", "r0", "what update returned is 'r0'"),
        ("update", [7], r"what update returned is \[7\]"),
    ],
)
def test_a_wrong_adapter_is_a_finding_with_its_history(method: str, answer: object, told: str) -> None:
    wrong = type("Wrong", (SmallScheduler,), {method: lambda *_: answer})
    if method == "update":
        wrong.schedule = lambda _: Step()
    findings = examine_scheduler(wrong, workloads=20)
    assert findings.played == 20
    assert findings.found[0].promise == SPEAKS
    assert re.search(told, findings.found[0].what)
    assert findings.found[0].table.rows[-1][0] == ("plan" if method == "schedule" else "run")


def test_a_method_that_is_missing_is_told() -> None:
    [finding] = examine_scheduler(lambda _: object(), workloads=20)  # type: ignore[arg-type,return-value]
    assert finding.what == "object has no add_request, schedule, update, finish; see triolet_kit.Scheduler"


class Plain(SmallScheduler):
    """Its steps are objects of its own, and their page tables go on changing."""

    def schedule(self):  # type: ignore[no-untyped-def]
        step = super().schedule()
        if step is None:
            return None
        parts = [(part, self.sequences[part.request].pages) for part in step.chunks]
        chunks = [
            SimpleNamespace(request=one.request, start=one.start, length=one.length, pages=pages, samples=one.samples)
            for one, pages in parts
        ]
        self.mine = SimpleNamespace(chunks=chunks, step=step)
        return self.mine

    def update(self, step, tokens):  # type: ignore[no-untyped-def]
        return super().update(step.step, tokens)


def test_steps_may_be_plain_objects_and_their_lists_may_change() -> None:
    assert not list(broken(Plain, SchedulerDeclaration(settled=True, items=False), 300))


def test_the_statistics_show_what_was_exercised() -> None:
    assert all(examine_scheduler(SmallScheduler, STRICT, workloads=200).statistics.values())
    little = SchedulerDeclaration(steps_in_flight=1, items=False, fair=False, aborts=False)
    counts = examine_scheduler(SmallScheduler, little, workloads=100).statistics
    unseen = ["refused", "clients left", "storms", "steps beside another", "encodings", "frees"]
    assert [name for name, count in counts.items() if not count] == unseen


def test_a_replay_shows_one_workload_of_a_search() -> None:
    (finding, *_) = examine_scheduler(HashesWithoutParent, STRICT, seed=3, workloads=30)
    replay = replay_scheduler(HashesWithoutParent, STRICT, number=finding.number, seed=3)
    assert replay.broken is not None
    assert replay.broken.name == finding.name
    whole = replay_scheduler(SmallScheduler, STRICT, number=finding.number, seed=3)
    assert whole.broken is None
    assert len(whole.table.rows) > len(replay.table.rows) > len(finding.table.rows)


def test_every_number_of_a_workload_gets_as_small_as_it_can() -> None:
    """Pages, places, steps in flight, tokens and their values."""
    [finding] = examine_scheduler(HashesWithoutParent, STRICT, workloads=5)
    least = Limits(pages=3, page_size=1, max_step_tokens=16, max_running=1, room=1, steps_in_flight=1)
    assert finding.shrunk.limits == least
    assert sorted(request.tokens for request in finding.shrunk.requests) == [(1,), (1, 1, 1)]


def test_a_request_that_was_preempted_is_named_and_an_adapter_may_count_events() -> None:
    class Counts(SmallScheduler):
        def __attrs_post_init__(self) -> None:
            super().__attrs_post_init__()
            self.events = {"gives way": 0}

        def preempt(self, victim: Sequence) -> None:
            self.events["gives way"] += 1
            super().preempt(victim)

    replays = (replay_scheduler(Counts, STRICT, number=number) for number in range(1, 99))
    replay = next(one for one in replays if one.statistics["preemptions"])
    assert replay.statistics["gives way"]
    assert ", preempted before: " in str(replay)
    examine_scheduler(Counts, STRICT, workloads=replay.number, must_happen=["gives way"]).raise_if_any()


def test_an_engine_may_take_turns_without_work() -> None:
    class Dawdles(SmallScheduler):
        turns = 0

        def schedule(self):  # type: ignore[no-untyped-def]
            self.turns += 1
            return None if self.turns % 12 else super().schedule()

    assert not list(broken(Dawdles, evolve(STRICT, fair=False), 40))


def test_worlds_are_small_and_large() -> None:
    worlds = [draw(SchedulerDeclaration(), Random(number)) for number in range(300)]
    pages, requests = {one.limits.pages for one in worlds}, {len(one.requests) for one in worlds}
    assert (min(pages), max(pages) > 50, min(requests), max(requests)) == (2, True, 1, 16)


def test_a_bug_that_shows_at_the_end_has_a_short_history_too() -> None:
    for mutant, most in ((FreesTwice, 14), (HashesWithoutParent, 10)):
        findings = examine_scheduler(mutant, STRICT, workloads=40)
        assert findings
        assert all(len(finding.table.rows) <= most for finding in findings)


@pytest.mark.parametrize(
    ("step", "ended", "told"),
    [
        (Step(encodes=["cat"]), [], "a step encodes cat, which no request has"),
        (Step(chunks=[Chunk("r9", 0, 1, [0], samples=False)]), [], "a step runs r9, which is not known"),
        (Step(), ["r9"], "the scheduler says that r9 ends, which it was never given"),
    ],
)
def test_what_nobody_knows_is_told_as_unknown(step: Step, ended: list[str], told: str) -> None:
    class Wrong(SmallScheduler):
        def schedule(self):  # type: ignore[no-untyped-def]
            return step

        def update(self, *_):  # type: ignore[no-untyped-def]
            return ended

    assert told in str(examine_scheduler(Wrong, workloads=3))


def test_an_item_that_is_freed_while_its_reader_is_preempted_is_a_phantom_then() -> None:
    """It runs anew: what was freed before is not freed while it runs."""
    device = PagedDevice(page_size=4, room=1)
    device.add(NewRequest(id="r0", tokens=(1, 9, 1), max_tokens=1, items=(Item("cat", 1, 1, 1),)))
    device.run(Step(encodes=["cat"], chunks=[Chunk("r0", 0, 1, [0], samples=False)]))
    device.run(Step(frees=["cat"]))
    with pytest.raises(
        AssertionError, match="no phantom: r0 reads cat at position 1, and it was freed before r0 began"
    ):
        device.run(Step(chunks=[Chunk("r0", 0, 3, [1], samples=True)]))


@pytest.mark.parametrize(
    "wrong", [{"missed_free": "Fault"}, {"steps_in_flight": 7}, {"steps_in_flight": 0}, {"page_sizes": (0,)}]
)
def test_a_declaration_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerDeclaration(**wrong)


@pytest.mark.parametrize(("error", "promise"), [(ZeroDivisionError, "raises nothing"), (None, "books balance")])
def test_a_failure_that_comes_once_is_a_finding(error: type[Exception] | None, promise: str) -> None:
    """It is played again for its history, and the second play may pass."""
    made = []

    class FailsOnce(SmallScheduler):
        def schedule(self):  # type: ignore[no-untyped-def]
            if not made:
                made.append(1)
                if error is not None:
                    raise error("once")
                return Step(chunks=[Chunk("r0", 0, 99, [0], samples=False)])
            return super().schedule()

    [finding] = examine_scheduler(FailsOnce, workloads=1)
    assert finding.promise.name == promise
    assert finding.table.rows
    assert "did not break this again" in str(finding)


# -- transformers --------------------------------------------------------------------------------------------------

ABANDONED = SchedulerWorkload(
    limits=Limits(pages=3, page_size=4, max_step_tokens=16, max_running=2, room=0, steps_in_flight=1),
    requests=(
        NewRequest(id="r0", tokens=(2, 2, 1, 2), max_tokens=2),
        NewRequest(id="r1", tokens=(1,), max_tokens=2),
        NewRequest(id="r2", tokens=(2, 2, 1, 2, 1, 2, 3, 1, 2), max_tokens=1),
    ),
    operations=(
        *(("ask", 0), ("plan", 0), ("run", 0), ("plan", 0), ("run", 0)),
        *(("ask", 1), ("ask", 2), ("plan", 0), ("leave", 1)),
    ),
)
"""Found by the kit, and shrunk: r2 gives way for r1, whose client leaves."""


class Mended(TransformersScheduler):
    """Newcomers are let in again when nobody is left who could end."""

    def schedule(self):  # type: ignore[no-untyped-def]
        step = super().schedule()
        scheduler = self.processor.scheduler
        if step is None and scheduler.block_new_requests and not scheduler.active_requests:
            scheduler.block_new_requests = False
            return super().schedule()
        return step


def test_transformers_never_runs_who_gave_way_for_a_request_whose_client_leaves() -> None:
    """A bug of transformers 5.23.0, see docs/verification.md. When this test fails, it is mended there."""
    with pytest.raises(BrokenPromise, match="nobody starves: r2 never end, though nobody else asks"):
        play_scheduler(TransformersScheduler, ABANDONED, DECLARED)
    play_scheduler(Mended, ABANDONED, DECLARED)


def test_nothing_else_is_found_in_the_paged_cache_of_transformers() -> None:
    examine_scheduler(Mended, DECLARED, workloads=soaked(30, 10_000)).raise_if_any()
