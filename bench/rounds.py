"""Contenders that take turns, and what their times say: medians, and ratios within each round."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import IO, Any, Self

from attrs import define, field, frozen

from ..core.errors import TrioletError

_PROGRAMS = Path(__file__).with_name("contenders")
_TOLD = 1_000  # characters of what a failed contender said

Answer = Mapping[str, Any]


class BenchError(TrioletError):
    """A contender could not be started, or failed."""


@frozen(kw_only=True)
class Entry:
    """Who takes part: a program of `contenders` and its arguments."""

    name: str
    program: str
    arguments: tuple[str, ...]
    python: str = sys.executable
    numbers: str = "float32"  # what it computes in


@define(eq=False)
class Contender:
    """A running entry. ``opened`` is the seconds that it says its model took to open, ``started`` those from its start
    as a process."""

    entry: Entry
    opened: float
    started: float
    about: Mapping[str, str]
    _process: subprocess.Popen[str]
    _said: IO[str]

    @classmethod
    def start(cls, entry: Entry) -> Self:
        """Runs the program, and waits until its model is open.

        Raises:
            BenchError: it cannot run, or ended.
        """
        begun = time.perf_counter()
        said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - as long as the process
        try:
            process = subprocess.Popen(
                [entry.python, str(_PROGRAMS / f"{entry.program}.py"), *entry.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
        except OSError as error:
            said.close()
            raise BenchError(f"{entry.name} cannot be run by {entry.python}: {error}") from error
        contender = cls(entry, 0.0, 0.0, {}, process, said)
        try:
            told = contender._read()
        except BaseException:
            contender.close()
            raise
        contender.opened, contender.about = told["opened"], told["about"]
        contender.started = time.perf_counter() - begun
        return contender

    def run(self, task: Mapping[str, Any]) -> Answer:
        """The answer to a task. Raises `BenchError` where the program has ended."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # it has ended; what it said is told below
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was asked for"
        line = self._process.stdout.readline()
        if line:
            told: dict[str, Any] = json.loads(line)
            return told
        status = self._process.wait()
        self._said.seek(0)
        raise BenchError(
            f"{self.entry.name} ended with status {status}; a missing package is installed into {self.entry.python}, "
            f"or another interpreter is named by --peer-python. It said:\n{self._said.read()[-_TOLD:].strip()}"
        )

    def close(self) -> None:
        """Ends the process: it has nothing more to read."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None, "it was asked for"
            with suppress(BrokenPipeError):
                stream.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()


@define(eq=False)
class Contest:
    """Contenders that are open together; a context that closes all of them."""

    contenders: list[Contender] = field(factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for contender in self.contenders:
            contender.close()

    def open(self, entries: Sequence[Entry]) -> None:
        """Starts them, one after the other."""
        for entry in entries:
            self.contenders.append(Contender.start(entry))


@frozen(kw_only=True)
class Outcome:
    """What one contender did in all rounds of a scenario: ``seconds`` of each, how far a thread beside it counted in a
    second, and the answers of the last."""

    seconds: tuple[float, ...]
    counted: tuple[float, ...] = ()
    answers: Sequence[Answer] = field(repr=False)

    @property
    def median(self) -> float:
        """Of the seconds."""
        return median(self.seconds)


def take_turns(
    contenders: Sequence[Contender],
    task: Callable[[int], Mapping[str, Any]],
    *,
    rounds: int,
) -> dict[str, Outcome]:
    """Each contender answers a task in every round, after one that is not counted. Who begins changes from round to
    round.

    Args:
        task: of a round; the one that is not counted has the number -1.
    """
    seconds: dict[str, list[float]] = {one.entry.name: [] for one in contenders}
    counted: dict[str, list[float]] = {one.entry.name: [] for one in contenders}
    answers: dict[str, Sequence[Answer]] = {}
    for number in range(-1, rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            told = contender.run(task(number))
            answers[contender.entry.name] = told["answers"]
            if number >= 0:
                seconds[contender.entry.name].append(told["seconds"])
                counted[contender.entry.name] += [told["counted"]] if "counted" in told else []
    return {
        name: Outcome(seconds=tuple(each), counted=tuple(counted[name]), answers=answers[name])
        for name, each in seconds.items()
    }


@frozen(kw_only=True)
class Ratio:
    """Times of a peer over ours, round by round: the median, and the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, peer: Outcome, ours: Outcome) -> Self:
        """Paired: both of a round had the machine as it was then."""
        found = [theirs / mine for theirs, mine in zip(peer.seconds, ours.seconds, strict=True)]
        return cls(median=median(found), lowest=min(found), highest=max(found))
