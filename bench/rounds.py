"""The contenders, which take turns, and their times: medians, and ratios within each round."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import IO, Any, Self

from attrs import define, field, frozen

from ..core.errors import TrioletError

_PROGRAMS = Path(__file__).with_name("contenders")
_TOLD = 1_000  # the last characters that an error quotes of what a failed contender printed

Answer = Mapping[str, Any]


class BenchError(TrioletError):
    """A contender could not be started, or failed."""


@frozen(kw_only=True)
class Entry:
    """An engine that takes part: a program of `contenders` and its arguments."""

    name: str
    program: str
    arguments: tuple[str, ...]
    python: str = sys.executable
    numbers: str = "float32"  # the type of the numbers that it computes in


@define(eq=False)
class Contender:
    """A running entry.

    Attributes:
        started: seconds from the start of its process until its model was open.
        about: the versions of its packages.
    """

    entry: Entry
    _process: subprocess.Popen[str]
    _said: IO[str]
    started: float = 0.0
    about: Mapping[str, str] = field(factory=dict)

    @classmethod
    def start(cls, entry: Entry) -> Self:
        """Runs the program, and waits until its model is open.

        Raises:
            BenchError: the program cannot be run, or ended before its model was open.
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
        contender = cls(entry, process, said)
        try:
            contender.about = contender._read()["about"]
        except BaseException:
            contender.close()
            raise
        contender.started = time.perf_counter() - begun
        return contender

    def run(self, task: Mapping[str, Any]) -> Answer:
        """Returns the answer to a task. Raises `BenchError` if the program has ended."""
        assert self._process.stdin is not None, "it was asked for"
        with suppress(BrokenPipeError):  # the program has ended; the error that `_read` raises quotes what it printed
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
            f"{self.entry.name} ended with status {status}; install a missing package into {self.entry.python}, or "
            f"give another interpreter with --peer-python. The output was:\n{self._said.read()[-_TOLD:].strip()}"
        )

    def close(self) -> None:
        """Ends the process by closing its input."""
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


@contextmanager
def opened(entries: Sequence[Entry]) -> Iterator[list[Contender]]:
    """Starts the entries, one after the other. Closes all of them at the end of the block."""
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for entry in entries:
            contenders.append(Contender.start(entry))
            stack.callback(contenders[-1].close)
        yield contenders


@frozen(kw_only=True)
class Outcome:
    """The results of one contender in a scenario: its seconds in all rounds, the counts a second of a thread in its
    process, and its answers in the last round."""

    seconds: tuple[float, ...]
    counted: tuple[float, ...] = ()
    answers: Sequence[Answer] = field(repr=False)

    @property
    def median(self) -> float:
        """The median of the seconds."""
        return median(self.seconds)


def take_turns(
    contenders: Sequence[Contender], task: Callable[[int], Mapping[str, Any]], *, rounds: int
) -> dict[str, Outcome]:
    """Lets each contender answer one task in every round, after a first round that is not counted. A different
    contender begins each round.

    Args:
        task: makes the task of a round from its number; the round that is not counted has the number -1.
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
    """The times of a peer over ours, round by round: the median, the lowest and the highest."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, peer: Outcome, ours: Outcome) -> Self:
        """Compares the two within each round, since the machine was equally fast for both then."""
        found = [theirs / mine for theirs, mine in zip(peer.seconds, ours.seconds, strict=True)]
        return cls(median=median(found), lowest=min(found), highest=max(found))
