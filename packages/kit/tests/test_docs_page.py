"""The page for engine builders is true: its code runs in order, and prints what it says."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
from pathlib import Path

import pytest

from triolet_kit import step_engine
from triolet_kit.steps import PROMISES, StepDeclaration

from .test_steps import PLANTED

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapt_your_cache.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", TEXT, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run():
    """What each block printed; all share their names."""
    names: dict[str, object] = {"__name__": "page"}
    printed = []
    for code, _ in BLOCKS:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(PAGE), "exec"), names)
        printed.append(out.getvalue())
    return printed


def test_every_block_prints_what_stands_below_it(run):
    assert len(BLOCKS) == 5
    assert run == [said for _, said in BLOCKS]


def test_the_engine_of_the_page_is_the_one_in_the_package():
    """But for type hints and docstrings of the adapter."""
    page = ast.parse("".join(code for code, _ in BLOCKS))
    for name in ("StepEngine", "Adapter"):
        (shown,) = [node for node in page.body if isinstance(node, ast.ClassDef) and node.name == name]
        packaged = ast.parse(inspect.getsource(getattr(step_engine, name))).body[0]
        assert plain(shown) == plain(packaged)


def plain(tree: ast.AST) -> str:
    """Without type hints and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body = [untyped(one) for one in node.body if not is_docstring(one)]
    return ast.unparse(tree)


def untyped(node: ast.stmt) -> ast.stmt:
    if isinstance(node, ast.AnnAssign):
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)
    return node


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def table(heading: str, text: str = TEXT) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    after = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in after]


def test_the_table_of_promises_is_that_of_the_kit_the_worst_first():
    assert [row[0] for row in table("promise")] == [promise.name for promise in PROMISES]


def test_the_table_of_options_has_every_declaration_with_its_default():
    words = {"True": "yes", "False": "no"}
    defaults = {one.name: str(one.default) for one in StepDeclaration.__attrs_attrs__}
    told = [(row[0].strip("`"), row[1].strip("`")) for row in table("option")]
    assert told == [(name, words.get(default, default)) for name, default in defaults.items()]


def test_the_table_of_bugs_has_every_planted_one_and_the_promise_that_it_breaks():
    assert [row[2] for row in table("bug")] == [promise.name for promise in PLANTED.values()]
