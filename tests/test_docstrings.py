"""A docstring begins with a verb in the third person or with a noun, and an error and a help have plain words, so that
they are read once."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "core",
    "models",
    "actors",
    "api",
    "server",
    "src",
    "bench",
    "benchmarks",
    "packages/ray/triolet_ray",
    "packages/testing/triolet_testing",
)
TWICE = re.compile(r"(?<!there )\b(is|are) no\b|\btells?\b|\btold\b|\bbehind\b|\bthat is none\b|\bwhich there is not\b")
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


@pytest.mark.parametrize("room", [*ROOMS, "packages/kit"])
def test_an_error_and_the_help_of_a_flag_have_no_words_that_are_read_twice(room: str) -> None:
    """An error says "is not a member", and nothing in it is "told" or comes "behind"."""
    found = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) or getattr(node, "arg", "") in ("help", "description"):
                told = [
                    each for each in ast.walk(node) if isinstance(each, ast.Constant) and TWICE.search(str(each.value))
                ]
                found += [f"{path.relative_to(ROOT)}:{each.lineno}: {each.value}" for each in told]
    assert not found, "\n".join(found)
