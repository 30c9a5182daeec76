"""What the documents say of the code is so, as far as a program can tell."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import trio

import triolet
from triolet.core import errors, events
from triolet.core.config import EngineConfig
from triolet.core.ledger_table import transition_table
from triolet.testing.sim import sim_engine

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("core", "models", "actors", "api", "testing", "src/triolet", "tests")


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


# -- ARCHITECTURE.md -------------------------------------------------------------------------------------------------


def test_the_ledger_table_is_the_one_in_the_code():
    """When it fails: CONTRIBUTING.md, "A transition of the ledger", says how to print the table."""
    text = read("ARCHITECTURE.md")
    (table,) = re.findall(r"<!-- ledger table -->\n(.*?)\n<!-- end of ledger table -->", text, re.DOTALL)
    assert table == transition_table()


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/verification.md"])
def test_every_file_that_is_named_exists(document):
    text = read(document)
    named = {span for span in code_spans(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.py|\.toml|\.txt|\.md)", span)}
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    assert named | linked
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
    assert [link for link in sorted(linked) if not (ROOT / document).parent.joinpath(link).exists()] == []


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_test_that_is_named_exists(document):
    named = {span for span in code_spans(read(document)) if re.fullmatch(r"test_\w+", span)}
    assert named
    assert named <= {name for name in definitions() if name.startswith("test_")}


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CHANGELOG.md", "README.md"])
def test_every_member_that_is_named_exists(document):
    """`Class.member`, of the package or of the tests."""
    named = {span for span in code_spans(read(document)) if re.fullmatch(r"[A-Z]\w+\.\w+", span)}
    named |= {f"EngineConfig.{name}" for name in re.findall(r"`EngineConfig\((\w+)=", read(document))}
    assert named
    assert named - definitions() == set()


@cache
def definitions() -> frozenset[str]:
    """Every function as ``name`` and every member of a class as ``Class.member``."""
    found: set[str] = set()
    for room in PACKAGE:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found |= {f"{node.name}.{member}" for member in _members(node)}
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(node.name)
    return frozenset(found)


def _members(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


async def test_the_stages_are_those_of_an_engine_that_lives_and_ends(autojump_clock):
    stages = re.findall(r"^\| `([a-z ]+)` \|", read("ARCHITECTURE.md"), re.MULTILINE)
    trace: list[events.Event] = []
    async with sim_engine(config=EngineConfig(observer=trace.append, verify=True)):
        await trio.sleep(1)
    assert stages == [event.stage for event in trace if isinstance(event, events.StageReached)]


def test_every_error_has_a_place_in_the_tree_and_is_exported():
    """The tree in the docstring of `triolet.core.errors`, read as class names."""
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    tree = re.findall(r"^ +[│├└─ ]*([A-Z]\w+)", errors.__doc__, re.MULTILINE)
    assert sorted(tree) == sorted(classes)
    assert classes <= set(triolet.__all__)
