"""What the kit finds, and the search for it. Nothing here knows what is played, with whom, or by which protocol.

`examine` draws one workload after the other from a seed and plays each. A `play` that raises `BrokenPromise` is a
finding: its workload is shrunk, and the search goes on for other promises until the workloads are used up. The same
seed gives the same findings; no file is read or written, and the clock is not asked.

A protocol brings four functions: ``draw`` (a workload by chance), ``play`` (raises `BrokenPromise`), ``simpler`` (what
a workload may be shrunk to) and a `Script` (how a regression test is written)::

    findings = examine(draw, partial(play, make_cache), simpler, script, seed=0, workloads=1000)
    print(findings)
    findings.raise_if_any()
"""

from __future__ import annotations

import enum
import inspect
import random
import re
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, Generic, TypeVar

from attrs import field, frozen

from ...core.errors import InvariantViolation

W = TypeVar("W")
T = TypeVar("T")

WORKLOADS = 1000
"""How many workloads are played by default."""

SHRINKS = 3000
"""How many workloads are played at most to shrink one finding."""

_WIDTH = 110  # columns of a report's prose


class Severity(enum.IntEnum):
    """What a broken promise does in production; the smaller, the worse."""

    CORRUPTS = 1
    CRASHES = 2
    HANGS = 3
    LEAKS = 4
    WASTES = 5


_EFFECTS = {
    Severity.CORRUPTS: "wrong output, without an error",
    Severity.CRASHES: "a crash",
    Severity.HANGS: "requests that never end",
    Severity.LEAKS: "memory that never comes back",
    Severity.WASTES: "work done in vain",
}


@frozen
class Promise:
    """What an engine promises. ``why`` is the sentence that says why a broken one matters in production."""

    name: str
    severity: Severity
    why: str


RAISES_NOTHING = Promise(
    "raises nothing",
    Severity.CRASHES,
    "An exception in the step loop ends the step, and in most engines every request that runs, or the process.",
)
"""Of every protocol: the subject raises nothing at what it is promised to be called with."""


def _as_rows(rows: Iterable[Iterable[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(row) for row in rows)


@frozen
class Table:
    """A history as a table of steps. `str` aligns the columns; trailing columns that are empty throughout are left
    out."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = field(default=(), converter=_as_rows)

    def __str__(self) -> str:
        used = [index for index in range(len(self.columns)) if any(row[index] for row in self.rows)]
        lines = [[row[index] for index in used] for row in (self.columns, *self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


class BrokenPromise(InvariantViolation):
    """``promise`` is broken; ``what`` says how, ``table`` what happened until then. ``kind`` tells apart different ways
    to break one promise: each is a finding of its own."""

    def __init__(self, promise: Promise, what: str, table: Table | None = None, kind: str = "") -> None:
        super().__init__(promise.name, what)
        self.promise = promise
        self.table = table or Table()
        self.kind = kind

    def __str__(self) -> str:
        told = super().__str__()
        return f"{told}\n\n{self.table}" if self.table.rows else told

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.promise, self.what, self.table, self.kind)


def raised(error: Exception, table: Table) -> BrokenPromise:
    """The finding that the subject raised ``error``. Errors of one type from one function are one kind."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return BrokenPromise(
        RAISES_NOTHING,
        f"{type(error).__name__}: {error} (line {frame.lineno} of {frame.name})",
        table,
        f"{type(error).__name__} in {frame.name}",
    )


@frozen
class Script(Generic[W]):
    """How a regression test is written: plain Python, without Triolet.

    ``prelude`` is what all tests of a file share; ``body`` makes the statements of one test, from the workload.
    """

    prelude: str
    body: Callable[[W], str]


@frozen(kw_only=True)
class Finding:
    """One way in which a promise is broken.

    ``workload`` is the shrunk workload's ``repr``; ``number`` counts the workloads until it was found, from 1;
    ``repeats`` is false where the same workload, played again, did not break the promise again.
    """

    promise: Promise
    kind: str
    what: str
    table: Table
    workload: str
    number: int
    repeats: bool
    script: Script[Any] = field(repr=False, eq=False)
    shrunk: Any = field(repr=False, eq=False)  # the workload itself

    def __str__(self) -> str:
        """What an engineer reads."""
        promise = self.promise
        told = [
            f"{promise.name} ({_EFFECTS[promise.severity]}; workload {self.number})",
            textwrap.fill(self.what, _WIDTH, initial_indent="  ", subsequent_indent="  "),
            textwrap.fill(f"Why it matters: {promise.why}", _WIDTH, initial_indent="  ", subsequent_indent="  "),
        ]
        if not self.repeats:
            again = "Played again, the same workload did not break this again: state of one subject reaches the next."
            told.append(textwrap.indent(again, "  "))
        if self.table.rows:
            told += ["", textwrap.indent(str(self.table), "  "), ""]
        told.append(textwrap.indent(self.workload, "  "))
        return "\n".join(told)

    def test(self) -> str:
        """The source of a stand-alone regression test."""
        return f"{self.script.prelude}\n\n{self.test_function()}"

    def test_function(self, number: int = 1) -> str:
        """The test alone, without what the tests of a file share. Several of one promise are numbered."""
        words = re.findall(r"[a-z0-9]+", self.promise.name.lower())
        name = "_".join(["test", *words, *([str(number)] if number > 1 else [])])
        docstring = textwrap.fill(f"{self.what}. {self.promise.why}", _WIDTH - 4)
        docstring = docstring.replace("\\", "\\\\").replace('"', '\\"')
        body = textwrap.indent(f'"""{docstring}"""\n{self.script.body(self.shrunk)}', "    ")
        return f"def {name}():\n{body}\n"


@frozen
class Findings:
    """All that was found, the worst first; ``played`` workloads were searched. True if there is anything."""

    found: tuple[Finding, ...]
    played: int

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        """The report."""
        if not self.found:
            return f"no promise was broken in {self.played} workloads"
        several = "a promise is broken" if len(self) == 1 else f"{len(self)} findings"
        told = [f"{several} in {self.played} workloads, the worst first"]
        told += [f"{number}. {finding}" for number, finding in enumerate(self.found, 1)]
        return "\n\n".join(told)

    def raise_if_any(self) -> None:
        """Raises the worst finding, with the whole report as a note.

        Raises:
            BrokenPromise: there is one.
        """
        if self.found:
            worst = self.found[0]
            error = BrokenPromise(worst.promise, worst.what, worst.table, worst.kind)
            error.add_note(str(self))
            raise error

    def tests(self) -> str:
        """The source of a file with a regression test for each finding; empty without findings."""
        if not self.found:
            return ""
        seen: dict[str, int] = {}
        functions = []
        for finding in self.found:
            seen[finding.promise.name] = seen.get(finding.promise.name, 0) + 1
            functions.append(finding.test_function(seen[finding.promise.name]))
        return "\n\n".join([self.found[0].script.prelude, *functions])


def examine(
    draw: Callable[[random.Random], W],
    play: Callable[[W], object],
    simpler: Callable[[W], Iterable[W]],
    script: Script[W],
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
) -> Findings:
    """Plays ``workloads`` workloads, and shrinks the first of each way in which a promise is broken.

    Args:
        draw: makes a workload of random numbers, of these alone.
        play: plays a workload on a new subject. Raises `BrokenPromise`; what else it raises is a fault of the protocol
            and ends the search (errors of the subject become findings by `raised`).
        simpler: workloads that are simpler than the one given, the boldest first; see `without_some`.
        script: how a regression test is written.
        seed: the same seed gives the same workloads. Workload ``n`` depends on ``seed`` and ``n`` alone.
        workloads: how many.
    """
    found: dict[tuple[str, str], Finding] = {}
    for number in range(1, workloads + 1):
        workload = draw(random.Random(f"{seed} {number}"))
        broken = _broken(play, workload)
        if broken is None or _identity(broken) in found:
            continue
        repeats = _breaks(play, workload, _identity(broken))
        if repeats is not None:
            workload, broken = _shrink(play, simpler, workload, repeats)
        found[_identity(broken)] = Finding(
            promise=broken.promise,
            kind=broken.kind,
            what=broken.what,
            table=broken.table,
            workload=repr(workload),
            number=number,
            repeats=repeats is not None,
            script=script,
            shrunk=workload,
        )
    worst_first = sorted(found.values(), key=lambda finding: finding.promise.severity)
    return Findings(tuple(worst_first), workloads)


def without_some(parts: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """``parts`` without a run of them: all of them, then half of them, at last a single one. A building
    block of ``simpler``."""
    size = len(parts)
    while size:
        yield from ((*parts[:at], *parts[at + size :]) for at in range(0, len(parts), size))
        size //= 2


def _identity(broken: BrokenPromise) -> tuple[str, str]:
    return broken.promise.name, broken.kind


def _broken(play: Callable[[W], object], workload: W) -> BrokenPromise | None:
    try:
        play(workload)
    except BrokenPromise as broken:
        return broken
    return None


def _breaks(play: Callable[[W], object], workload: W, identity: tuple[str, str]) -> BrokenPromise | None:
    """How ``workload`` breaks the promise of ``identity``; ``None``: it does not."""
    broken = _broken(play, workload)
    return broken if broken is not None and _identity(broken) == identity else None


def _shrink(
    play: Callable[[W], object], simpler: Callable[[W], Iterable[W]], workload: W, broken: BrokenPromise
) -> tuple[W, BrokenPromise]:
    """The simplest workload found that breaks the same promise in the same way."""
    left, identity = SHRINKS, _identity(broken)
    candidates = iter(simpler(workload))
    while left and (candidate := next(candidates, None)) is not None:
        left -= 1
        again = _breaks(play, candidate, identity)
        if again is not None:
            workload, broken, candidates = candidate, again, iter(simpler(candidate))
    return workload, broken


def carried(*modules: ModuleType) -> str:
    """The text of modules that a regression test carries along, as one: without their docstrings, and without imports
    of each other."""
    imports, texts = set(), []
    for module in modules:
        lines = inspect.getsource(module).split('"""', 2)[2].splitlines()
        of_python = {line for line in lines if re.match(r"(from \w|import )", line)}
        imports |= of_python
        texts.append(
            "\n".join(line for line in lines if line not in of_python and not line.startswith("from .")).strip()
        )
    ordered = sorted(imports, key=lambda line: ("__future__" not in line, line))
    return "\n".join([ordered[0], "", *ordered[1:]]) + "\n\n" + "\n\n\n".join(texts) + "\n"


def import_of(make: Callable[..., Any], subject: str | None) -> tuple[str, str]:
    """The line by which a regression test imports what makes the subject, and the name it has then. ``subject`` is
    ``module:name``; by default it is where ``make`` was defined, unless it has no name there that can be imported."""
    named = subject or f"{make.__module__}:{getattr(make, '__qualname__', '')}"
    module, _, name = named.partition(":")
    if module != "__main__" and all(part.isidentifier() for part in (*module.split("."), name)):
        return f"from {module} import {name}", name
    return f"from my_engine import make  # what was checked, {named}, cannot be imported: name yours", "make"
