"""``triolet doctor``: what it finds, what it says to do, and the exit status."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

import triolet.demo
from triolet.api.command_line import doctor
from triolet.api.command_line.doctor import Device, Finding, Processor
from triolet.core.config import EngineConfig
from triolet.core.errors import CheckpointError, EngineError, UnsupportedAudio
from triolet.models.machine import host
from triolet.models.machine.host import Cores
from triolet.models.machine.openmp import WaitPolicy
from triolet.models.native.library import Library

from .paper import run

GIB = 2**30
SPEECH = next(sample.text for sample in triolet.demo.samples() if sample.path.stem == "en-command")


# -- the machine -----------------------------------------------------------------------------------------------------

CPU = Processor(
    cores=Cores(count=4, logical=8, allowed=8, physical=4, quota=None),
    threads=4,
    memory=8 * GIB,
    available=4 * GIB,
    policy=WaitPolicy(setting="OMP_WAIT_POLICY=PASSIVE", reason="set"),
)
X86 = frozenset({"sse2", "avx2", "avx512f", "fma"})


def looked_at(monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, Any]) -> dict[str, Finding]:
    """The findings by name, of a machine that is well but for ``changes``."""
    known: dict[str, Any] = {"cuda": None, "sees": False, "driver": None, "level": 3, "limit": None}
    known |= {"flags": X86, "vectors": "AVX512", "interval": 0.005, "devices": [Device("cpu", "a CPU", True)]} | changes

    def library() -> Any:
        if isinstance(known["level"], Exception):
            raise known["level"]
        return None if known["level"] is None else SimpleNamespace(level=known["level"])

    for owner, name, value in (
        (torch.version, "cuda", known["cuda"]),
        (torch.cuda, "is_available", lambda: known["sees"]),
        (torch.backends.cpu, "get_cpu_capability", lambda: known["vectors"]),
        (doctor.shutil, "which", lambda _: known["driver"]),
        (doctor, "find_devices", lambda _: known["devices"]),
        (doctor.sys, "getswitchinterval", lambda: known["interval"]),
        (Library, "load", library),
        (host, "memory_limit", lambda _: known["limit"]),
        (host, "cpu_flags", lambda _: known["flags"]),
    ):
        monkeypatch.setattr(owner, name, value)
    cpu = evolve(CPU, **{name: changes[name] for name in ("threads", "available", "policy") if name in changes})
    return {finding.name: finding for finding in doctor._machine(cpu)}


NVIDIA = {"driver": "/bin/nvidia-smi"}


@pytest.mark.parametrize(
    ("changes", "name", "state", "advice"),
    [
        ({}, "torch", "ok", ""),
        ({"cuda": "13.0"}, "torch", "ok", ""),
        ({"cuda": "13.0", "sees": True, **NVIDIA}, "torch", "ok", ""),
        (NVIDIA, "torch", "slow", "install a build for CUDA"),
        ({"cuda": "13.0", **NVIDIA}, "torch", "wrong", "check nvidia-smi, the driver's version and CUDA_VISIBLE"),
        ({}, "device", "ok", ""),
        ({"devices": [Device("cuda:0", "it is lost", True, answers=False)]}, "device", "wrong", "to leave this device"),
        ({}, "threads", "ok", ""),
        ({"threads": 1}, "threads", "slow", "cores are idle: set OMP_NUM_THREADS=4, or unset it"),
        ({"threads": 8}, "threads", "slow", "threads wait for each other: set OMP_NUM_THREADS=4, or unset it"),
        ({}, "waiting", "ok", ""),
        ({"policy": WaitPolicy(setting="GOMP_SPINCOUNT=0", reason="set")}, "waiting", "ok", ""),
        ({"policy": WaitPolicy(setting="OMP_WAIT_POLICY=Active", reason="set")}, "waiting", "slow", "=PASSIVE"),
        ({"policy": WaitPolicy(setting=None, reason="early")}, "waiting", "slow", "set OMP_WAIT_POLICY=PASSIVE"),
        ({}, "switching", "ok", ""),
        ({}, "native", "ok", ""),
        ({"level": None}, "native", "slow", "install a C++ compiler"),
        ({"level": EngineError("of other sources; compile it anew")}, "native", "wrong", "compile it anew"),
        ({}, "memory", "ok", ""),
        ({"available": None, "limit": 16 * GIB}, "memory", "ok", ""),
        ({"available": GIB // 2}, "memory", "wrong", "end other programs, or raise the container's limit"),
        ({}, "instructions", "ok", ""),
        ({"flags": frozenset(), "vectors": "DEFAULT"}, "instructions", "ok", ""),
        ({"flags": frozenset({"asimddp"}), "vectors": "DEFAULT"}, "instructions", "ok", ""),
        ({"flags": frozenset({"sse2"}), "vectors": "DEFAULT"}, "instructions", "slow", "show AVX2 to the virtual"),
        ({"vectors": "DEFAULT"}, "instructions", "slow", "unset ATEN_CPU_CAPABILITY"),
    ],
    ids=str,
)
def test_what_is_wrong_or_slow_comes_with_what_to_do(
    changes: dict[str, Any], name: str, state: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looked_at(monkeypatch, changes)
    assert found[name].state == state
    assert advice in found[name].advice
    assert bool(found[name].advice) == (state != "ok")
    assert [each.name for each in found.values() if each.state != "ok"] == ([] if state == "ok" else [name])


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        ({"limit": 6 * GIB}, "memory", "8.0 GiB, 6.0 GiB by the cgroup, 4.0 GiB available"),
        ({"limit": 9 * GIB}, "memory", "8.0 GiB, 4.0 GiB available"),  # the limit does not bind
        ({}, "switching", "5 ms; while an engine works at most 0.1 ms, unless switch_interval='kept'"),
        ({"cuda": "13.0"}, "torch", f"{torch.__version__}, built for CUDA 13.0"),
    ],
)
def test_what_is_found_is_told_as_it_is(
    changes: dict[str, Any], name: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert looked_at(monkeypatch, changes)[name].found == found


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
def test_packages_are_held_against_their_ranges(
    installed: dict[str, str], told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of an extra only where they are installed."""

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda _: NEEDS)
    monkeypatch.setattr(importlib.metadata, "version", version)
    found = list(doctor._packages())
    assert [(each.found, each.advice) for each in found if each.state == "wrong"] == told
    if not told:
        (one,) = found
        assert one.state == "ok"
        assert one.found.startswith("within the ranges of pyproject.toml: torch 2.1")


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
    monkeypatch.setattr(doctor.Processor, "find", lambda: CPU)
    monkeypatch.setattr(doctor, "_machine", lambda _: iter([Finding("torch", "ok", "2.13")]))


@pytest.mark.usefixtures("well")
def test_where_all_is_well_it_says_so_and_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor"], Heard(SPEECH)) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == "all is well"
    assert {line.split()[0] for line in lines if not line.startswith(" ")} == {"ok", "all"}
    assert err == ""


@pytest.mark.usefixtures("well")
def test_of_a_model_it_says_the_memory_and_the_context(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["doctor", "demo", "--model", str(tmp_path)], Heard(SPEECH)) == 1
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
    assert lines[-3].split() == ["wrong", "demo", "CheckpointError:", "its", "weights", "are", "damaged"]
    assert lines[-1] == f"1 of {len([line for line in lines[:-1] if not line.startswith(' ')])} could be better"


def load_no_mp3(path: Path, *, sampling_rate: int) -> None:
    if path.suffix == ".mp3":
        raise UnsupportedAudio(f"{path.name}: no codec")


@pytest.mark.parametrize(
    ("change", "name", "state", "found", "advice"),
    [
        (
            lambda patch: patch.setitem(sys.modules, "soxr", None),
            *(
                "audio",
                "wrong",
                "import of soxr halted",
                "install these again: pip install --force-reinstall av",
            ),
        ),
        (
            lambda patch: patch.setattr("triolet.api.inputs.audio.load_audio", load_no_mp3),
            *("audio", "wrong", r"UnsupportedAudio: .*\.mp3: no codec$", "install these again"),
        ),
        (
            lambda patch: patch.setenv("XDG_CACHE_HOME", f"{__file__}/deeper"),
            *(
                "cache",
                "slow",
                r"triolet: it cannot be written to \(Not a directory\)$",
                "set XDG_CACHE_HOME to a folder",
            ),
        ),
        (
            lambda patch: patch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB)),
            *("models", "wrong", ", 1.0 GiB free$", "make room, or set HF_HUB_CACHE"),
        ),
    ],
    ids=["a library", "a format", "a cache folder", "a disk"],
)
@pytest.mark.usefixtures("well")
def test_what_cannot_be_used_is_a_finding(
    change: Any,
    name: str,
    state: str,
    found: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(monkeypatch)
    told = findings(capsys, Heard(SPEECH))[name]
    assert told["state"] == state
    assert re.search(found, told["found"])
    assert advice in told["advice"]


def test_without_torch_the_rest_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise OSError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(doctor.Processor, "find", fail)
    found = findings(capsys, Heard(SPEECH))
    assert found["torch"]["found"] == "it cannot be imported (OSError: libgomp.so.1: cannot open shared object file)"
    assert {"audio", "cache", "models"} <= found.keys()
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
    names = "python packages torch device threads waiting switching native memory instructions audio cache models demo"
    assert list(findings) == names.split()
    for name in ("packages", "threads", "waiting", "switching", "audio", "cache", "demo"):
        assert findings[name]["state"] == "ok", findings[name]
    assert findings["waiting"]["found"] == "OMP_WAIT_POLICY=PASSIVE, set before torch was loaded"
