"""The wheel and the sdist as `make dist` built them: what is in them, and that each works where nothing else is."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
(WHEEL,) = (ROOT / "dist").glob("*.whl")
(SDIST,) = (ROOT / "dist").glob("*.tar.gz")
SATELLITES = sorted(map(str, (ROOT / "dist" / "packages").glob("*/*.whl")))


def in_wheel() -> set[str]:
    return set(zipfile.ZipFile(WHEEL).namelist())


def in_sdist() -> set[str]:
    with tarfile.open(SDIST) as archive:
        return {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}


def test_the_wheel_is_for_every_python_and_has_the_package_alone() -> None:
    assert "-py3-none-" in WHEEL.name
    assert {name.split("/")[0].split("-")[0] for name in in_wheel()} == {"triolet"}


def test_the_wheel_has_no_test_benchmark_or_training_file() -> None:
    """`triolet bench` is part of the product."""
    wrong = ("test_", "conftest", "benchmarks/", "examples/", "training/", "tests/")
    assert [name for name in in_wheel() if any(part in name for part in wrong)] == []


def test_the_wheel_has_the_types_the_licence_and_the_demo() -> None:
    wanted = ("triolet/py.typed", "triolet/demo/checkpoint/model.safetensors", "triolet/demo/samples/samples.json")
    assert set(wanted) <= in_wheel()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in in_wheel())


@pytest.mark.real_time
def test_the_sdist_has_every_file_that_git_keeps() -> None:
    """So its tests and its make targets run."""
    kept = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert set(kept.split()) - in_sdist() == set()


@pytest.mark.real_time
@pytest.mark.parametrize(("artifact", "extra"), [(WHEEL, ""), (SDIST, "[test]")], ids=["wheel", "sdist"])
def test_it_works_in_an_environment_of_its_own(artifact: Path, extra: str, tmp_path: Path) -> None:
    python = str(tmp_path / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    for step in (
        [sys.executable, "-m", "venv", str(tmp_path)],
        [*install, "torch"],  # first, so that a CPU build is taken where the machine offers one
        [*install, f"{artifact}{extra}"],
        [*install, *SATELLITES],
        [python, "-m", "pip", "check"],
        [python, "-W", "error", str(ROOT / ".ci" / "smoke.py"), str(ROOT)],
    ):
        subprocess.run(step, cwd=tmp_path, check=True)
