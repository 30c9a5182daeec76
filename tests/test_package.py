"""What a wheel has: the product, all of it, and nothing else. `make dist` builds one and tries it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "models", "actors", "api", "bench", "server")
DATA = ("demo/checkpoint", "demo/samples", "models/weights", "server/view/page")
COPY = """
import sys
from setuptools.dist import Distribution

found = Distribution({'script_name': 'none'})
found.parse_config_files()
command = found.get_command_obj("build_py")
command.build_lib = sys.argv[1]
command.ensure_finalized()
command.run()
"""
"""The step of a build that copies the package's files, without a build folder in the tree."""


@pytest.mark.real_time
def test_a_wheel_has_each_file_of_the_product_and_no_script_test_or_benchmark(tmp_path: Path) -> None:
    """A folder that is new: one line of `packages` in pyproject.toml."""
    subprocess.run([sys.executable, "-c", COPY, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    product = {path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    product |= {path.relative_to(ROOT / "src/triolet") for path in (ROOT / "src/triolet").glob("*.py")}
    product |= {path.relative_to(ROOT) for folder in DATA for path in (ROOT / folder).iterdir()}
    product |= {Path("demo/__init__.py"), Path("py.typed")}
    assert len(product) > 200
    assert {path.relative_to(tmp_path / "triolet") for path in tmp_path.rglob("*") if path.is_file()} == product
