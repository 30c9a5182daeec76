"""Findings of the kit, for every protocol: the broken promise, its shortest history, and the regression test. The
module `search` finds them.
"""

from __future__ import annotations

import enum
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
from attrs import field, frozen

_WIDTH = 110  # columns of a report's prose


class Severity(enum.IntEnum):
    """The effect of a broken promise in production. A smaller number is a worse effect."""

    MISLEADS = 0
    CORRUPTS = 1
    CRASHES = 2
    HANGS = 3
    LEAKS = 4
    WASTES = 5


_EFFECTS = {
    Severity.MISLEADS: "the adapter is wrong",
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


SPEAKS = Promise(
    "speaks the protocol",
    Severity.MISLEADS,
    "The kit judges what the adapter answers. While the answers are wrong, it overlooks faults of the engine, and "
    "finds some that are none.",
)
"""A promise of every adapter: it has the methods of its protocol, and they answer in its form."""
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
"""The promises of the encoder cache that both protocols have."""


def tupled(values: Iterable[Any]) -> tuple[Any, ...]:
    """Returns ``values`` as a tuple. As a converter of a field, this function lets mypy accept a list as the
    argument.
    """
    return tuple(values)


@frozen
class Table:
    """A history as a table of steps. `str` aligns the columns, and leaves out trailing columns that are empty in every
    row.
    """

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

    def values(self) -> list[dict[str, str]]:
        """Returns the rows as values of JSON, without empty cells."""
        return [{name: cell for name, cell in zip(self.columns, row, strict=True) if cell} for row in self.rows]


def named(promise: Promise, kind: str) -> str:
    """Returns the name of a way in which ``promise`` is broken."""
    return f"{promise.name}: {kind}" if kind else promise.name


def counted(what: str, counts: Mapping[str, int]) -> str:
    """Returns a paragraph of ``counts``."""
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    return textwrap.fill(f"{what}: {told}", _WIDTH + 2, subsequent_indent="  ")


class BrokenPromise(AssertionError):
    """The error of a broken ``promise``. ``what`` says how the promise is broken, and ``table`` is the history until
    then. ``kind`` distinguishes the causes of one broken promise; each is a finding of its own.
    """

    def __init__(self, promise: Promise, what: str, table: Table | None = None, kind: str = "") -> None:
        self.promise, self.what, self.table, self.kind = promise, what, table or Table(), kind
        super().__init__(promise, what, self.table, kind)

    @property
    def name(self) -> str:
        """The promise, and the kind if there is one, as ``ignore`` takes them."""
        return named(self.promise, self.kind)

    def __str__(self) -> str:
        broken = f"{self.promise.name}: {self.what}"
        return f"{broken}\n\n{self.table}" if self.table.rows else broken


@frozen
class Script:
    """The form of regression tests. A file imports what its tests need of the ``names`` of ``module``, and the subject
    by the line ``subject``. Each test calls ``play``, with the workload between the arguments ``before`` and ``after``.
    """

    module: str
    names: tuple[str, ...]
    subject: str
    play: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()

    def file(self, functions: Iterable[str]) -> str:
        """Returns the source of a file with these tests."""
        source = "\n\n".join(functions)
        used = [name for name in self.names if f"{name}(" in source]
        return f"from {self.module} import {', '.join(used)}\n\n{self.subject}\n\n\n{source}"

    def call(self, workload: Any) -> str:
        """Returns the source of the call that plays ``workload``."""
        lines = "".join(f"    {argument},\n" for argument in (*self.before, short(workload), *self.after))
        return f"{self.play}(\n{lines})"


def short(value: Any) -> str:
    """Returns Python source that makes ``value``. For a class of attrs, arguments that equal their defaults are left
    out.
    """
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

    @property
    def name(self) -> str:
        """The promise, and the kind if there is one, as ``ignore`` takes them."""
        return named(self.promise, self.kind)

    def __str__(self) -> str:
        """Returns the finding's paragraph of the report."""
        promise = self.promise
        told = [
            f"{self.name} ({_EFFECTS[promise.severity]}; workload {self.number})",
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
        return self.script.file([self.test_function()])

    def test_function(self, number: int = 1) -> str:
        """Returns the source of a regression test, without imports. ``number`` distinguishes several tests of one
        promise.
        """
        words = re.findall(r"[a-z0-9]+", self.promise.name.lower())
        name = "_".join(["test", *words, *([str(number)] if number > 1 else [])])
        docstring = textwrap.fill(f"{self.what}. {self.promise.why}", _WIDTH - 4)
        if self.table.rows:
            docstring += f"\n\n{self.table}\n"
        docstring = docstring.replace("\\", "\\\\").replace('"', '\\"')
        body = textwrap.indent(f'"""{docstring}"""\n{self.script.call(self.shrunk)}', "    ")
        return f"def {name}():\n{body}\n"

    def values(self) -> dict[str, Any]:
        """Returns the finding as values of JSON."""
        return {
            "promise": self.promise.name,
            "kind": self.kind,
            "severity": self.promise.severity.name.lower(),
            "what": self.what,
            "why": self.promise.why,
            "number": self.number,
            "repeats": self.repeats,
            "history": self.table.values(),
            "workload": self.workload,
            "test": self.test(),
        }


@frozen
class Findings:
    """All findings of a search through ``played`` workloads of ``seed``, the worst first. It is false if there are
    none. ``statistics`` counts the events of the workloads. ``ignored`` counts, by name, the workloads that ended with
    a finding that was to be ignored. ``missed`` are the events that had to happen and never did, ``thin`` those that
    happened so seldom that they are hardly checked.
    """

    found: tuple[Finding, ...]
    played: int
    seed: int = 0
    statistics: Mapping[str, int] = field(factory=dict)
    ignored: Mapping[str, int] = field(factory=dict)
    missed: tuple[str, ...] = ()
    thin: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __str__(self) -> str:
        """Returns the report."""
        several = "a promise is broken" if len(self) == 1 else f"{len(self)} findings"
        told = [f"{several} in {self.played} workloads, the worst first"]
        if not self.found:
            told = [f"no promise was broken in {self.played} workloads"]
        told += [f"{number}. {finding}" for number, finding in enumerate(self.found, 1)]
        if self.statistics:
            told.append(counted("what happened", self.statistics))
        if self.thin:
            thin = counted("seldom or never", {name: self.statistics[name] for name in self.thin})
            told.append(
                f"{thin}\n  This is hardly checked: the adapter or a declaration may keep the kit away from it."
            )
        if self.missed:
            told.append(f"must happen, and never did: {', '.join(self.missed)}")
        if self.ignored:
            told.append(counted(f"ignored {sum(self.ignored.values())}", self.ignored))
        return "\n\n".join(told)

    def as_json(self) -> str:
        """Returns the findings, the seed and the statistics as JSON."""
        values = {
            "seed": self.seed,
            "workloads": self.played,
            "findings": [finding.values() for finding in self.found],
            "ignored": dict(self.ignored),
            "statistics": dict(self.statistics),
            "missed": self.missed,
            "thin": self.thin,
        }
        return json.dumps(values, indent=2)

    def raise_if_any(self) -> None:
        """Raises the worst finding, with the whole report as a note.

        Raises:
            BrokenPromise: there is a finding.
            AssertionError: there is none, but something that must happen never did.
        """
        if self.found:
            worst = self.found[0]
            error = BrokenPromise(worst.promise, worst.what, worst.table, worst.kind)
            error.add_note(str(self))
            raise error
        assert not self.missed, str(self)

    def tests(self) -> str:
        """Returns the source of a file with a regression test for each finding; empty if there is none."""
        if not self.found:
            return ""
        seen = Counter[str]()
        functions = []
        for finding in self.found:
            seen[finding.promise.name] += 1
            functions.append(finding.test_function(seen[finding.promise.name]))
        return self.found[0].script.file(functions)


@frozen(kw_only=True)
class Replay:
    """One workload of a seed, played alone and not shrunk: its source, its history, what happened in it, and the
    promise that it broke; ``None``: none.
    """

    number: int
    seed: int
    workload: str
    table: Table
    statistics: Mapping[str, int]
    broken: BrokenPromise | None

    def __str__(self) -> str:
        """Returns the report."""
        result = "no promise was broken" if self.broken is None else f"{self.broken.name}\n{self.broken.what}"
        told = [
            f"workload {self.number} of seed {self.seed}: {result}",
            *([str(self.table)] if self.table.rows else []),
        ]
        return "\n\n".join([*told, self.workload, counted("what happened", self.statistics)])

    def as_json(self) -> str:
        """Returns the replay as JSON."""
        broken = self.broken
        values = {
            "seed": self.seed,
            "number": self.number,
            "broken": broken and {"promise": broken.promise.name, "kind": broken.kind, "what": broken.what},
            "history": self.table.values(),
            "workload": self.workload,
            "statistics": dict(self.statistics),
        }
        return json.dumps(values, indent=2)
