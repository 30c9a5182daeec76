"""``triolet doctor``: what it finds, what it says to do, and the exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import triolet.demo
from triolet.api.command_line import doctor
from triolet.api.command_line.checks import (
    Finding,
    check_cache,
    check_device,
    check_hub,
    check_instructions,
    check_memory,
    check_native,
    check_packages,
    check_switching,
    check_threads,
    check_torch,
    check_waiting,
)
from triolet.api.command_line.devices import Device
from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, UnsupportedAudio
from triolet.models.machine.host import Cores
from triolet.models.machine.openmp import WaitPolicy

from .paper import run

GIB = 2**30
SPEECH = next(sample.text for sample in triolet.demo.samples() if sample.path.stem == "en-command")


def cores(count: int) -> Cores:
    return Cores(count=count, logical=2 * count, allowed=2 * count, physical=count, quota=None)


def of_torch(**changes: Any) -> Finding:
    known = {"cuda": None, "sees_cuda": False, "has_nvidia": False, "libraries": {"MKL", "oneDNN"}}
    return check_torch("2.13.0", **{**known, **changes})


X86 = frozenset({"sse2", "avx2", "avx512f", "fma"})


# -- the checks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("finding", "state", "advice"),
    [
        (of_torch(), "ok", ""),
        (of_torch(cuda="13.0"), "ok", ""),
        (of_torch(cuda="13.0", sees_cuda=True, has_nvidia=True), "ok", ""),
        (of_torch(has_nvidia=True), "slow", "install a build for CUDA"),
        (of_torch(cuda="13.0", has_nvidia=True), "wrong", "check nvidia-smi, the driver's version and CUDA_VISIBLE"),
        (of_torch(libraries=set()), "slow", "install a build of torch with oneDNN"),
        (check_device(Device("cuda:0", "Card 9000", "float16", True)), "ok", ""),
        (check_device(Device("cuda:0", "", "float16", True, "it is lost")), "wrong", "check nvidia-smi; to leave this"),
        (check_threads(cores(4), 4, {}), "ok", ""),
        (check_threads(cores(4), 4, {"OMP_NUM_THREADS": "4"}), "ok", ""),
        (check_threads(cores(4), 1, {"OMP_NUM_THREADS": "1"}), "slow", "cores are idle: unset it, or set it to 4"),
        (check_threads(cores(4), 2, {}), "slow", "cores are idle: set OMP_NUM_THREADS=4"),
        (check_threads(cores(4), 8, {"MKL_NUM_THREADS": "8"}), "slow", "wait for each other: unset it, or set it to 4"),
        (check_waiting(WaitPolicy(setting="OMP_WAIT_POLICY=PASSIVE", reason="set")), "ok", ""),
        (check_waiting(WaitPolicy(setting="GOMP_SPINCOUNT=0", reason="set")), "ok", ""),
        (check_waiting(WaitPolicy(setting="OMP_WAIT_POLICY=Active", reason="set")), "slow", "set it to PASSIVE"),
        (check_waiting(WaitPolicy(setting=None, reason="early")), "slow", "set OMP_WAIT_POLICY=PASSIVE: early"),
        (check_switching(0.005, 1e-4), "ok", ""),
        (check_native(3), "ok", ""),
        (check_native(None), "slow", "install a C++ compiler"),
        (check_memory(8 * GIB, 4 * GIB, None), "ok", ""),
        (check_memory(8 * GIB, None, 16 * GIB), "ok", ""),
        (check_memory(8 * GIB, GIB // 2, 16 * GIB), "wrong", "end other programs"),
        (check_memory(8 * GIB, GIB // 2, 2 * GIB), "wrong", "end other programs, or raise the container's limit"),
        (check_instructions(X86, "AVX512", bfloat16=False), "ok", ""),
        (check_instructions(frozenset(), "DEFAULT", bfloat16=False), "ok", ""),
        (check_instructions(frozenset({"asimddp"}), "DEFAULT", bfloat16=True), "ok", ""),
        (check_instructions(frozenset({"sse2"}), "DEFAULT", bfloat16=False), "slow", "a virtual machine may hide it"),
        (check_instructions(X86, "DEFAULT", bfloat16=False), "slow", "unset ATEN_CPU_CAPABILITY"),
        (check_cache("/a", ""), "ok", ""),
        (check_cache("/a", "no"), "slow", "set XDG_CACHE_HOME to a folder that can be written"),
        (check_hub("/a", "", 9 * GIB), "ok", ""),
        (check_hub("/a", "no", 9 * GIB), "wrong", "set HF_HUB_CACHE to a folder that can be written"),
        (check_hub("/a", "", GIB), "wrong", "make room, or set HF_HUB_CACHE to another disk"),
    ],
    ids=str,
)
def test_what_is_wrong_or_slow_comes_with_what_to_do(finding: Finding, state: str, advice: str) -> None:
    assert finding.state == state
    assert advice in finding.advice
    assert bool(finding.advice) == (state != "ok")


@pytest.mark.parametrize(
    ("finding", "found"),
    [
        (check_memory(8 * GIB, 4 * GIB, 6 * GIB), "8.0 GiB, 6.0 GiB by the cgroup, 4.0 GiB available"),
        (check_memory(8 * GIB, 4 * GIB, 9 * GIB), "8.0 GiB, 4.0 GiB available"),  # the limit does not bind
        (check_switching(0.005, 1e-4), "5 ms, and 0.1 ms while an engine works (switch_interval='kept': it stays)"),
        (check_switching(1e-5, 1e-4), "0.01 ms"),
    ],
)
def test_what_is_found_is_told_as_it_is(finding: Finding, found: str) -> None:
    assert finding.found == found


NEEDS = ["torch<3,>=2.11", "attrs>=24.2", 'fastapi>=0.115; extra == "test"', 'triolet[test]; extra == "dev"']


@pytest.mark.parametrize(
    ("installed", "told"),
    [
        ({"torch": "2.13.0+cpu", "attrs": "25.1"}, []),
        ({"torch": "2.12.0.dev1", "attrs": "25.1"}, []),
        ({"torch": "3.0", "attrs": "25.1"}, [("torch 3.0; allowed: <3,>=2.11", "pip install 'torch<3,>=2.11'")]),
        ({"torch": "2.13"}, [("attrs is not installed", "pip install 'attrs>=24.2'")]),
        ({"torch": "2.13", "attrs": "25.1", "fastapi": "0.200"}, []),
        (
            {"torch": "2.13", "attrs": "1.0", "fastapi": "0.1"},
            [
                ("attrs 1.0; allowed: >=24.2", "pip install 'attrs>=24.2'"),
                ("fastapi 0.1; allowed: >=0.115", "pip install 'fastapi>=0.115'"),
            ],
        ),
    ],
)
def test_packages_are_held_against_their_ranges(installed: dict[str, str], told: list[tuple[str, str]]) -> None:
    """Those of an extra only where they are installed."""
    found = check_packages(NEEDS, installed)
    wrong = [(each.found, each.advice) for each in found if each.state == "wrong"]
    assert wrong == told
    if not told:
        (one,) = found
        assert one.state == "ok"
        assert one.found.startswith("2 within the ranges of pyproject.toml: torch 2.1")


# -- the command -----------------------------------------------------------------------------------------------------


class Heard:
    """An engine that understands ``text``, or refuses to open."""

    def __init__(self, text: str, error: Exception | None = None) -> None:
        self.text = text
        self.error = error
        self.asked: list[Any] = []

    @asynccontextmanager
    async def __call__(self, model: str, config: EngineConfig) -> AsyncIterator[Heard]:
        assert (model, config) == (str(triolet.demo.checkpoint()), EngineConfig())
        if self.error is not None:
            raise self.error
        yield self

    async def transcribe(self, audio: Any) -> Any:
        self.asked.append(audio)
        return SimpleNamespace(text=self.text)


def findings(capsys: pytest.CaptureFixture[str], engine: Heard) -> dict[str, dict[str, str]]:
    """The findings by their names; one is not well."""
    assert run(["doctor", "--json"], engine) == 1
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert told["ok"] is False
    return {each["name"]: each for each in told["findings"]}


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which all is well but what the test says: the tests' own has one thread, and imports torch early."""
    monkeypatch.setattr(doctor.Processor, "find", lambda: None)
    monkeypatch.setattr(doctor, "_machine", lambda _: iter([Finding("torch", "ok", "2.13")]))


@pytest.mark.usefixtures("well")
def test_where_all_is_well_it_says_so_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"], Heard(SPEECH)) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == "all is well"
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == {"ok", "all"}
    assert max(len(line) for line in lines if "/" not in line) <= 80  # a path is not broken
    assert err == ""


@pytest.mark.usefixtures("well")
def test_of_a_model_it_says_the_memory_and_the_context(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "demo", str(tmp_path)], Heard(SPEECH)) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"ok demo [\d.]+ MiB: weights [\d.]+ MiB, .*self_kv", told)
    assert "WhisperForConditionalGeneration has a context of 448 positions" in told
    assert "wrong" in told.partition("448 positions")[2]


@pytest.mark.usefixtures("well")
def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    found = findings(capsys, Heard("something else"))
    assert [name for name, each in found.items() if each["state"] != "ok"] == ["demo"]
    demo = found["demo"]
    assert demo["state"] == "wrong"
    assert f"it understood 'something else', and {SPEECH!r} was said" in demo["found"]
    assert "try another build of torch, and report this" in demo["advice"]
    assert set(demo) == {"name", "state", "found", "advice"}


@pytest.mark.usefixtures("well")
def test_an_engine_that_does_not_open_is_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"], Heard("", CheckpointError("its weights are damaged"))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "-> correct what is wrong above" in " ".join(" ".join(lines).split())
    assert lines[-4].split() == ["wrong", "demo", "CheckpointError:", "its", "weights", "are", "damaged"]
    assert lines[-1] == f"1 of {len([line for line in lines[:-1] if not line.startswith(' ')])} could be better"


@pytest.mark.usefixtures("well")
def test_a_library_that_cannot_be_imported_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    found = findings(capsys, Heard(SPEECH))
    assert found["soxr"]["state"] == "wrong"
    assert found["soxr"]["advice"] == "install it again: pip install --force-reinstall soxr"
    assert "decoding" not in found


@pytest.mark.usefixtures("well")
def test_a_format_that_cannot_be_decoded_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(path: Path, *, sampling_rate: int) -> None:
        if path.suffix == ".mp3":
            raise UnsupportedAudio("no codec")

    monkeypatch.setattr("triolet.api.inputs.audio.load_audio", load)
    found = findings(capsys, Heard(SPEECH))
    assert (found["decoding"]["state"], found["decoding"]["found"]) == ("wrong", "mp3: no codec")


@pytest.mark.usefixtures("well")
@pytest.mark.parametrize("fault", ["it is a file", "nobody may look into it"])
def test_a_cache_folder_that_cannot_be_used_is_a_finding(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    locked, look, may = tmp_path / "locked", os.stat, os.access

    def refused(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, str | Path) and locked in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    if fault == "it is a file":
        locked.touch()
        told = f"{locked} is a file"
    else:
        locked.mkdir()
        told = f"nothing can be written in {locked}"
        monkeypatch.setattr(os, "stat", refused)
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and may(path, mode))
    monkeypatch.setenv("XDG_CACHE_HOME", str(locked / "deeper"))
    cache = findings(capsys, Heard(SPEECH))["cache"]
    assert (cache["state"], cache["found"].endswith(told)) == ("slow", True)


def test_without_torch_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.Processor, "find", fail)
    found = findings(capsys, Heard(SPEECH))
    assert found["torch"]["found"] == "it cannot be imported (OSError: libgomp.so.1: cannot open shared object file)"
    assert {"av", "cache", "models"} <= found.keys()
    assert "demo" not in found


@pytest.mark.real_time
def test_a_real_run_finds_the_machine_as_it_is_and_torch_set_up_right(tmp_path: Path) -> None:
    """In a process of its own, where nothing has imported torch yet. Machines differ: the demo and what Triolet sets
    itself must be well, and the status must say what the findings do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP", "MKL", "GOMP"))}
    done = subprocess.run(
        [sys.executable, "-m", "triolet", "doctor", "--json"],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    told = json.loads(done.stdout)
    findings = {each["name"]: each for each in told["findings"]}
    assert done.stderr == ""
    assert done.returncode == (0 if told["ok"] else 1)
    assert told["ok"] == all(each["state"] == "ok" for each in told["findings"])
    names = "python packages torch device threads waiting switching memory instructions av soundfile soxr decoding"
    assert set(findings) == {*names.split(), "native", "cache", "models", "demo"}
    for name in ("packages", "threads", "waiting", "switching", "av", "soundfile", "soxr", "decoding", "cache", "demo"):
        assert findings[name]["state"] == "ok", findings[name]
    assert findings["waiting"]["found"] == "OMP_WAIT_POLICY=PASSIVE, set before torch was loaded"
