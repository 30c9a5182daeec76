"""The search of the kit: what is found, in which order, and what becomes of it."""

from __future__ import annotations

import contextlib
import gc
import json
import pickle

import pytest
from attrs import evolve

from triolet_kit.findings import RAISES_NOTHING, BrokenPromise, Findings, Promise, Script, Severity, Table
from triolet_kit.search import Search, import_of, raised, without_some

NO_SEVEN = Promise("no seven", Severity.CORRUPTS, "Sevens end in tears.")
NO_NINE = Promise("no nine", Severity.WASTES, "Nines take long.")
SCRIPT = Script("kit", ("play", "unused"), "from engine import make", "play", ("make",))


IMPORTS = "from kit import play\n\nfrom engine import make\n"


def draw(chance):
    return tuple(chance.randrange(10) for _ in range(12))


def play(workload, played):
    """Breaks in three ways; a nine alone is seen first."""
    if 9 in workload:
        raise BrokenPromise(NO_NINE, "there is a nine")
    if 7 in workload and 3 in workload:
        at = "before" if workload.index(7) < workload.index(3) else "behind"
        raise BrokenPromise(NO_SEVEN, f"a seven {at} a three", Table(("step", "number"), [("1", "7")]), at)
    played.statistics["numbers"] += len(workload)


def searching(play):
    return Search(
        draw=draw, play=play, simpler=without_some, script=SCRIPT, promises=(NO_SEVEN, NO_NINE), counted=("numbers",)
    )


def search(**options):
    return searching(play).examine(**options)


def test_every_way_to_break_a_promise_is_found_once_the_worst_first_and_shrunk():
    findings = search()
    assert [(finding.promise, finding.kind) for finding in findings][-1] == (NO_NINE, "")
    assert {(finding.kind, finding.workload) for finding in findings} == {
        ("before", "(7, 3)"),
        ("behind", "(3, 7)"),
        ("", "(9,)"),
    }
    assert findings.played == 1000


def test_the_same_seed_finds_the_same_and_another_one_plays_other_workloads():
    assert str(search(seed=3)) == str(search(seed=3))
    seen: dict[int, list[tuple[int, ...]]] = {1: [], 2: []}
    for seed, there in seen.items():
        searching(lambda workload, _, there=there: there.append(workload)).examine(seed=seed, workloads=5)
    assert seen[1] != seen[2]


def test_the_report_tells_what_why_the_steps_and_the_workload():
    told = str(search())
    assert told.startswith("3 findings in 1000 workloads, the worst first\n\n1. no seven: before (wrong output")
    assert "Why it matters: Sevens end in tears." in told
    assert "  step  number\n  ----  ------\n  1     7\n\n  (7, 3)" in told


def test_without_findings_the_report_says_how_many_workloads_there_were():
    findings = searching(lambda *_: None).examine(workloads=7)
    assert str(findings) == "no promise was broken in 7 workloads\n\nwhat happened: numbers 0"
    assert (bool(findings), findings.tests()) == (False, "")
    findings.raise_if_any()


def test_the_worst_is_raised_with_the_whole_report():
    with pytest.raises(BrokenPromise, match="no seven") as found:
        search().raise_if_any()
    assert "3 findings" in found.value.__notes__[0]


def test_a_finding_that_does_not_come_again_says_so():
    """State of one subject that reaches the next."""
    seen = []

    def forgetful(workload, played):
        seen.append(workload)
        if len(seen) == 3:
            raise BrokenPromise(NO_NINE, "the third")

    (finding,) = searching(forgetful).examine(workloads=5)
    assert not finding.repeats
    assert "did not break this again" in str(finding)


def test_a_fault_of_the_kit_ends_the_search():
    def wrong(workload, played):
        raise LookupError("ours")

    with pytest.raises(LookupError, match="ours"):
        searching(wrong).examine()


@pytest.fixture
def _thawed():
    """Our own tests freeze what they import."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("_thawed")
@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_collects_garbage_does_not_look_through_the_whole_process(fails):
    """What was there before the search is frozen until its end."""
    seen = []

    def collects(workload, played):
        seen.append(len(gc.get_objects()))
        if fails:
            raise LookupError("ours")

    before = len(gc.get_objects())
    with contextlib.suppress(LookupError):
        searching(collects).examine(workloads=3)
    assert max(seen) < before / 2
    assert gc.get_freeze_count() == 0


def test_objects_that_the_process_has_frozen_stay_frozen():
    """Their count is no proof: a frozen object may end during the search."""
    ours = [[]]
    gc.freeze()
    search(workloads=3)
    assert not any(item is ours for item in gc.get_objects())


def test_what_is_ignored_is_counted_by_promise_and_kind():
    ignored = ["no nine", "no seven: behind"]
    findings = search(ignore=ignored)
    assert [finding.name for finding in findings] == ["no seven: before"]
    assert findings.ignored.keys() == set(ignored)
    assert f"ignored {sum(findings.ignored.values())}: no nine {findings.ignored['no nine']}, " in str(findings)
    with pytest.raises(ValueError, match="no promise 'no ten'; allowed: one of no seven, no nine"):
        search(ignore=["no ten"])


def test_findings_seed_and_statistics_are_json():
    findings = search(seed=3, ignore=["no nine"])
    told = json.loads(findings.as_json())
    assert (told["seed"], told["workloads"], told["ignored"]) == (3, 1000, findings.ignored)
    assert told["statistics"] == {"numbers": findings.statistics["numbers"]}
    first = told["findings"][0]
    assert (first["promise"], first["severity"], first["history"]) == (
        "no seven",
        "corrupts",
        [{"step": "1", "number": "7"}],
    )
    assert first["test"] == findings.found[0].test()


def test_a_replay_plays_one_workload_as_it_was_drawn():
    (finding, *_) = search(seed=3)
    replay = searching(play).replay(finding.number, seed=3)
    assert (replay.broken.name, len(eval(replay.workload))) == (finding.name, 12)
    assert json.loads(replay.as_json())["broken"]["kind"] == finding.kind
    replays = [searching(play).replay(number) for number in range(1, 30)]
    sound = next(replay for replay in replays if replay.broken is None)
    assert f"workload {sound.number} of seed 0: no promise was broken" in str(sound)
    assert json.loads(sound.as_json())["broken"] is None


def test_errors_of_the_subject_are_findings_by_type_and_function():
    def fails(workload, played):
        try:
            {}[len(workload)]
        except KeyError as error:
            raise raised(error, Table()) from error

    (finding,) = searching(fails).examine(workloads=3)
    assert (finding.promise, finding.kind) == (RAISES_NOTHING, "KeyError in fails")


def test_a_bare_assert_is_told_by_its_source():
    def fails(workload, played):
        try:
            assert len(workload) == 99
        except AssertionError as error:
            bare = AssertionError().with_traceback(error.__traceback__)  # pytest gives it a message
            raise raised(bare, Table()) from error

    (finding,) = searching(fails).examine(workloads=1)
    assert "AssertionError: assert len(workload) == 99 (" in finding.what


def test_what_seldom_happens_is_told_and_what_must_happen_fails_the_search():
    findings = evolve(searching(play), expected=("numbers",)).examine(workloads=300, must_happen=["numbers"])
    assert (findings.thin, findings.missed) == ((), ())
    findings = evolve(searching(lambda *_: None), expected=("numbers",)).examine(workloads=3, must_happen=["numbers"])
    assert "seldom or never: numbers 0\n  This is hardly checked" in str(findings)
    with pytest.raises(AssertionError, match="must happen, and never did: numbers"):
        findings.raise_if_any()


def test_the_emitted_file_has_a_test_for_each_finding():
    written = search().tests()
    names = {}
    made = []
    exec(
        compile(written.replace(IMPORTS, ""), "emitted", "exec"),
        names := {"play": lambda _, one: made.append(one), "make": None},
    )
    tests = [name for name in names if name.startswith("test_")]
    assert tests == ["test_no_seven", "test_no_seven_2", "test_no_nine"]
    for name in tests:
        names[name]()
    assert sorted(made) == [(3, 7), (7, 3), (9,)]
    assert names["test_no_nine"].__doc__ == "there is a nine. Nines take long."
    assert names["test_no_seven"].__doc__.endswith("number\n    ----  ------\n    1     7\n    ")  # the history


def test_the_emitted_file_is_python_whatever_an_error_says():
    def fails(workload, played):
        raise BrokenPromise(NO_NINE, 'ends with \\ and """quotes"""')

    findings = searching(fails).examine(workloads=1)
    names = {"play": None}
    exec(findings.tests().replace(IMPORTS, ""), names)
    assert 'ends with \\ and """quotes"""' in names["test_no_nine"].__doc__


def test_a_test_of_one_finding_stands_alone():
    finding = list(search())[-1]
    assert finding.test().startswith(f"{IMPORTS}\n\ndef test_no_nine():\n")


def test_a_broken_promise_travels_between_processes():
    broken = BrokenPromise(NO_SEVEN, "seven", Table(("step",), [("1",)]), "kind")
    again = pickle.loads(pickle.dumps(broken))
    assert (str(again), again.kind, again.promise) == (str(broken), "kind", NO_SEVEN)


def test_a_table_has_no_empty_columns():
    assert str(Table(("a", "b", "c"), [("1", "", "x"), ("22", "", "")])) == "a   c\n--  -\n1   x\n22"


def test_the_line_that_imports_the_subject_is_its_place_or_asks_for_one():
    assert import_of(Findings, None) == ("from triolet_kit.findings import Findings", "Findings")
    assert import_of(Findings, "engine.cache:make") == ("from engine.cache import make", "make")
    line, name = import_of(lambda room: room, None)
    assert line.startswith("from my_engine import make  # what was checked, ")
    assert name == "make"
