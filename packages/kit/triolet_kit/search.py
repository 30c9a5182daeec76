"""The search for findings, for every protocol.

A search draws one workload after the other from a seed and plays each. If ``play`` raises `BrokenPromise`, that is a
finding: the workload is shrunk, and the search for other broken promises goes on with the next workload. The same seed
gives the same findings; no file is read or written, and the clock is not read.

The kit shrinks workloads itself, since it does without Hypothesis.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from attrs import frozen

from .findings import (
    RAISES_NOTHING,
    SPEAKS,
    BrokenPromise,
    Finding,
    Findings,
    Promise,
    Replay,
    Script,
    Table,
    short,
)

W = TypeVar("W")
T = TypeVar("T")

WORKLOADS = 1000
"""The number of workloads that are played by default."""

SHRINKS = 1500
"""The most workloads that are played to shrink one finding."""

SELDOM = 20
"""An event is thin if it happens less often than once in so many workloads."""

_KIT = Path(__file__).parent
_EXAMPLE = "step_engine.py"  # lies in the kit, and is a subject


class Played:
    """The record of one played workload: the rows of its history, the counts of its events, and the workload ``written
    out``, in which the actions of its end are operations, too.
    """

    def __init__(self, columns: tuple[str, ...], counted: Iterable[str]) -> None:
        self.columns, self.rows = columns, list[tuple[str, ...]]()
        self.statistics = dict.fromkeys(counted, 0)
        self.operations: list[Any] = []
        self.written_out: Any = None

    @property
    def table(self) -> Table:
        """The history."""
        return Table(self.columns, self.rows)


@frozen(kw_only=True)
class Search(Generic[W]):
    """The parts of a protocol that a search needs.

    Args:
        draw: makes a workload from random numbers, and from nothing else.
        play: plays a workload on a new subject, records it, and may raise `BrokenPromise`. Any other error is a fault
            of the kit and ends the search (`raised` turns errors of the subject into findings).
        simpler: returns workloads that are simpler than the given one, the boldest first; see `without_some`.
        script: the form of the regression tests.
        promises: the promises that may be ignored.
        columns: the columns of a history.
        counted: the names of the statistics.
        expected: those of them that the declaration does not rule out.
    """

    draw: Callable[[random.Random], W]
    play: Callable[[W, Played], object]
    simpler: Callable[[W], Iterable[W]]
    script: Script
    promises: tuple[Promise, ...]
    columns: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    expected: tuple[str, ...] = ()

    def examine(
        self,
        *,
        seed: int = 0,
        workloads: int = WORKLOADS,
        ignore: Collection[str] = (),
        must_happen: Collection[str] = (),
    ) -> Findings:
        """Plays ``workloads`` workloads. For each way in which a promise is broken, the first workload that does so is
        shrunk. What is to be ignored is only counted, and what ``must_happen`` is missed if it never does.

        Raises:
            ValueError: ``ignore`` names no promise.
        """
        self._check_ignored(ignore)
        found: dict[str, Finding] = {}
        statistics, ignored = dict.fromkeys(self.counted, 0), Counter[str]()
        with _collector_at_rest():
            for number in range(1, workloads + 1):
                workload, played = self._drawn(seed, number), self._blank()
                broken = self._broken(workload, played)
                for name, count in played.statistics.items():
                    statistics[name] = statistics.get(name, 0) + count
                if broken is None or broken.name in found:
                    continue
                if broken.name in ignore or broken.promise.name in ignore:
                    ignored[broken.name] += 1
                    continue
                found[broken.name] = self._finding(workload, number, broken, played.written_out)
        worst_first = sorted(found.values(), key=lambda finding: finding.promise.severity)
        return Findings(
            tuple(worst_first),
            workloads,
            seed,
            statistics,
            dict(ignored),
            missed=tuple(name for name in must_happen if not statistics.get(name)),
            thin=tuple(name for name in self.expected if statistics[name] * SELDOM < workloads),
        )

    def replay(self, number: int, *, seed: int = 0) -> Replay:
        """Plays workload ``number`` of ``seed`` alone, as it was drawn."""
        workload, played = self._drawn(seed, number), self._blank()
        broken = self._broken(workload, played)
        return Replay(
            number=number,
            seed=seed,
            workload=short(workload),
            table=broken.table if broken else played.table,
            statistics=played.statistics,
            broken=broken,
        )

    def _check_ignored(self, ignore: Collection[str]) -> None:
        names = [promise.name for promise in self.promises]
        unknown = [one for one in ignore if one.partition(": ")[0] not in names]
        if unknown:
            allowed = f"one of {', '.join(names)}, with its kind (PROMISE: KIND) or without"
            raise ValueError(f"ignore: there is no promise {unknown[0]!r}; allowed: {allowed}")

    def _drawn(self, seed: int, number: int) -> W:
        """Draws workload ``number``, which depends on ``seed`` and ``number`` alone."""
        return self.draw(random.Random(f"{seed} {number}"))

    def _blank(self) -> Played:
        return Played(self.columns, self.counted)

    def _broken(self, workload: W, played: Played) -> BrokenPromise | None:
        try:
            self.play(workload, played)
        except BrokenPromise as broken:
            return broken
        return None

    def _breaks(self, workload: W, name: str) -> BrokenPromise | None:
        """Returns the error if ``workload`` breaks the promise of that ``name``; ``None``: it does not."""
        broken = self._broken(workload, self._blank())
        return broken if broken is not None and broken.name == name else None

    def _finding(self, workload: W, number: int, broken: BrokenPromise, written_out: W | None) -> Finding:
        for start in (written_out, workload):
            again = None if start is None else self._breaks(start, broken.name)
            if start is not None and again is not None:
                workload, broken = self._shrunk(start, again)
                break
        return Finding(
            promise=broken.promise,
            kind=broken.kind,
            what=broken.what,
            table=broken.table,
            workload=short(workload),
            number=number,
            repeats=again is not None,
            script=self.script,
            shrunk=workload,
        )

    def _shrunk(self, workload: W, broken: BrokenPromise) -> tuple[W, BrokenPromise]:
        """Returns the simplest workload found that breaks the same promise in the same way, with the error."""
        left, candidates = SHRINKS, iter(self.simpler(workload))
        while left and (candidate := next(candidates, None)) is not None:
            left -= 1
            again = self._breaks(candidate, broken.name)
            if again is not None:
                workload, broken, candidates = candidate, again, iter(self.simpler(candidate))
        return workload, broken


def without_some(parts: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Yields ``parts`` without some of them: first without all, then without each half, and so on to each single one.
    This function helps to write ``simpler``.
    """
    size = len(parts)
    while size:
        yield from ((*parts[:at], *parts[at + size :]) for at in range(0, len(parts), size))
        size //= 2


def raised(error: Exception, table: Table) -> BrokenPromise:
    """Makes a broken promise of an error that came while the subject was played. If the kit itself raised it, a value
    of the adapter has a form that the kit cannot read, or a method takes other arguments.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(frame.filename)
    ours = path.parent == _KIT and path.name != _EXAMPLE
    told = str(error) or frame.line  # a bare assert says nothing else
    what = f"{type(error).__name__}: {told} ({'/'.join(path.parts[-2:])}:{frame.lineno}, in {frame.name})"
    last = ["", what, *[""] * len(table.columns)][: len(table.columns)]
    return BrokenPromise(
        SPEAKS if ours else RAISES_NOTHING,
        what,
        Table(table.columns, [*table.rows, tuple(last)]),
        f"{type(error).__name__} in {frame.name}",
    )


def import_of(make: Callable[..., Any], subject: str | None) -> tuple[str, str]:
    """Returns the line by which a regression test imports the subject's factory, and the factory's name. ``subject`` is
    ``module:name``; by default the place where ``make`` was defined. If it cannot be imported, the line asks the reader
    for a name.
    """
    chosen = subject or f"{make.__module__}:{getattr(make, '__qualname__', '')}"
    module, _, name = chosen.partition(":")
    if module != "__main__" and all(part.isidentifier() for part in (*module.split("."), name)):
        return f"from {module} import {name}", name
    return f"from my_engine import make  # what was checked, {chosen}, cannot be imported: name yours", "make"


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Hides the present objects from the garbage collector. So an engine that collects in each workload does not scan
    the process's modules each time. A process that has frozen objects of its own is left alone.
    """
    if _has_frozen():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _has_frozen() -> bool:
    """Whether the process has frozen objects. `gc.get_freeze_count` looks at each of them, which takes longer than a
    search does; so the names of this module are looked for first, among the objects that are not frozen."""
    ours = globals()
    return all(one is not ours for one in gc.get_objects()) or gc.get_freeze_count() > 0
