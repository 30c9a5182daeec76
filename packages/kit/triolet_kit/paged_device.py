"""A device of pages, without tensors. It knows what each position of each page holds, and which encoder outputs exist.

Every position of a page holds a fingerprint of all that real KV would depend on: the tokens and items up to this
position. So a read of a wrong, stale or foreign page is noticed. The device runs a step in this order: frees,
encodings, all writes of the step, all reads. It runs steps in the order in which they were planned.
"""

from __future__ import annotations

from typing import Any, NoReturn

from .findings import ENCODE_ONCE, NO_FREE_WHILE_HELD, NO_PHANTOM, BrokenPromise, Promise, Severity
from .state_device import StateDevice

EOS = 0
"""The token that ends a request."""

GIVEN_AWAY = Promise(
    "no page is given away in use",
    Severity.CORRUPTS,
    "A request goes on with the keys and values of another one: it answers with the other's text, which may be another "
    "user's.",
)
SHARED_WRITTEN = Promise(
    "no shared page is written",
    Severity.CORRUPTS,
    "All who share the page read what one of them has written over it: their answers change, and so do those of "
    "everybody who finds the page later.",
)
PREFIX_HITS = Promise(
    "prefix hits are what was computed",
    Severity.CORRUPTS,
    "A request skips the computation of its prompt and goes on after another prompt, or after nothing.",
)
BEFORE_READY = Promise(
    "no use before ready",
    Severity.CORRUPTS,
    "The decoder reads an output that does not exist: garbage, or an illegal access that ends the process.",
)
BALANCE = Promise(
    "books balance",
    Severity.CRASHES,
    "More is planned than there is: the step runs out of memory, or writes beyond its buffers.",
)


def sampled(fingerprint: int) -> int:
    """Returns the token that is sampled after a position with this fingerprint."""
    drawn = fingerprint // 7 % 16
    return EOS if drawn == 0 else 1 + drawn % 3


def first_wrong(held: list[int | None] | None, true: list[int]) -> int:
    """Returns the first offset of a page at which the page does not hold what it should."""
    return next(offset for offset, one in enumerate(true) if held is None or held[offset] != one)


class Record:
    """The device's knowledge of one request."""

    def __init__(self, request: Any) -> None:
        self.tokens = list(request.tokens)
        self.seen = {item.start + row: (item.key, row) for item in request.items for row in range(item.length)}
        self.sizes = {item.key: item.size for item in request.items}
        self.fingerprints: list[int] = []  # of the positions, as many as were needed so far
        self.began = -1  # the first step that ran the request
        self.verified = 0  # how many positions were right when the request ran last
        self.table: tuple[int, ...] = ()  # the pages of the request then

    def upto(self, stop: int) -> list[int]:
        """Returns the fingerprints of the positions before ``stop``."""
        known = self.fingerprints
        for position in range(len(known), stop):
            key, row = self.seen.get(position, ("", 0))
            here = self.tokens[position] * 131 + sum(key.encode()) * 1009 + row * 31 + 1
            known.append(((known[-1] if known else 0) * 48271 + here) % 2147483647)
        return known[:stop]


class PagedDevice:
    """A device that runs steps, and notices what they read and write. ``room`` is its room for encoder outputs."""

    def __init__(self, page_size: int, room: int, missed_free: str = "fault") -> None:
        self.page_size = page_size
        self.room = room
        self.missed_free = missed_free
        self.steps = 0
        self.pages: dict[int, list[int | None]] = {}
        self.outputs: dict[str, int] = {}
        self.freed: dict[str, int] = {}  # the step that freed the key last
        self.records: dict[str, Record] = {}
        self.writes: list[tuple[str, int, int, tuple[int, ...]]] = []  # request, first position, stop, pages
        self.states = StateDevice(self.records, self.fail)

    def fail(self, promise: Promise, what: str, kind: str = "") -> NoReturn:
        """Raises `BrokenPromise`."""
        raise BrokenPromise(promise, what, kind=kind)

    def add(self, request: Any) -> None:
        """Adds a request. Steps may run the request from now on."""
        self.records[request.id] = Record(request)

    def run(self, step: Any) -> dict[str, int]:
        """Runs a step. Returns the sampled tokens."""
        self.steps += 1
        for key in step.frees:
            self.free(key)
        for key in step.encodes:
            sizes = [record.sizes[key] for record in self.records.values() if key in record.sizes]
            if not sizes:
                self.fail(BALANCE, f"a step encodes {key}, which no request has", "unknown output")
            self.encode(key, sizes[0])
        for chunk in step.chunks:
            self.write(chunk)
        tokens = {}
        for chunk in step.chunks:
            self.read_items(chunk)
            self.read_pages(chunk)
            if chunk.samples:
                tokens[chunk.request] = self.sample(chunk)
        self.states.run([chunk for chunk in step.chunks if chunk.state is not None])
        return tokens

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def free(self, key: str) -> None:
        """Drops an output."""
        if key not in self.outputs and self.missed_free == "fault":
            self.fail(BALANCE, f"a step frees {key}, which is not on the device", "a free misses")
        self.outputs.pop(key, None)
        self.freed[key] = self.steps

    def encode(self, key: str, size: int) -> None:
        """Computes an output."""
        if key in self.outputs:
            self.fail(ENCODE_ONCE, f"a step encodes {key}, which is on the device already")
        self.outputs[key] = size
        taken = sum(self.outputs.values())
        if taken > self.room:
            there = ", ".join(sorted(self.outputs))
            self.fail(BALANCE, f"{there} take {taken} of {self.room} units of the room for encoder outputs", "room")

    def read_items(self, chunk: Any) -> None:
        """Reads the items of a chunk, which are the items at its positions."""
        record = self.records[chunk.request]
        if record.began < 0:
            record.began = self.steps
        for position in range(chunk.start, chunk.start + chunk.length):
            key, _ = record.seen.get(position, ("", 0))
            if not key or key in self.outputs:
                continue
            what = f"{chunk.request} reads {key} at position {position}"
            written = [name == chunk.request and at <= position < stop for name, at, stop, _ in self.writes]
            kind = "after a preemption" if sum(written) > 1 else ""
            if key not in self.freed:
                self.fail(BEFORE_READY, f"{what}, and it was never encoded", kind)
            if self.freed[key] >= record.began:
                self.fail(
                    NO_FREE_WHILE_HELD, f"{what}, and it was freed while its request ran and had yet to read it", kind
                )
            self.fail(NO_PHANTOM, f"{what}, and it was freed before {chunk.request} began, and not encoded since", kind)

    # -- pages -------------------------------------------------------------------------------------------------------

    def write(self, chunk: Any) -> None:
        """Writes the positions of a chunk."""
        record, size, stop = self.records[chunk.request], self.page_size, chunk.start + chunk.length
        if chunk.start != record.verified:
            record.verified, record.began = 0, -1  # the request starts anew, after pages that it considers computed
        true = record.upto(stop)
        for position in range(chunk.start, stop):
            page = chunk.pages[position // size]
            if page not in self.pages:
                self.pages[page] = [None] * size
            self.pages[page][position % size] = true[position]
        self.writes.append((chunk.request, chunk.start, stop, tuple(chunk.pages)))

    def read_pages(self, chunk: Any) -> None:
        """Reads every position up to the last one of a chunk."""
        record, size, stop = self.records[chunk.request], self.page_size, chunk.start + chunk.length
        true = record.upto(stop)
        for begin in range(0, stop, size):
            part = true[begin : min(begin + size, stop)]
            held = self.pages.get(chunk.pages[begin // size])
            if held is None or held[: len(part)] != part:
                self.accuse(chunk, begin + first_wrong(held, part))
        record.verified, record.table = stop, tuple(chunk.pages)

    def sample(self, chunk: Any) -> int:
        """Samples the token after a chunk. If the token was sampled before and is computed anew, it is the same."""
        record, stop = self.records[chunk.request], chunk.start + chunk.length
        if stop == len(record.tokens):
            record.tokens.append(sampled(record.fingerprints[stop - 1]))
        return int(record.tokens[stop])

    def accuse(self, chunk: Any, position: int) -> NoReturn:
        """Raises the promise that is broken if a page does not hold what ``chunk`` needs at ``position``."""
        reader, record = chunk.request, self.records[chunk.request]
        index, offset = divmod(position, self.page_size)
        page = chunk.pages[index]
        author = self.author(page, offset)
        if author is None:
            self.fail(
                PREFIX_HITS,
                f"{reader} counts position {position}, in page {page}, as computed, but nobody computed it",
                "not computed",
            )
        writer, at, shares = author
        wrote = f"{writer} has written its position {at} into page {page}"
        if position >= chunk.start:
            what = f"{wrote}, and {reader} has written its position {position} there in the same step"
            self.fail(GIVEN_AWAY, what, "both write in one step")
        if position < record.verified and record.table[index] == page:
            if shares:
                self.fail(SHARED_WRITTEN, f"{wrote}, which it shares with {reader}, who has position {position} there")
            self.fail(GIVEN_AWAY, f"{wrote}, and {reader} still has its position {position} there")
        kind = "another position" if at != position else self.difference(reader, writer, at)
        self.fail(PREFIX_HITS, f"{reader} takes page {page} for its computed position {position}; {wrote}", kind)

    def difference(self, reader: str, writer: str, position: int) -> str:
        """Returns the kind of the difference between two requests up to ``position``."""
        one, other = self.records[reader], self.records.get(writer)  # None: its user forgets requests that have ended
        same = other is not None and one.tokens[: position + 1] == other.tokens[: position + 1]
        return "other items" if same else "another prefix"

    def author(self, page: int, offset: int) -> tuple[str, int, bool] | None:
        """Finds the last write to an offset of a page. Returns the request that wrote, the position that it wrote, and
        whether the page began with another request's positions; ``None``: nobody has written there.
        """
        for number in range(len(self.writes) - 1, -1, -1):
            request, start, stop, pages = self.writes[number]
            for position in range(stop - 1, start - 1, -1):
                if position % self.page_size == offset and pages[position // self.page_size] == page:
                    first = position - offset
                    return request, position, first < start and self.began_by_another(number, page, request)
        return None

    def began_by_another(self, before: int, page: int, request: str) -> bool:
        """Returns whether the last write of the first position of ``page`` was by another request than ``request``."""
        for other, start, stop, pages in reversed(self.writes[:before]):
            for position in range(start, stop):
                if position % self.page_size == 0 and pages[position // self.page_size] == page:
                    return other != request
        return False
