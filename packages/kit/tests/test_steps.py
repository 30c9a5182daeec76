"""The step protocol passes engines that are sound, however they are built, and finds every planted bug.

With ``--hypothesis-profile=soak`` the engine of the page has 100,000 workloads."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import types

import pytest
from attrs import evolve
from hypothesis import settings

from triolet_kit import step_game
from triolet_kit.findings import RAISES_NOTHING, SPEAKS, BrokenPromise
from triolet_kit.step_declaration import StepDeclaration
from triolet_kit.step_engine import Adapter, StepEngine
from triolet_kit.step_game import StepGame
from triolet_kit.step_workloads import StepWorkload, draw_workload, simpler_workloads
from triolet_kit.steps import examine_steps, play_steps, replay_steps

from . import planted, sound_engines
from .ledger_steps import DECLARED, LedgerSteps
from .planted import behind_the_adapter

ALL = StepDeclaration(resets=True)

PLANTED = {  # and the promise that each breaks
    planted.OfferedInItsOwnStep: step_game.ROOM_IS_KEPT,
    planted.ReuseTakesRoomTwice: step_game.EVERY_ASK_ANSWERED,
    planted.AbortIsForgotten: step_game.EVERY_ASK_ANSWERED,
    planted.FirstReaderFrees: step_game.NO_FREE_WHILE_HELD,
    planted.LateFrees: step_game.ROOM_IS_KEPT,
    planted.EveryReleaseGivesRoomBack: step_game.ROOM_IS_KEPT,
    planted.PhantomOfThePreempted: step_game.NO_PHANTOM,
    planted.SharersLoseTheEncoding: step_game.NO_PHANTOM,
    planted.FreesAreLost: step_game.ROOM_IS_KEPT,
    planted.TooLargeWaits: step_game.EVERY_ASK_ANSWERED,
    planted.FailuresStayListed: step_game.NO_PHANTOM,
    planted.CalledOffTwice: step_game.BUDGET_IS_KEPT,
    planted.ResetKeepsTheBooks: step_game.EVERY_ASK_ANSWERED,
    planted.ClosedInFlight: step_game.ALWAYS_FREED,
}
WHOLE = settings.get_current_profile_name() == "soak"
CHANGED = {  # a declaration, and the bugs that live by what it takes away
    "closes": (evolve(ALL, closes=False), {planted.ClosedInFlight}),
    "resets": (evolve(ALL, resets=False), {planted.ResetKeepsTheBooks}),
    "shared": (evolve(ALL, shared=False), {planted.FirstReaderFrees, planted.SharersLoseTheEncoding}),
    "missed_free": (evolve(ALL, missed_free="harmless"), set()),
    "may_fail_after_plan": (evolve(ALL, may_fail_after_plan=False), {planted.FailuresStayListed}),
    "refuses": (evolve(ALL, refuses=False), {planted.TooLargeWaits}),
    "budgets": (evolve(ALL, budgets=False), {planted.CalledOffTwice}),
    "repeats": (evolve(ALL, repeats=False), set()),
    "preempts_within_step": (
        evolve(ALL, preempts_within_step=False),
        {
            planted.OfferedInItsOwnStep,
            planted.PhantomOfThePreempted,
            planted.SharersLoseTheEncoding,
            planted.CalledOffTwice,
        },
    ),
    "reads_in_own_step": (evolve(ALL, reads_in_own_step=True), set()),
    "steps_in_flight": (evolve(ALL, steps_in_flight=1), set()),
}


def first_broken(make_cache, declared, workloads=1000):
    """The first broken promise, without the time to shrink it."""
    for number in range(1, workloads + 1):
        try:
            play_steps(make_cache, declared, draw_workload(random.Random(f"0 {number}"), declared))
        except BrokenPromise as broken:
            return broken.promise
    return None


# -- sound engines ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", sound_engines.ENGINES)
def test_a_sound_engine_has_no_finding_however_it_is_built(engine):
    workloads = 100_000 if WHOLE and engine is StepEngine else 200
    findings = examine_steps(behind_the_adapter(engine), ALL, workloads=workloads)
    print(f"\n{engine.__name__}: {findings}", end="")  # noqa: T201
    findings.raise_if_any()


@pytest.mark.parametrize("changed", CHANGED)
def test_a_sound_engine_has_no_finding_whatever_is_declared(changed):
    declared, _ = CHANGED[changed]
    assert first_broken(Adapter, declared, 150) is None


def test_our_own_ledger_has_no_finding():
    examine_steps(LedgerSteps, DECLARED, workloads=300).raise_if_any()


def test_our_own_ledger_is_asked_for_what_an_earlier_step_is_about_to_free():
    """What is being freed is never resurrected: the acquire waits."""
    answers = []

    class Watched(LedgerSteps):
        def ask(self, request, key, size):
            freed = [told for frees, _ in self.steps for told in frees]
            answer = super().ask(request, key, size)
            answers.extend([answer] if key in freed else [])
            return answer

    examine_steps(Watched, DECLARED, workloads=100).raise_if_any()
    assert set(answers) == {"later"}


def test_the_frees_of_an_engine_that_frees_last_need_not_be_of_the_same_step():
    declared = evolve(ALL, evicts_within_step=False)
    assert first_broken(behind_the_adapter(sound_engines.FreesAStepLater), declared, 400) is None
    assert first_broken(Adapter, declared, 400) in {step_game.ROOM_IS_KEPT, step_game.NO_FREE_WHILE_HELD}


def test_an_engine_that_reads_in_the_step_that_encodes_may_free_what_is_held():
    engine = behind_the_adapter(sound_engines.ReadsInItsOwnStep)
    assert first_broken(engine, evolve(ALL, reads_in_own_step=True)) is None
    assert first_broken(engine, ALL) == step_game.NO_FREE_WHILE_HELD


# -- planted bugs ----------------------------------------------------------------------------------------------------


def test_there_is_a_row_for_every_planted_bug():
    assert list(PLANTED) == StepEngine.__subclasses__()[: len(PLANTED)]


@pytest.fixture
def engine_module(monkeypatch):
    """``my_engine``, with ``make`` to be set."""
    module = types.ModuleType("my_engine")
    monkeypatch.setitem(sys.modules, "my_engine", module)
    return module


def run(source, module, make):
    """Runs the one test of an emitted file."""
    module.make = make
    names: dict[str, object] = {"__name__": "test_emitted"}
    exec(compile(source, "test_emitted.py", "exec"), names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()


@pytest.mark.parametrize("engine", PLANTED)
def test_a_planted_bug_is_found_and_its_regression_test_fails_until_it_is_mended(engine, engine_module):
    """Within 300 workloads, by the promise that it breaks, behind the adapter that the sound engine has."""
    make = behind_the_adapter(engine)
    findings = examine_steps(make, ALL, subject="my_engine:make", workloads=300)
    wanted = next(finding for finding in findings if finding.promise == PLANTED[engine])
    told = f"{wanted.promise.name}, workload {wanted.number}, {len(wanted.table.rows)} rows"
    print(f"\n{engine.__name__}: {told}", end="")  # noqa: T201
    for finding in findings:
        with pytest.raises(BrokenPromise, match=finding.promise.name):
            run(finding.test(), engine_module, make)
        run(finding.test(), engine_module, Adapter)


def test_two_causes_of_one_broken_promise_are_two_findings():
    class Both(planted.FailuresStayListed, planted.PhantomOfThePreempted):
        pass

    names = {finding.name for finding in examine_steps(behind_the_adapter(Both), ALL, workloads=100)}
    assert names >= {"no phantom: after a failure", "no phantom: after a preemption"}


@pytest.mark.parametrize("changed", CHANGED)
def test_a_declaration_hides_no_bug_but_those_that_live_by_what_it_takes_away(changed):
    declared, hidden = CHANGED[changed]
    survivors = {engine for engine in PLANTED if first_broken(behind_the_adapter(engine), declared, 300) is None}
    assert survivors == hidden


def test_a_missed_free_that_is_declared_harmless_is_passed_over_but_not_what_it_leaves_behind():
    """E1 again: what is called off is freed too."""

    class FreesWhatItCallsOff(StepEngine):
        def call_off(self, key):
            super().call_off(key)
            self.frees.append(key)

    harmless = evolve(ALL, missed_free="harmless")
    assert first_broken(behind_the_adapter(FreesWhatItCallsOff), ALL) == step_game.FREES_HIT
    assert first_broken(behind_the_adapter(FreesWhatItCallsOff), harmless) is None
    assert first_broken(behind_the_adapter(planted.OfferedInItsOwnStep), harmless) == step_game.ROOM_IS_KEPT


def test_every_declaration_has_a_row():
    assert {*CHANGED, "evicts_within_step"} == {one.name for one in StepDeclaration.__attrs_attrs__}


# -- what is told ----------------------------------------------------------------------------------------------------


def test_the_history_is_a_table_of_steps():
    findings = examine_steps(behind_the_adapter(planted.PhantomOfThePreempted), ALL, workloads=200)
    assert """
  step  what happens       answer  then on the device
  ----  -----------------  ------  ------------------
  1     r0 asks for a (3)  encode
        r0 is preempted
        r2 asks for a (3)  hit     -
""" in str(findings)


def test_a_bug_that_shows_at_the_end_has_a_short_history_too():
    """The kit's own actions at the end are shrunk as those of a workload are; a wait for ever is told once."""
    lengths = {planted.FreesAreLost: 8, planted.LateFrees: 8, planted.PhantomOfThePreempted: 8}
    for engine, most in {**lengths, planted.ResetKeepsTheBooks: 11}.items():
        for finding in examine_steps(behind_the_adapter(engine), ALL, workloads=200):
            assert len(finding.table.rows) <= most, finding


def test_the_statistics_show_what_was_exercised():
    counts = examine_steps(Adapter, ALL, workloads=200).statistics
    assert all(counts.values())
    quiet = examine_steps(Adapter, evolve(ALL, resets=False, may_fail_after_plan=False), workloads=200).statistics
    assert [name for name, count in quiet.items() if not count] == ["failures", "resets"]


def test_a_replay_shows_one_workload_of_a_search():
    make = behind_the_adapter(planted.PhantomOfThePreempted)
    (finding, *_) = examine_steps(make, ALL, seed=3, workloads=200)
    replay = replay_steps(make, ALL, number=finding.number, seed=3)
    assert replay.broken.name == finding.name
    assert f"workload {finding.number} of seed 3: {finding.name}" in str(replay)
    whole = replay_steps(Adapter, ALL, number=finding.number, seed=3)
    assert whole.broken is None
    assert len(whole.table.rows) > len(replay.table.rows) > len(finding.table.rows)
    assert whole.statistics["steps"] == len([row for row in whole.table.rows if row[0]])


def test_what_a_workload_is_shrunk_to_keeps_its_form():
    """Each candidate can be played, and has sizes for all that is asked for."""
    for number in range(10):
        for simpler in simpler_workloads(draw_workload(random.Random(f"s {number}"), ALL)):
            play_steps(Adapter, ALL, simpler)


def test_what_cannot_be_done_is_passed_over():
    game = StepGame(Adapter(1), 1, {"a": 1}, StepDeclaration(steps_in_flight=1))
    game.executed()
    game.release("r0", "a")
    game.finish("r0")
    game.reset()
    game.plan([("preempt", "r0"), ("ask", "r0", "a"), ("preempt", "r0"), ("ask", "r0", "a")])
    game.plan([("ask", "r0", "a")])
    assert [row[1] for row in game.played.rows] == ["r0 asks for a (1)", "r0 is preempted"]


def test_a_reader_whose_step_has_not_run_does_not_release():
    game = StepGame(Adapter(1), 1, {"a": 1}, ALL)
    game.plan([("ask", "r0", "a")])
    game.release("r0", "a")
    assert game.holds
    game.executed()
    game.release("r0", "a")
    assert not game.holds


# -- adapters that are wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (None, "plan returned None"),
        ((["hit"], []), "allowed: a tuple of answers, frees and encodes"),
        (([], [], []), "allowed: one of"),
        ((["yes"], [], []), "plan answered"),
        ((["encode"], [], ["b"]), "keys that were asked for"),
        ((["hit"], None, []), "what plan frees is None; allowed: texts"),
        ((["hit"], "a", []), "what plan frees is 'a'"),
        ((["hit"], [], [1]), r"what plan encodes is \[1\]"),
    ],
)
def test_an_answer_of_the_wrong_form_is_a_finding_with_its_history(plan, told):
    class Wrong(Adapter):
        def plan(self, wanted, budget):
            return plan

    workload = StepWorkload(1, {"a": 1}, (("plan", ([("ask", "r0", "a")],)),))
    with pytest.raises(BrokenPromise, match=told) as found:
        play_steps(Wrong, ALL, workload)
    assert found.value.promise == SPEAKS
    assert found.value.table.rows[-1][:2] == ("1", "r0 asks for a (1)")


def adapter(**methods):
    return type("Wrong", (Adapter,), methods)


class NoClose:
    """An adapter that never hears of the end."""

    def __init__(self, room):
        sound = Adapter(room)
        self.plan, self.executed, self.release, self.finish = sound.plan, sound.executed, sound.release, sound.finish
        self.reset = sound.reset


def answers_instead(says, instead):
    def plan(self, wanted, budget):
        answers, frees, encodes = Adapter.plan(self, wanted, budget)
        return [instead if answer == says else answer for answer in answers], frees, encodes

    return plan


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (adapter(plan=answers_instead("hit", "encode")), "answered 'encode' for"),
        (adapter(plan=answers_instead("encode", "hit")), "answered 'hit' for"),
        (adapter(plan=lambda self, wanted: None), "TypeError: .*takes 2 positional arguments but 3 were given"),
        (lambda room: object(), "object has no plan, executed, release, finish; see"),
        (NoClose, "has no close; see .*, or declare closes=False"),
        (LedgerSteps, "has no reset; see .*StepCache, or declare resets=False"),
    ],
)
def test_a_wrong_adapter_is_a_finding_and_the_search_goes_on(wrong, told):
    """Each workload is played, and the other findings stay."""
    findings = examine_steps(wrong, ALL, workloads=50)
    assert findings.played == 50
    assert findings.found[0].promise == SPEAKS
    assert re.search(told, findings.found[0].what)


def test_what_is_found_beside_a_wrong_answer_stays():
    class Rarely(behind_the_adapter(planted.FreesAreLost)):
        def plan(self, wanted, budget):
            planned = super().plan(wanted, budget)
            return None if len(wanted) == 5 else planned

    findings = examine_steps(Rarely, ALL, workloads=200)
    assert {SPEAKS, step_game.ROOM_IS_KEPT} <= {finding.promise for finding in findings}


@pytest.mark.parametrize("wrong", [{"missed_free": "sometimes"}, {"steps_in_flight": 3}])
def test_a_declaration_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        StepDeclaration(**wrong)


def test_an_error_while_the_engine_is_made_is_a_finding():
    class Raises(StepEngine):
        def __init__(self, room):
            super().__init__(room)
            assert room > 1, "no room"

    findings = examine_steps(behind_the_adapter(Raises), ALL, workloads=50)
    assert ["no room" in finding.what for finding in findings] == [True]


def test_an_error_of_the_engine_is_a_finding_with_its_history():
    class Raises(StepEngine):
        def step_done(self, failed):
            raise KeyError("gone")

    (finding,) = examine_steps(behind_the_adapter(Raises), ALL, workloads=50)
    assert finding.promise == RAISES_NOTHING
    assert re.fullmatch(r"KeyError: 'gone' \(tests/test_steps.py:\d+, in step_done\)", finding.what)
    assert [row[1] for row in finding.table.rows][-2:] == ["step 1 has run", finding.what]


def test_an_error_in_a_plan_is_told_below_what_was_asked():
    class Raises(StepEngine):
        def schedule(self, request, key, size):
            raise KeyError("gone")

    (finding,) = examine_steps(behind_the_adapter(Raises), ALL, workloads=50)
    assert [row[0] for row in finding.table.rows] == ["1", ""]
    assert finding.table.rows[0][1].startswith("r0 asks for ")


@pytest.mark.real_time
def test_the_kit_needs_attrs_alone():
    """In a process of its own, in which nothing else that Triolet depends on can be imported."""
    hidden = ["trio", "numpy", "torch", "click", "pydantic", "transformers", "hypothesis", "pytest"]
    imports = [f"import triolet_kit.{name}" for name in ("schedulers", "steps", "step_engine")]
    source = f"import sys; sys.modules |= dict.fromkeys({hidden}); " + "; ".join(imports)
    source += "; print([name for name in sys.modules if name.startswith('triolet.core')])"
    found = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True)
    assert found.stdout == "[]\n"
