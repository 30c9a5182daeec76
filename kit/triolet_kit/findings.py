"""Findings of the kit, and the search for them, for every protocol.

`examine` draws one workload after the other from a seed and plays each. If `play` raises `BrokenPromise`, that is a
finding: the workload is shrunk, and the search for other broken promises goes on with the next workload. The same seed
gives the same findings; no file is read or written, and the clock is not read.

The kit shrinks workloads itself, since it does without Hypothesis.
"""

from __future__ import annotations

import enum
import random
import re
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import attrs
from attrs import field, frozen

W = TypeVar("W")
T = TypeVar("T")

WORKLOADS = 1000
"""The number of workloads that are played by default."""

SHRINKS = 3000
"""The most workloads that are played to shrink one finding."""

_WIDTH = 110  # columns of a report's prose


class Severity(enum.IntEnum):
    """The effect of a broken promise in production. A smaller number is a worse effect."""

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
    """A promise of an engine. The sentence ``why`` says why a broken one matters in production."""

    name: str
    severity: Severity
    why: str


RAISES_NOTHING = Promise(
    "raises nothing",
    Severity.CRASHES,
    "An exception in the step loop ends the step, and in most engines every request that runs, or the process.",
)
"""A promise of every protocol: the subject raises nothing in the calls of its protocol."""
NO_FREE_WHILE_HELD = Promise(
    "no free while held",
    Severity.CORRUPTS,
    "A step reads an output that is gone: an error at best, another request's image or voice at worst.",
)
NO_PHANTOM = Promise(
    "no phantom",
    Severity.CORRUPTS,
    "The runner finds nothing under the key and crashes, or reads what happens to lie there.",
)
ALWAYS_FREED = Promise(
    "always freed eventually",
    Severity.LEAKS,
    "Memory that nobody gives back is lost until the process ends, and with it the next engine's start.",
)
ENCODE_ONCE = Promise(
    "encode once",
    Severity.WASTES,
    "The encoder computes what is there already, and writes over an output that others may be reading.",
)
"""The four promises that both protocols have."""


def tupled(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns ``values`` as a tuple. As a converter of a field, this function lets mypy accept a list as the
    argument.
    """
    return tuple(values)


@frozen
class Table:
    """A history as a table of steps. `str` aligns the columns, and leaves out trailing columns that are empty in every
    row."""

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = field(default=(), converter=tupled)

    def __str__(self) -> str:
        used = [index for index in range(len(self.columns)) if any(row[index] for row in self.rows)]
        lines = [[row[index] for index in used] for row in (self.columns, *self.rows)]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        )


class BrokenPromise(AssertionError):
    """The error of a broken ``promise``. ``what`` says how the promise is broken, and ``table`` is the history until
    then. ``kind`` distinguishes ways to break one promise. Each way is a finding of its own.
    """

    def __init__(self, promise: Promise, what: str, table: Table | None = None, kind: str = "") -> None:
        self.promise, self.what, self.table, self.kind = promise, what, table or Table(), kind
        super().__init__(promise, what, self.table, kind)

    def __str__(self) -> str:
        broken = f"{self.promise.name}: {self.what}"
        return f"{broken}\n\n{self.table}" if self.table.rows else broken


def raised(error: Exception, table: Table) -> BrokenPromise:
    """Makes a broken promise of an error that the subject raised. Errors of one type from one function are of one
    kind."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return BrokenPromise(
        RAISES_NOTHING,
        f"{type(error).__name__}: {error} (line {frame.lineno} of {frame.name})",
        table,
        f"{type(error).__name__} in {frame.name}",
    )


@frozen
class Script:
    """The form of regression tests: the imports of the file, and the call of ``play`` in each test. In the call, the
    workload stands between the arguments ``before`` and ``after``.
    """

    imports: str
    play: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()

    def call(self, workload: Any) -> str:
        """Returns the source of the call that plays ``workload``."""
        lines = "".join(f"    {argument},\n" for argument in (*self.before, short(workload), *self.after))
        return f"{self.play}(\n{lines})"


def short(value: Any) -> str:
    """Returns Python source that makes ``value``. For a class of attrs, arguments that equal their defaults are left
    out."""
    if not attrs.has(type(value)):
        return repr(value)
    told = [(one.name, getattr(value, one.name), one.default) for one in attrs.fields(type(value))]
    arguments = ", ".join(f"{name}={here!r}" for name, here, default in told if here != default)
    return f"{type(value).__name__}({arguments})"


@frozen(kw_only=True)
class Finding:
    """One way in which a promise is broken.

    ``workload`` is the source of the shrunk workload. ``number`` counts workloads from 1, up to the one that broke the
    promise. ``repeats`` is false if the same workload, played again, did not break the promise again.
    """

    promise: Promise
    kind: str
    what: str
    table: Table
    workload: str
    number: int
    repeats: bool
    script: Script = field(repr=False, eq=False)
    shrunk: Any = field(repr=False, eq=False)  # the workload itself

    def __str__(self) -> str:
        """Returns the finding's paragraph of the report."""
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
        """Returns the source of a file that has only this regression test."""
        return f"{self.script.imports}\n\n{self.test_function()}"

    def test_function(self, number: int = 1) -> str:
        """Returns the source of a regression test, without imports. ``number`` distinguishes several tests of one
        promise."""
        words = re.findall(r"[a-z0-9]+", self.promise.name.lower())
        name = "_".join(["test", *words, *([str(number)] if number > 1 else [])])
        docstring = textwrap.fill(f"{self.what}. {self.promise.why}", _WIDTH - 4)
        docstring = docstring.replace("\\", "\\\\").replace('"', '\\"')
        body = textwrap.indent(f'"""{docstring}"""\n{self.script.call(self.shrunk)}', "    ")
        return f"def {name}():\n{body}\n"


@frozen
class Findings:
    """All findings of a search through ``played`` workloads, the worst first. It is false if there are none."""

    found: tuple[Finding, ...]
    played: int

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        """Returns the report."""
        if not self.found:
            return f"no promise was broken in {self.played} workloads"
        several = "a promise is broken" if len(self) == 1 else f"{len(self)} findings"
        told = [f"{several} in {self.played} workloads, the worst first"]
        told += [f"{number}. {finding}" for number, finding in enumerate(self.found, 1)]
        return "\n\n".join(told)

    def raise_if_any(self) -> None:
        """Raises the worst finding, with the whole report as a note.

        Raises:
            BrokenPromise: there is a finding.
        """
        if self.found:
            worst = self.found[0]
            error = BrokenPromise(worst.promise, worst.what, worst.table, worst.kind)
            error.add_note(str(self))
            raise error

    def tests(self) -> str:
        """Returns the source of a file with a regression test for each finding; empty if there is none."""
        if not self.found:
            return ""
        seen = Counter[str]()
        functions = []
        for finding in self.found:
            seen[finding.promise.name] += 1
            functions.append(finding.test_function(seen[finding.promise.name]))
        return "\n\n".join([self.found[0].script.imports, *functions])


def examine(
    draw: Callable[[random.Random], W],
    play: Callable[[W], object],
    simpler: Callable[[W], Iterable[W]],
    script: Script,
    *,
    seed: int = 0,
    workloads: int = WORKLOADS,
) -> Findings:
    """Plays ``workloads`` workloads. For each way in which a promise is broken, the first workload that does so is
    shrunk.

    Args:
        draw: makes a workload from random numbers, and from nothing else.
        play: plays a workload on a new subject and may raise `BrokenPromise`. Any other error is a fault of the
            protocol and ends the search (`raised` turns errors of the subject into findings).
        simpler: returns workloads that are simpler than the given one, the boldest first; see `without_some`.
        script: the form of the regression tests.
        seed: equal seeds give equal workloads. Workload ``n`` depends on ``seed`` and ``n`` alone.
        workloads: how many workloads are played.
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
            workload=short(workload),
            number=number,
            repeats=repeats is not None,
            script=script,
            shrunk=workload,
        )
    worst_first = sorted(found.values(), key=lambda finding: finding.promise.severity)
    return Findings(tuple(worst_first), workloads)


def without_some(parts: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Yields ``parts`` without some of them: first without all, then without each half, and so on to each single one.
    This function helps to write ``simpler``.
    """
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
    """Returns the error if ``workload`` breaks the promise of ``identity``; ``None``: it does not."""
    broken = _broken(play, workload)
    return broken if broken is not None and _identity(broken) == identity else None


def _shrink(
    play: Callable[[W], object], simpler: Callable[[W], Iterable[W]], workload: W, broken: BrokenPromise
) -> tuple[W, BrokenPromise]:
    """Returns the simplest workload found that breaks the same promise in the same way, with the error."""
    left, identity = SHRINKS, _identity(broken)
    candidates = iter(simpler(workload))
    while left and (candidate := next(candidates, None)) is not None:
        left -= 1
        again = _breaks(play, candidate, identity)
        if again is not None:
            workload, broken, candidates = candidate, again, iter(simpler(candidate))
    return workload, broken


def import_of(make: Callable[..., Any], subject: str | None) -> tuple[str, str]:
    """Returns the line by which a regression test imports the subject's factory, and the factory's name. ``subject`` is
    ``module:name``; by default the place where ``make`` was defined. If it cannot be imported, the line asks the reader
    for a name.
    """
    named = subject or f"{make.__module__}:{getattr(make, '__qualname__', '')}"
    module, _, name = named.partition(":")
    if module != "__main__" and all(part.isidentifier() for part in (*module.split("."), name)):
        return f"from {module} import {name}", name
    return f"from my_engine import make  # what was checked, {named}, cannot be imported: name yours", "make"
