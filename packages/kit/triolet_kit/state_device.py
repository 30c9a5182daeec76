"""The recurrent states of a device, without tensors: what each state has read, and who wrote it.

A state is what recurrent layers have made of all tokens so far. A chunk changes the state of its request in place. A
request that begins behind cached pages goes on from a copy of another state, which must have read exactly these
positions. A step reads all states before it writes any, but nobody may count on that between two requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from .findings import Promise, Severity

STATE_IN_USE = Promise(
    "no state is given away in use",
    Severity.CORRUPTS,
    "A request goes on from what another one has read: all that it says from there on belongs to two texts.",
)
STATE_HITS = Promise(
    "a hit has a state of its prefix",
    Severity.CORRUPTS,
    "The pages of the prefix are right, and the recurrent layers have read another text, less of it, or nothing.",
)


def written(chunk: Any) -> tuple[int, ...]:
    """Returns the states that a chunk writes."""
    return (chunk.state, *(state for _, state in chunk.keeps))


class StateDevice:
    """The states of a device. ``records`` are its requests, and ``fail`` raises a broken promise."""

    def __init__(self, records: Mapping[str, Any], fail: Callable[[Promise, str, str], NoReturn]) -> None:
        self.records, self.fail = records, fail
        self.states: dict[int, tuple[str, int, int]] = {}  # the writer, how many positions were read, the fingerprint
        self.had: dict[str, tuple[int, int]] = {}  # of each request: its state, and the end of its last chunk

    def run(self, chunks: Sequence[Any]) -> None:
        """Reads and writes the states of a step."""
        self.judge(chunks)
        for chunk in chunks:
            if chunk.start:
                self.read(chunk)
        for chunk in chunks:
            stop = chunk.start + chunk.length
            for position, state in ((stop, chunk.state), *chunk.keeps):
                self.states[state] = chunk.request, position, self.fingerprint(chunk.request, position)
            self.had[chunk.request] = chunk.state, stop

    def fingerprint(self, request: str, position: int) -> int:
        """Returns the fingerprint of the positions before ``position``."""
        return int(self.records[request].upto(position)[-1])

    def judge(self, chunks: Sequence[Any]) -> None:
        """Judges whether a step writes a state twice, or one that another request of the step reads."""
        writers: dict[int, str] = {}
        for name, state in _writes(chunks):
            if state in writers:
                what = f"{writers[state]} and {name} write state {state} in one step"
                self.fail(STATE_IN_USE, what, "both write in one step")
            writers[state] = name
        for chunk in chunks:
            if chunk.source in writers and chunk.source != chunk.state:
                what = f"{chunk.request} goes on from state {chunk.source}, which {writers[chunk.source]} writes"
                self.fail(STATE_IN_USE, f"{what} in the same step", "written where it is read")

    def read(self, chunk: Any) -> None:
        """Reads the state that a chunk goes on from."""
        name, start, source = chunk.request, chunk.start, chunk.state if chunk.source is None else chunk.source
        held = self.states.get(source)
        if held is not None and held[1:] == (start, self.fingerprint(name, start)):
            return
        told = "nobody has written" if held is None else f"{held[0]} has written after its position {held[1] - 1}"
        what = f"{name} goes on after position {start - 1} from state {source}, which {told}"
        if self.had.get(name) == (source, start):
            self.fail(STATE_IN_USE, f"{what}; before, it was as {name} needs it", "")
        kind = "never written" if held is None else "another position" if held[1] != start else "another prefix"
        self.fail(STATE_HITS, what, kind)


def _writes(chunks: Sequence[Any]) -> Iterator[tuple[str, int]]:
    for chunk in chunks:
        yield from ((chunk.request, state) for state in written(chunk))
