"""`triolet-kit`: the report, the regression tests, and what it says of wrong arguments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from triolet_kit.__main__ import main

ENGINE = """
from triolet_kit.step_engine import Adapter, StepEngine

class Phantoms(StepEngine):
    def call_off(self, key):
        self.encodes.remove(key)

class Faulty(Adapter):
    make_engine = Phantoms

class Mute(Adapter):
    def plan(self, wanted, budget):
        return None
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """The command in a folder with ``some_engine.py``: its status, and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("some_engine.py").write_text(ENGINE)

    def run_it(*words: str) -> tuple[object, str, str]:
        sys.modules.pop("some_engine", None)
        with pytest.raises(SystemExit) as caught:
            main(words)
        printed, code = capfd.readouterr(), caught.value.code
        if isinstance(code, str):  # what the interpreter does with it
            return 1, printed.out, f"{printed.err}{code}"
        return code, printed.out, printed.err

    return run_it


def test_a_sound_engine_ends_with_status_0(run: Any) -> None:
    found = run("triolet_kit.step_engine:Adapter", "--workloads", "50", "--declare", "resets=yes")
    assert found == (0, "no promise was broken in 50 workloads\n", "")


def test_findings_are_told_and_end_with_status_1(run: Any) -> None:
    status, out, err = run("some_engine:Faulty", "--workloads", "100")
    assert (status, err) == (1, "")
    assert "no phantom (wrong output, without an error" in out
    assert run("some_engine:Faulty", "--workloads", "100")[1] == out
    assert not [path for path in Path().iterdir() if path.name not in {"some_engine.py", "__pycache__"}]


def test_the_emitted_tests_fail_on_the_faulty_engine(run: Any) -> None:
    status, _, err = run("some_engine:Faulty", "--workloads", "100", "--emit-test", "test_found.py")
    assert status == 1
    assert "regression tests into test_found.py" in err
    names: dict[str, Any] = {"__name__": "test_found"}
    exec(compile(Path("test_found.py").read_text(), "test_found.py", "exec"), names)
    with pytest.raises(AssertionError, match="no phantom"):
        names["test_no_phantom"]()


def test_without_findings_no_test_is_written(run: Any) -> None:
    run("triolet_kit.step_engine:Adapter", "--workloads", "20", "--emit-test", "test_found.py")
    assert not Path("test_found.py").exists()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["some_engine"], 2, "write MODULE:FACTORY"),
        (["some_engine:"], 2, "write MODULE:FACTORY"),
        (["absent_engine:make"], 2, "No module named 'absent_engine'"),
        (["some_engine:absent"], 2, "has no attribute 'absent'"),
        (["some_engine:Faulty", "--declare", "fast=yes"], 2, "allowed: closes, resets"),
        (["some_engine:Faulty", "--declare", "closes=maybe"], 2, "got 'maybe', allowed: yes or no"),
        (["some_engine:Faulty", "--declare", "steps_in_flight=many"], 2, "allowed: a number"),
        (["some_engine:Faulty", "--declare", "steps_in_flight=9"], 2, "steps_in_flight"),
        (["some_engine:Faulty", "--declare", "missed_free=never"], 2, "missed_free"),
        (["some_engine:Faulty", "--workloads", "0"], 2, "--workloads"),
        (["some_engine:Faulty", "--protocol", "scheduler"], 1, "Faulty has no add_request"),
        (["some_engine:Mute"], 1, "plan returned None; allowed: a tuple of answers, frees and encodes"),
        (["some_engine:Faulty", "--emit-test", "absent/test.py"], 1, "cannot be written"),
    ],
)
def test_a_wrong_argument_is_named_in_a_line(words: list[str], status: int, told: str, run: Any) -> None:
    code, _, err = run(*words)
    assert (code, told in err) == (status, True), err
    assert "Traceback" not in err


def test_an_error_of_the_module_is_not_hidden(run: Any) -> None:
    """The user's own: its traceback is what helps."""
    Path("broken_engine.py").write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        main(["broken_engine:make"])
