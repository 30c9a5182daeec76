"""The protocol of single operations, searched by the kit: as sound as `check_encoder_cache`, and it finds as much."""

from __future__ import annotations

import subprocess
import sys

import pytest

from triolet.testing.kit.caches import COLUMNS, examine_cache, play_cache
from triolet.testing.kit.findings import BrokenPromise
from triolet.testing.kit.wrong_adapter import WrongAdapter

from .test_conformance import FAULTS, SOUND, LateFailuresAreUnknown, PlainCache


@pytest.mark.parametrize("make_cache", SOUND)
def test_a_sound_cache_has_no_finding(make_cache):
    examine_cache(make_cache, workloads=300).raise_if_any()


@pytest.mark.parametrize(("broken", "invariant"), [row[:2] for row in FAULTS], ids=[row[0].__name__ for row in FAULTS])
def test_a_planted_fault_is_found_by_the_promise_it_breaks(broken, invariant):
    findings = examine_cache(broken)
    assert invariant in [finding.promise.name for finding in findings]
    for finding in findings:
        assert len(finding.shrunk.operations) <= 12
        with pytest.raises(BrokenPromise, match=finding.promise.name):
            play_cache(broken, finding.shrunk)
        play_cache(PlainCache, finding.shrunk)


def test_what_the_cache_raises_is_a_finding_with_its_history():
    (finding,) = examine_cache(LateFailuresAreUnknown, workloads=400)
    assert finding.promise.name == "raises nothing"
    assert finding.table.columns == COLUMNS
    assert any("the encoding of a fails" in row[1] for row in finding.table.rows)


def test_a_regression_test_plays_the_workload_again():
    broken, *_ = FAULTS[0]
    finding = next(iter(examine_cache(broken)))
    made = []
    names = {"play": lambda make, workload: made.append((make, workload))}
    written = finding.test().split("\n\n\n")[1]
    from triolet.testing import cache_workloads

    exec(written, {**vars(cache_workloads), **names, broken.__name__: broken}, names)
    names["test_" + finding.promise.name.replace(" ", "_")]()
    assert made == [(broken, finding.shrunk)]
    assert "from triolet.testing import Ask" in finding.test()


@pytest.mark.parametrize(
    ("method", "told"),
    [("acquire", "acquire answered 'yes'; allowed: a member of"), ("take_freed", "what take_freed returned is 'yes'")],
)
def test_an_adapter_that_does_not_speak_the_protocol_is_told(method, told):
    wrong = type("Wrong", (PlainCache,), {method: lambda *_: "yes"})
    with pytest.raises(WrongAdapter, match=told):
        examine_cache(wrong)


def test_a_method_that_is_missing_is_told():
    with pytest.raises(WrongAdapter, match="object has no acquire"):
        examine_cache(lambda _: object())


@pytest.mark.real_time
def test_the_kit_needs_no_hypothesis():
    """Not for any of its protocols; in a process of its own, since this one has it."""
    modules = ["caches", "findings", "ledger", "schedulers", "step_engine", "steps", "triolet_scheduler"]
    imports = "; ".join(f"import triolet.testing.kit.{name}" for name in modules)
    hidden = f"import sys; sys.modules['hypothesis'] = None; {imports}"
    subprocess.run([sys.executable, "-c", hidden], check=True)
