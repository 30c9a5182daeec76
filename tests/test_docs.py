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
from triolet.models.speech.names import MODEL_TYPES
from triolet_testing.sim import sim_engine

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ("core", "models", "actors", "api", "server", "src/triolet", "packages", "benchmarks", "tests")
DOCUMENTS = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "README.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    *(f"docs/internals/{path.name}" for path in sorted((ROOT / "docs" / "internals").glob("*.md"))),
)


@cache
def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_spans(text: str) -> list[str]:
    """What stands in single backticks, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


# -- how it is built -------------------------------------------------------------------------------------------------


def test_the_architecture_stays_one_page():
    assert len(read("ARCHITECTURE.md").split()) <= 1_200


def test_the_ledger_table_is_the_one_in_the_code():
    """When it fails: CONTRIBUTING.md, "A transition of the ledger", says how to print the table."""
    text = read("docs/internals/ledger.md")
    (table,) = re.findall(r"<!-- ledger table -->\n(.*?)\n<!-- end of ledger table -->", text, re.DOTALL)
    assert table == transition_table()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_a_document_names_exists(document):
    """Files and links, tests, members as `Class.member`, and names beside the file that defines them. The changelog
    tells of files as they were."""
    text = read(document)
    spans = set(code_spans(text))
    linked = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    if document != "CHANGELOG.md":
        assert [span for span in sorted(filter(is_path, spans)) if not (ROOT / span).exists()] == []
        assert [link for link in sorted(linked) if not (ROOT / document).parent.joinpath(link).exists()] == []
    named = {span for span in spans if re.fullmatch(r"test_\w+|[A-Z]\w+\.\w+", span)}
    named |= {f"EngineConfig.{name}" for name in re.findall(r"`EngineConfig\((\w+)=", text)}
    assert named - definitions() == set()
    assert [pair for pair in beside(document) if pair[0] not in definitions(pair[1])] == []


def beside(document: str) -> list[tuple[str, str]]:
    """`name` in `path`, or `name` (`path`): a class, a function, a member or a constant."""
    return re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`(?: in |\s+\()`([\w/-]+\.py)`", read(document))


def test_the_documents_name_something_of_each_kind():
    """The check above would pass on documents that name nothing."""
    spans = {span for document in DOCUMENTS for span in code_spans(read(document))}
    assert {"core/planning/planner.py", "Planner.next_step"} <= spans
    assert ("Planner", "core/planning/planner.py") in {pair for document in DOCUMENTS for pair in beside(document)}
    assert {"Door", "order_of", "TRANSITIONS", "Chunk.page_table"} <= definitions()
    assert "Door" not in definitions("core/order.py")


def test_an_entry_of_the_map_for_newcomers_names_a_file_and_is_short():
    _, _, after = read("CONTRIBUTING.md").partition("## What to change where\n\n")
    entries = after.partition("\n\n## ")[0].split("\n\n")
    assert len(entries) >= 10
    assert [entry for entry in entries if len(entry.splitlines()) > 6] == []
    assert [entry for entry in entries if not (any(map(is_path, code_spans(entry))) or "](" in entry)] == []


def is_path(span: str) -> bool:
    """Whether what stands in backticks is the name of a file or folder of the repository."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.py|\.toml|\.txt|\.md)", span) is not None


@cache
def definitions(path: str = "") -> frozenset[str]:
    """What the file ``path``, or the whole package with its tests, defines: classes, functions, constants and other
    names of a module, as ``name``, and every member of a class as ``Class.member``."""
    paths = [ROOT / path] if path else [found for room in PACKAGE for found in (ROOT / room).rglob("*.py")]
    found: set[str] = set()
    for one in paths:
        tree = ast.parse(one.read_text(encoding="utf-8"))
        found |= set(_names(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{member}" for member in (*_names(node.body), *_attributes(node))}
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
    return frozenset(found)


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))


def _attributes(cls: ast.ClassDef) -> Iterator[str]:
    """What its methods assign to ``self``."""
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


async def test_the_stages_are_those_of_an_engine_that_lives_and_ends(autojump_clock):
    stages = re.findall(r"^\| `([a-z ]+)` \|", read("docs/internals/supervisor.md"), re.MULTILINE)
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


def test_every_error_has_a_row_that_says_what_becomes_of_it():
    """But the roots of the tree, which nothing raises."""
    _, _, rest = read("docs/reliability.md").partition("## What each error becomes")
    told, _, _ = rest.partition("\n## ")
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes - {"TrioletError", "CallerError"} <= set(re.findall(r"\w+", told))


def test_every_model_of_speech_has_a_row():
    """And the rows have no other."""
    table = [line for line in read("docs/speech_models.md").splitlines() if line.startswith("| ")][1:]
    assert {name for line in table for name in code_spans(line.split("|")[2])} == set(MODEL_TYPES)
