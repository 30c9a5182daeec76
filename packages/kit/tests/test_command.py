"""`triolet-kit`: the report, the regression tests, and what it says of wrong arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from triolet_kit import SchedulerDeclaration, StepDeclaration
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


SCHEDULER = """
class Faulty:
    def __init__(self, limits):
        pass

    def add_request(self, request):
        raise RuntimeError("not yet")

    schedule = update = finish = add_request

class Asks(Faulty):
    def __init__(self, limits):
        self.pages = limits.pages
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Any:
    """The command in a folder with ``some_engine.py``: its status, and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("some_engine.py").write_text(ENGINE)
    Path("some_scheduler.py").write_text(SCHEDULER)

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
    status, out, err = run("triolet_kit.step_engine:Adapter", "--workloads", "50", "--declare", "resets=yes")
    assert (status, err) == (0, "")
    assert out.startswith("no promise was broken in 50 workloads\n\nwhat happened: steps ")


def test_findings_are_told_and_end_with_status_1(run: Any) -> None:
    status, out, err = run("some_engine:Faulty", "--workloads", "100")
    assert (status, err) == (1, "")
    assert "no phantom: after a preemption (wrong output, without an error" in out
    assert run("some_engine:Faulty", "--workloads", "100")[1] == out
    assert not [
        path for path in Path().iterdir() if path.name not in {"some_engine.py", "some_scheduler.py", "__pycache__"}
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["some_engine:Faulty", "--protocol", "scheduler"], "Faulty has no add_request, schedule, update; see"),
        (
            ["some_scheduler:Asks"],
            "asks it for 'pages'. If it is a scheduler, examine it",
        ),
        (["some_scheduler:Faulty"], "Faulty has no plan, executed, release"),
        (["some_engine:Mute"], "plan returned None; allowed: a tuple of answers, frees and encodes"),
    ],
)
def test_a_wrong_adapter_is_a_finding(words: list[str], told: str, run: Any) -> None:
    status, out, err = run(*words, "--workloads", "5")
    assert (status, err) == (1, "")
    assert "speaks the protocol" in out
    assert told in out


def test_what_must_happen_and_never_does_fails_the_search(run: Any) -> None:
    words = ("triolet_kit.step_engine:Adapter", "--workloads", "20", "--must-happen", "hit", "--must-happen", "resets")
    status, out, _ = run(*words)
    assert (status, "must happen, and never did: resets\n" in out) == (1, True), out
    assert run(*words, "--declare", "resets=yes", "--workloads", "60")[0] == 0


def test_what_is_ignored_is_only_counted(run: Any) -> None:
    names = ["no phantom", "frees hit", "every acquire is answered: waits for ever", "budget is kept"]
    ignored = [word for name in names for word in ("--ignore", name)]
    status, out, _ = run("some_engine:Faulty", "--workloads", "40", *ignored)
    assert (status, "\nignored " in out) == (0, True), out


def test_the_result_is_json(run: Any) -> None:
    status, out, _ = run("some_engine:Faulty", "--workloads", "100", "--seed", "2", "--json")
    told = json.loads(out)
    assert (status, told["seed"], told["workloads"]) == (1, 2, 100)
    assert told["findings"][0]["promise"] == "no phantom"
    assert told["statistics"]["preemptions"] > 0


def test_a_workload_is_replayed_by_its_number(run: Any) -> None:
    found = json.loads(run("some_engine:Faulty", "--workloads", "100", "--json")[1])["findings"][0]
    status, out, _ = run("some_engine:Faulty", "--replay", str(found["number"]))
    assert status == 1
    assert out.startswith(f"workload {found['number']} of seed 0: no phantom: after a preemption\n")
    status, out, _ = run("triolet_kit.step_engine:Adapter", "--replay", str(found["number"]), "--json")
    assert (status, json.loads(out)["broken"]) == (0, None)


ALONE = """
import sys
sys.modules |= dict.fromkeys(["triolet", "torch", "pytest", "hypothesis", "numpy", "pydantic", "trio"])
import test_found
for name in [name for name in vars(test_found) if name.startswith("test_")]:
    try:
        getattr(test_found, name)()
    except AssertionError as error:
        print(name, type(error).__name__)
"""


@pytest.mark.real_time
@pytest.mark.parametrize(
    ("words", "test"),
    [
        (["some_engine:Faulty"], "test_no_phantom"),
        (["some_scheduler:Faulty", "--protocol", "scheduler"], "test_raises_nothing"),
    ],
)
def test_the_emitted_tests_fail_in_a_python_that_has_only_the_kit(words: list[str], test: str, run: Any) -> None:
    """They import the kit and the adapter, and nothing else that is not Python's own."""
    status, _, err = run(*words, "--workloads", "100", "--emit-test", "test_found.py")
    assert (status, "regression tests into test_found.py" in err) == (1, True)
    found = subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True, text=True)
    assert f"{test} BrokenPromise\n" in found.stdout


def test_without_findings_no_test_is_written(run: Any) -> None:
    run("triolet_kit.step_engine:Adapter", "--workloads", "20", "--emit-test", "test_found.py")
    assert not Path("test_found.py").exists()


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["some_engine"], 2, "allowed: MODULE:FACTORY"),
        (["some_engine:"], 2, "allowed: MODULE:FACTORY"),
        (["absent_engine:make"], 2, "No module named 'absent_engine'"),
        (["some_engine:absent"], 2, "has no attribute 'absent'"),
        (["some_engine:Faulty", "--declare", "fast=yes"], 2, "allowed: closes, resets"),
        (["some_engine:Faulty", "--declare", "closes=maybe"], 2, "got 'maybe'; allowed: yes or no"),
        (["some_engine:Faulty", "--declare", "steps_in_flight=many"], 2, "allowed: an integer"),
        (["some_engine:Faulty", "--declare", "steps_in_flight=9"], 2, "steps_in_flight"),
        (["some_engine:Faulty", "--declare", "missed_free=never"], 2, "missed_free"),
        (
            ["some_scheduler:Faulty", "--protocol", "scheduler", "--declare", "page_sizes=1,x"],
            2,
            "integers, as 1,2,4",
        ),
        (["some_engine:Faulty", "--workloads", "0"], 2, "--workloads"),
        (["some_engine:Faulty", "--replay", "0"], 2, "--replay"),
        (["some_engine:Faulty", "--replay", "1", "--emit-test", "x.py"], 2, "leave out --ignore, --must-happen"),
        (["some_engine:Faulty", "--ignore", "no bugs"], 2, "there is no promise 'no bugs'; allowed: one of speaks"),
        (["some_engine:Faulty", "--emit-test", "absent/test.py"], 1, "cannot be written"),
    ],
)
def test_a_wrong_argument_is_named_in_a_line(words: list[str], status: int, told: str, run: Any) -> None:
    code, _, err = run(*words)
    assert (code, told in err) == (status, True), err
    assert "Traceback" not in err


def test_the_help_names_every_declaration_with_its_default(run: Any) -> None:
    told = run("--help")[1]
    for declaration in (StepDeclaration, SchedulerDeclaration):
        assert all(f"{one.name}=" in told for one in declaration.__attrs_attrs__)
    assert "page_sizes=1,2,4, aborts=yes, decodes_all=no" in " ".join(told.split())


@pytest.mark.parametrize(
    ("text", "error"), [("1 / 0", ZeroDivisionError), ("int('x')", ValueError), ("None.x", AttributeError)]
)
def test_an_error_of_the_module_is_not_hidden(run: Any, text: str, error: type[Exception]) -> None:
    """The user's own: its traceback is what helps."""
    Path("broken_engine.py").write_text(text)
    with pytest.raises(error):
        main(["broken_engine:make"])
