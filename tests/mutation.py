"""Small mistakes in `core/` and `actors/`, one at a time, and whether the tests notice them: ``make mutants``.

::

    python -m pytest tests/properties tests/actors -p tests.mutation --mutants 200 --mutants-seed 1 \\
        --hypothesis-profile=mutation

A mutant is one function with one place changed: a comparison, an operator, a number, a condition turned round, a
statement left out. All tests run once, and each is noted with the functions that it reaches. Then each mutant has a
process of its own, where the tests that reach it run, the quickest first, until one fails. Mutants are drawn by the
seed from all that there are. The rate at the end counts those that mean the same as the program, too, which no test
can notice.

mutmut and cosmic-ray start the tests anew for each mutant, which takes as long as a hundred mutants here.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from attrs import frozen

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("core", "actors")
PATIENCE = 5.0  # seconds that a test may take beyond ten times what it takes without a mistake; then it hangs
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
}


@frozen
class Mutant:
    """The place ``index`` of ``function`` of a module, as ``core.ledger`` and ``EncoderLedger.freed``, is mistaken."""

    module: str
    function: str
    index: int
    line: int
    mistake: str

    def __str__(self) -> str:
        return f"{self.module.replace('.', '/')}.py:{self.line} {self.function}: {self.mistake}"


# -- making mutants ----------------------------------------------------------------------------------------------------


def mutants() -> Iterator[Mutant]:
    """All that there are, in the order of the source."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for function, node in _functions(ast.parse(path.read_text())):
            for index, (line, mistake) in enumerate(_change(node, -1)):
                yield Mutant(module, function, index, line, mistake)


def _functions(tree: ast.Module | ast.ClassDef, owner: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods with their qualified names; those within functions belong to these."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield owner + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{owner}{node.name}.")


def _change(function: Any, wanted: int) -> list[tuple[int, str]]:
    """The mistakes that can be made in a function, by line; the one at ``wanted`` is made."""
    found: list[tuple[int, str]] = []

    def may(line: int, mistake: str) -> bool:
        found.append((line, mistake))
        return len(found) - 1 == wanted

    nodes = [node for statement in function.body for node in ast.walk(statement)]
    spared = {id(part) for node in nodes for part in _spared(node)}
    for node in nodes:
        if id(node) in spared:
            continue
        _swap(node, may)
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list):
                _leave_out(body, spared, may)
    _leave_out(function.body, spared, may)
    return found


def _spared(node: ast.AST) -> Iterator[ast.AST]:
    """What says something to people alone: errors' texts, docstrings and annotations."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        yield from ast.walk(node)
    if isinstance(node, ast.Assert):  # noticed by nobody but us
        yield from ast.walk(node)
    if isinstance(node, ast.AnnAssign):
        yield from ast.walk(node.annotation)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom | ast.Await):
        yield node


def _swap(node: Any, may: Any) -> None:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        other = SWAPS[type(node.ops[0])]
        if may(node.lineno, f"{type(node.ops[0]).__name__} becomes {other.__name__}"):
            node.ops[0] = other()
    if isinstance(node, ast.BoolOp | ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        other = SWAPS[type(node.op)]
        if may(node.lineno, f"{type(node.op).__name__} becomes {other.__name__}"):
            node.op = other()
    if isinstance(node, ast.If | ast.IfExp | ast.While) and may(node.lineno, "the condition is turned round"):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is int
        and may(node.lineno, f"{node.value} becomes one more")
    ):
        node.value += 1
    if (
        isinstance(node, ast.Constant)
        and type(node.value) is bool
        and may(node.lineno, f"{node.value} is turned round")
    ):
        node.value = not node.value


def _leave_out(body: list[ast.stmt], spared: set[int], may: Any) -> None:
    for place, node in enumerate(body):
        out = isinstance(node, ast.Expr | ast.AugAssign | ast.Delete | ast.Break | ast.Continue)
        if out and id(node) not in spared and may(node.lineno, f"{ast.unparse(node)[:50]!r} is left out"):
            body[place] = ast.Pass()


def plant(mutant: Mutant) -> None:
    """Puts the mistake into the program that runs.

    Raises:
        LookupError: the function is no more what its source says, as one that a decorator has replaced.
    """
    path = ROOT / (mutant.module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text())
    _change(copy.copy(dict(_functions(tree))[mutant.function]), mutant.index)
    code = compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)
    target = function_of(mutant)
    target.__code__ = next(one for one in _codes(code) if one.co_qualname == target.__code__.co_qualname)


def function_of(mutant: Mutant) -> FunctionType:
    """The function that runs. Raises `LookupError` as `plant` does."""
    owner: Any = importlib.import_module(f"triolet.{mutant.module}")
    *owners, name = mutant.function.split(".")
    for part in owners:
        owner = vars(owner)[part]
    found = vars(owner).get(name)
    found = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    found = inspect.unwrap(found) if callable(found) else found
    if not isinstance(found, FunctionType) or found.__code__.co_qualname != mutant.function:
        raise LookupError(f"{mutant.function} of {mutant.module} is {found!r}")
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


# -- running tests -----------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mutation")
    group.addoption("--mutants", type=int, default=200, help="mutants that are drawn")
    group.addoption("--mutants-seed", type=int, default=1)
    group.addoption("--mutants-least", type=float, default=0.0, help="percent that must be noticed")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Judges mutants instead of running the tests."""
    if session.testsfailed:
        raise session.Interrupted("the tests cannot be collected")
    say = session.config.get_terminal_writer().line
    allowed = [item for item in session.items if not any(map(item.get_closest_marker, ("thorough", "real_time")))]
    tests = _reached(allowed)
    say(f"{len(tests)} tests of {len(allowed)}")
    chosen = random.Random(session.config.option.mutants_seed).sample(list(mutants()), session.config.option.mutants)
    counts: dict[str, int] = defaultdict(int)
    for mutant in chosen:
        said = _judge(mutant, tests)
        counts[said] += 1
        if said in {"lives", "is not reached"}:
            say(f"{said}: {mutant}")
    judged = len(chosen) - counts["is no function"]
    rate = 100 * (counts["is noticed"] + counts["hangs"]) / judged
    say(f"{dict(counts)}: {rate:.1f} percent of {judged} are noticed")
    session.testsfailed = int(rate < session.config.option.mutants_least)
    return True


def _reached(items: Sequence[pytest.Item]) -> list[tuple[float, pytest.Item, set[str]]]:
    """The tests that pass: the seconds that each takes, and the functions that it reaches; the quickest first."""
    found = []
    for item in items:
        seen: set[CodeType] = set()

        def note(frame: FrameType, event: str, _: Any, seen: set[CodeType] = seen) -> None:
            if event == "call":
                seen.add(frame.f_code)

        begun = time.perf_counter()
        sys.setprofile(note)
        try:
            passed = all(report.passed for report in runtestprotocol(item, log=False, nextitem=None))
        finally:
            sys.setprofile(None)
        names = {_name(code) for code in seen if code.co_filename.startswith(str(ROOT))}
        if passed and names:
            found.append((time.perf_counter() - begun, item, names))
    return sorted(found, key=lambda one: one[0])


def _name(code: CodeType) -> str:
    """As a mutant has its module and outermost function."""
    path = Path(code.co_filename).relative_to(ROOT).with_suffix("")
    return f"{'.'.join(path.parts)}:{code.co_qualname.split('.<locals>')[0]}"


def _judge(mutant: Mutant, tests: Sequence[tuple[float, pytest.Item, set[str]]]) -> str:
    try:
        function_of(mutant)
    except LookupError:
        return "is no function"
    name = f"{mutant.module}:{mutant.function}"
    reaching = [(seconds, item) for seconds, item, names in tests if name in names]
    if not reaching:
        return "is not reached"
    child = os.fork()
    if not child:
        _run(mutant, reaching)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "lives", -signal.SIGALRM: "hangs"}.get(status, "is noticed")


def _run(mutant: Mutant, tests: Sequence[tuple[float, pytest.Item]]) -> None:
    """Ends this process: 0 if every test passes with the mistake, by the alarm if one takes too long."""
    status = 1
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        plant(mutant)
        for seconds, item in tests:
            signal.setitimer(signal.ITIMER_REAL, PATIENCE + 10 * seconds)
            if not all(report.passed for report in runtestprotocol(item, log=False, nextitem=None)):
                return
        status = 0
    finally:
        os._exit(status)
