"""A docstring begins with a verb in the third person or with a noun, so that it is read once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "models", "actors", "api", "server", "cluster", "testing", "src", "bench", "benchmarks")
HEADLESS = re.compile(r"(Of|By|As|For|With|From|What|How|Where|Who|Whose|Which|Whether|When|Why|That|See)\b")


@pytest.mark.parametrize("room", ROOMS)
def test_a_docstring_opens_with_its_subject_or_its_verb(room: str) -> None:
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            said = ast.get_docstring(node) or ""
            if HEADLESS.match(said):
                found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {said.splitlines()[0]}")
    assert not found, "\n".join(found)
