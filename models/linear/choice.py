"""Chooses kernels by measurement: each shape of a model is timed with its own weights, for few rows and for many.

What was found is kept in a file of the user's cache, by CPU, torch and number of threads, so that a machine measures a
shape once. The file may be removed at any time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from statistics import median
from typing import Any

import torch
from attrs import define, frozen

from ..machine.cache import CacheFile
from ..machine.host import INSTRUCTIONS, Read, cpu_flags, cpu_name, read_file
from .layers import Int8Linear, Kernels, Shape, Timed

ROWS = (1, 2, 4, 8, 16, 32, 512)
"""The numbers of rows that are timed: a choice holds from each on."""

SECONDS = 1.0
"""How long one model is measured at most, but for the shape that has begun: it would never be known otherwise."""

_SMALL = 1 << 16  # weights of a layer that is not worth a measurement
_BETTER = 0.9  # of the first kernel's time: what is no faster than this is chance
_TURNS = 5
_ENOUGH = 0.1  # seconds of the kernels' calls after which there are no more turns
_LONG = 0.05  # seconds of a call that is not tried at all
_HOPELESS = 8.0  # times the best: a kernel that is not tried with more rows

Clock = Callable[[], float]
Choice = tuple[tuple[int, str], ...]


@define(eq=False)
class ChoiceFile:
    """The file that remembers choices."""

    cache: CacheFile
    machine: str

    @classmethod
    def of_user(
        cls, environment: Mapping[str, str] = os.environ, read: Read = read_file, threads: int | None = None
    ) -> ChoiceFile:
        """In the user's cache, for this machine with this torch and the number of its threads, or another one."""
        return cls(CacheFile.of_user("kernels.json", environment), machine_name(read, threads))

    def known(self) -> Callable[[Timed], Choice | None]:
        """What finds the choice for a layer on this machine; ``None`` where there is none, or one that nobody could
        follow."""
        return partial(_known, self._mine())

    def lines(self) -> list[str]:
        """The choices for this machine, for people: ``float32 51865x512: stock, from 4 rows blocked``."""
        found = []
        for shape, steps in sorted(self._mine().items()):
            try:
                names = [name if rows == 1 else f"from {int(rows)} rows {name}" for rows, name in steps]
            except (TypeError, ValueError):
                continue
            found.append(f"{shape}: {', '.join(map(str, names))}")
        return found

    def add(self, choices: Mapping[str, Choice]) -> None:
        """Remembers ``choices`` too."""
        self.cache.write({**self.cache.read(), self.machine: {**self._mine(), **choices}})

    def _mine(self) -> dict[str, Any]:
        mine = self.cache.read().get(self.machine)
        return mine if isinstance(mine, dict) else {}


def machine_name(read: Read = read_file, threads: int | None = None) -> str:
    """This machine with this torch and the number of its threads, or another one. A CPU's name alone is not the
    machine: virtual ones hide instructions."""
    able = " ".join(sorted(cpu_flags(read) & INSTRUCTIONS))
    count = threads or torch.get_num_threads()
    return f"{cpu_name(read)} ({able}), torch {torch.__version__}, {count} threads"


def _known(mine: Mapping[str, Any], linear: Timed) -> Choice | None:
    try:
        choice = tuple((int(rows), str(kernel)) for rows, kernel in mine.get(str(linear.shape)) or ())
    except (TypeError, ValueError):
        return None
    return choice if choice and all(kernel in linear.candidates for _, kernel in choice) else None


@frozen(kw_only=True)
class _Deadline:
    clock: Clock
    end: float

    def is_over(self) -> bool:
        return self.clock() >= self.end


def choose(
    linears: Iterable[Timed],
    kernels: Kernels,
    *,
    file: ChoiceFile | None,
    clock: Clock = time.perf_counter,
    seconds: float = SECONDS,
) -> None:
    """Fills ``kernels`` with the fastest for each shape of ``linears``: as remembered in ``file``, or as timed now.
    Shapes for which no time is left stay open, and are timed when a model with them is opened again."""
    deadline = _Deadline(clock=clock, end=clock() + seconds)
    find = None if file is None else file.known()
    fresh: dict[str, Choice] = {}
    for shape, alike in _by_shape(linears).items():
        if shape.outputs * shape.inputs < _SMALL or shape in kernels.chosen:
            continue
        if known := None if find is None else find(alike[0]):
            kernels.chosen[shape] = known
        elif choice := _measure(alike, deadline):
            kernels.chosen[shape] = fresh[str(shape)] = choice
    if fresh and file is not None:
        file.add(fresh)


def _by_shape(linears: Iterable[Timed]) -> dict[Shape, list[Timed]]:
    """Those that hold most weights first: should the time not suffice, they are worth it most."""
    found: dict[Shape, list[Timed]] = {}
    for linear in linears:
        found.setdefault(linear.shape, []).append(linear)
    return dict(sorted(found.items(), key=lambda entry: -entry[0].outputs * entry[0].inputs * len(entry[1])))


def _measure(alike: Sequence[Timed], deadline: _Deadline) -> Choice:
    """The fastest kernel for each number of rows. Empty: no time is left."""
    if deadline.is_over():
        return ()
    names = list(alike[0].candidates)
    stock, before, least = names[0], 0, 0.0
    steps: list[tuple[int, str]] = []
    for rows in ROWS:
        if before and least * rows / before > _LONG:
            steps.append((rows, alike[0].for_many))
            break
        timed = _time(alike, names, rows, deadline.clock)
        best = min(timed, key=timed.__getitem__)
        before, least = rows, timed[best]
        chosen = best if stock not in timed or least < _BETTER * timed[stock] else stock
        steps.append((rows, chosen))
        names = [name for name in timed if timed[name] < _HOPELESS * least]
    return tuple(step for index, step in enumerate(steps) if not index or steps[index - 1][1] != step[1])


def _time(alike: Sequence[Timed], names: Sequence[str], rows: int, clock: Clock) -> dict[str, float]:
    """Seconds of a call of each kernel, the median of some. The kernels take turns, so that a change of the machine's
    speed hits all of them; and the layers do: in a model each call finds other weights, which are not in the caches."""
    first = alike[0]
    dtype = first.scales.dtype if isinstance(first, Int8Linear) else first.weight.dtype
    inputs = torch.randn(rows, first.shape.inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    layers, seconds = cycle(alike), {name: list[float]() for name in names}
    for name, linear in zip(names, layers, strict=False):  # each warms up; the first one can compute everything
        try:
            linear.compute(name, inputs)
        except (RuntimeError, AttributeError):
            if name == names[0]:
                raise
            del seconds[name]  # oneDNN has no program for this dtype here, or this torch has no oneDNN
    for _ in range(_TURNS):
        for name, linear in zip(list(seconds), layers, strict=False):
            begin = clock()
            linear.compute(name, inputs)
            seconds[name].append(clock() - begin)
        if sum(map(sum, seconds.values())) > _ENOUGH:
            break
    return {name: median(found) for name, found in seconds.items()}
