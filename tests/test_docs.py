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
from triolet.core import events
from triolet.core.config import EngineConfig
from triolet.core.ledger import transition_table
from triolet.testing.sim import sim_engine

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    name: ROOT / folder
    for name, folder in {
        "core": "core",
        "models": "models",
        "actors": "actors",
        "api": "api",
        "testing": "testing",
        "demo": "demo",
        "": "src/triolet",
    }.items()
}
MAY_USE = {  # room -> rooms that it may import from, beside itself
    "core": set(),
    "models": {"core"},
    "actors": {"core"},  # and models, from gpu_runner.py
    "api": {"core", "models", "actors", "demo"},
    "testing": {"core", "models", "actors", "api", "demo", ""},
    "demo": set(),
    "": {"core", "models", "actors", "api", "demo"},
}
FORBIDDEN = {  # room -> packages from outside
    "core": {"trio", "torch", "transformers", "numpy"},
    "models": {"trio", "anyio"},
    "actors": {"torch", "transformers"},
}
ACTORS = {"scheduler", "encoder_cache", "gpu_runner", "supervisor"}
SCRIPTS = {"demo/evaluate.py", "demo/make_samples.py", "demo/train.py"}  # run by hand, not part of the package's life


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


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md"])
def test_every_file_that_is_named_exists(document):
    text = read(document)
    named = {span for span in code_spans(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.py|\.toml|\.txt|\.md)", span)}
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    assert named | linked
    assert [name for name in sorted(named | linked) if not (ROOT / name).exists()] == []


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
    for folder in (*ROOMS.values(), ROOT / "tests"):
        for path in folder.rglob("*.py"):
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
    async with sim_engine(config=EngineConfig(observer=trace.append)):
        await trio.sleep(1)
    assert stages == [event.stage for event in trace if isinstance(event, events.StageReached)]


def test_every_error_has_a_place_in_the_tree_and_is_exported():
    """The tree in the docstring of `triolet.core.errors`, read as class names."""
    errors = triolet.core.errors
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(re.findall(r"[─ ]([A-Z]\w+(?:Error|Request|Audio|Large|Model|Closed|ed))\b", errors.__doc__)) == classes
    assert classes <= set(triolet.__all__)


# -- the import rule -------------------------------------------------------------------------------------------------


def imports(path: Path, room: str) -> Iterator[tuple[str, str]]:
    """(room, module) for what is imported from this package, ("outside", package) for the rest."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (("outside", alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from _imports_from(node, room)


def _imports_from(node: ast.ImportFrom, room: str) -> Iterator[tuple[str, str]]:
    base = node.module.split(".") if node.module else []
    if node.level == 0:
        yield ("outside", base[0])
        return
    package = ([room] if room else [])[: 2 - node.level] + base
    for alias in node.names:
        target = [*package, alias.name]
        inside = target[0] if target[0] in ROOMS else ""
        yield (inside, target[1] if inside else target[0])


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room or "src")
def test_the_import_rule_holds(room):
    """core <- models <- actors <- api <- src; only gpu_runner reaches models from actors; actors never each other."""
    wrong = []
    for path in sorted(ROOMS[room].glob("*.py")):
        for where, what in imports(path, room):
            allowed = MAY_USE[room] | {room}
            if room == "actors" and path.stem == "gpu_runner":
                allowed = allowed | {"models"}
            if path.relative_to(ROOT).as_posix() in SCRIPTS:
                continue
            bad = what in FORBIDDEN.get(room, set()) | {"triolet"} if where == "outside" else where not in allowed
            meets = room == where == "actors" and what in ACTORS and path.stem in ACTORS - {"supervisor"}
            if bad or meets:
                wrong.append(f"{path.relative_to(ROOT)} imports {where}.{what}")
    assert not wrong
