"""A small scheduler that is sound, and ways to get it wrong: chunked prefill, preemption by recomputation, prefix
caching, two steps in flight, an encoder cache. Each mutant is a subclass with one line changed."""

from __future__ import annotations

from collections import deque

from attrs import define, field

from triolet_kit.paged_device import EOS
from triolet_kit.schedulers import Chunk, Item, Limits, NewRequest, Step


@define(eq=False)
class Sequence:
    """A request's progress. ``fed`` counts positions that steps have been planned for."""

    request: NewRequest
    place: tuple[int, int]
    tokens: list[int]
    pages: list[int] = field(factory=list)
    fed: int = 0
    answered: int = 0
    listed: int = 0
    sampling: int = 0  # tokens that steps in flight sample
    in_flight: int = 0
    life: int = 0
    ended: bool = False
    leaving: list[int] = field(factory=list)  # pages that come back when no step in flight mentions it
    reads: dict[int, str] = field(factory=dict)  # the items that it holds: the number among its items, and the key

    @property
    def limit(self) -> int:
        return len(self.request.tokens) + self.request.max_tokens

    @property
    def wanted(self) -> int:
        return min(len(self.tokens) + self.sampling, self.limit - 1) - self.fed


@define(eq=False)
class SmallScheduler:
    limits: Limits
    waiting: list[Sequence] = field(factory=list)
    running: list[Sequence] = field(factory=list)
    sequences: dict[str, Sequence] = field(factory=dict)
    flights: deque[list[tuple[Sequence, int, Chunk]]] = field(factory=deque)
    free: list[int] = field(factory=list)
    users: dict[int, int] = field(factory=dict)
    keys: dict[int, object] = field(factory=dict)  # of the pages that can be found
    found: dict[object, int] = field(factory=dict)
    unused: dict[int, None] = field(factory=dict)  # pages without users that can be found, the oldest first
    holders: dict[str, int] = field(factory=dict)  # of each encoder output
    sizes: dict[str, int] = field(factory=dict)
    arrivals: int = 0
    chunks: list[tuple[Sequence, int, Chunk]] = field(
        factory=list
    )  # of the step that is being planned, as the next four
    frees: list[str] = field(factory=list)
    encodes: list[str] = field(factory=list)
    left: int = 0  # tokens
    preempted: bool = False

    def __attrs_post_init__(self) -> None:
        self.free = list(range(self.limits.pages - 1, -1, -1))

    # -- the four methods --------------------------------------------------------------------------------------------

    def add_request(self, request: NewRequest) -> bool:
        if not self.fits(request):
            return False
        self.arrivals += 1
        sequence = Sequence(request, self.place(request), list(request.tokens))
        self.sequences[request.id] = sequence
        self.waiting.append(sequence)
        return True

    def schedule(self) -> Step | None:
        self.chunks = []
        self.frees = []
        self.encodes = []
        self.left = self.limits.max_step_tokens
        self.preempted = False
        for sequence in sorted(self.running, key=self.order):
            self.go_on(sequence)
        if not self.preempted:
            self.admit()
        if not (self.chunks or self.frees or self.encodes):
            return None
        self.flights.append(self.chunks)
        return Step(chunks=[chunk for _, _, chunk in self.chunks], encodes=self.encodes, frees=self.frees)

    def update(self, step: Step, tokens: dict[str, int]) -> list[str]:
        ended = []
        for sequence, life, chunk in self.flights.popleft():
            sequence.in_flight -= 1
            sequence.sampling -= chunk.samples
            if life == sequence.life:
                sequence.answered = chunk.start + chunk.length
            if chunk.samples and not sequence.ended:
                sequence.tokens.append(tokens[chunk.request])
            if not sequence.ended and (sequence.tokens[-1] == EOS or len(sequence.tokens) >= sequence.limit):
                ended.append(chunk.request)
            if life == sequence.life:
                self.list_pages(sequence)
                self.release_read(sequence)
            if chunk.request in ended:
                self.end(sequence)
            self.settle(sequence)
        return ended

    def finish(self, request_id: str) -> None:
        sequence = self.sequences.get(request_id)
        if sequence is not None and not sequence.ended:
            self.end(sequence)

    # -- planning ----------------------------------------------------------------------------------------------------

    def fits(self, request: NewRequest) -> bool:
        positions = len(request.tokens) + request.max_tokens - 1
        pages = -(-positions // self.limits.page_size)
        return pages <= self.limits.pages and all(item.size <= self.limits.room for item in request.items)

    def place(self, request: NewRequest) -> tuple[int, int]:
        return request.priority, self.arrivals

    def order(self, sequence: Sequence) -> tuple[int, int]:
        return sequence.place

    def go_on(self, sequence: Sequence) -> None:
        if sequence not in self.running or self.left < 1:
            return
        length = self.readable(sequence, min(sequence.wanted, self.left))
        if length < 1:
            return
        missing = self.missing(sequence, sequence.fed + length)
        while missing > self.available():
            victim = max(self.running, key=self.order)
            if self.is_planned(victim) or sequence.in_flight or victim.in_flight:
                self.left = 0  # nobody behind runs, so that the victim gives way once its step is done
                return
            self.preempt(victim)
            if victim is sequence:
                return
        self.run(sequence, length, missing)

    def missing(self, sequence: Sequence, positions: int) -> int:
        return max(0, -(-positions // self.limits.page_size) - len(sequence.pages))

    def is_planned(self, victim: Sequence) -> bool:
        return any(sequence is victim for sequence, _, _ in self.chunks)

    def run(self, sequence: Sequence, length: int, pages: int) -> None:
        sequence.pages += [self.take_page() for _ in range(pages)]
        start = sequence.fed
        samples = start + length == len(sequence.tokens) + sequence.sampling
        chunk = Chunk(sequence.request.id, start, length, tuple(sequence.pages), samples)
        sequence.fed += length
        sequence.sampling += samples
        sequence.in_flight += 1
        self.left -= length
        self.chunks.append((sequence, sequence.life, chunk))

    def admit(self) -> None:
        for sequence in sorted(self.waiting, key=self.order):
            if len(self.running) >= self.limits.max_running or self.left < 1 or sequence.in_flight:
                return
            pages = self.cached_pages(sequence)
            unused = sum(page in self.unused for page in pages)
            if self.missing(sequence, len(sequence.tokens)) - len(pages) > self.available() - unused:
                return
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.join(sequence, pages)
            self.go_on(sequence)

    def preempt(self, victim: Sequence) -> None:
        self.preempted = True
        self.running.remove(victim)
        self.waiting.append(victim)
        self.leave(victim)

    # -- pages -------------------------------------------------------------------------------------------------------

    def available(self) -> int:
        return len(self.free) + len(self.unused)

    def take_page(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page = next(iter(self.unused))
            del self.unused[page]
            del self.found[self.keys.pop(page)]
        self.users[page] = 1
        return page

    def give_back(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.users[page] -= 1
            if not self.users[page]:
                (self.keep if page in self.keys else self.free.append)(page)

    def keep(self, page: int) -> None:
        self.unused[page] = None

    def page_key(self, sequence: Sequence, page: int) -> object:
        stop = (page + 1) * self.limits.page_size
        items = [item for item in sequence.request.items if item.start < stop]
        return tuple(sequence.tokens[:stop]), tuple((item.key, item.start) for item in items)

    def cached_pages(self, sequence: Sequence) -> list[int]:
        pages = []
        for index in range(self.most_cached(sequence)):
            page = self.found.get(self.page_key(sequence, index))
            if page is None:
                break
            pages.append(page)
        return pages

    def most_cached(self, sequence: Sequence) -> int:
        return (len(sequence.tokens) - 1) // self.limits.page_size

    def join(self, sequence: Sequence, pages: list[int]) -> None:
        for page in pages:
            self.users[page] = self.users.get(page, 0) + 1
            self.unused.pop(page, None)
        sequence.pages = list(pages)
        sequence.fed = sequence.answered = len(pages) * self.limits.page_size
        sequence.listed = len(pages)

    def list_pages(self, sequence: Sequence) -> None:
        full = min(self.filled(sequence), len(sequence.tokens)) // self.limits.page_size
        for index in range(sequence.listed, full):
            key, page = self.page_key(sequence, index), sequence.pages[index]
            if key not in self.found:
                self.found[key], self.keys[page] = page, key
        sequence.listed = max(full, sequence.listed)

    def filled(self, sequence: Sequence) -> int:
        return sequence.answered

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, sequence: Sequence) -> None:
        sequence.ended = True
        for queue in (self.waiting, self.running):
            if sequence in queue:
                queue.remove(sequence)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The sequence runs no more. What it has comes back when no step in flight mentions it."""
        sequence.life += 1
        sequence.leaving += sequence.pages
        sequence.pages, sequence.fed, sequence.answered, sequence.listed = [], 0, 0, 0
        self.settle(sequence)

    def settle(self, sequence: Sequence) -> None:
        if sequence.in_flight or (sequence.life == 0 and not sequence.leaving):
            return
        pages, sequence.leaving = sequence.leaving, []
        self.give_back(pages)
        if sequence.ended or sequence in self.waiting:
            self.release_all(sequence)

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def readable(self, sequence: Sequence, length: int) -> int:
        """As many of the next positions as there are outputs for."""
        stop = sequence.fed + length
        for number, item in enumerate(sequence.request.items):
            if item.start >= stop or self.is_read(item, sequence.fed) or number in sequence.reads:
                continue
            if not self.hold(item.key, item.size):
                stop = max(sequence.fed, item.start)
                break
            sequence.reads[number] = item.key
        return stop - sequence.fed

    def is_read(self, item: Item, position: int) -> bool:
        return item.start + item.length <= position

    def hold(self, key: str, size: int) -> bool:
        if key not in self.holders:
            if not self.make_room(size):
                return False
            self.holders[key], self.sizes[key] = 0, size
            self.encodes.append(key)
        self.holders[key] += 1
        return True

    def make_room(self, size: int) -> bool:
        idle = [key for key, count in self.holders.items() if not count and key not in self.encodes]
        while sum(self.sizes.values()) + size > self.limits.room:
            if not idle:
                return False
            self.evict(idle.pop(0))
        return True

    def evict(self, key: str) -> None:
        del self.holders[key], self.sizes[key]
        self.frees.append(key)

    def release_read(self, sequence: Sequence) -> None:
        for number in list(sequence.reads):
            if self.is_read(sequence.request.items[number], sequence.answered):
                self.holders[sequence.reads.pop(number)] -= 1

    def release_all(self, sequence: Sequence) -> None:
        for key in sequence.reads.values():
            self.holders[key] -= 1
        sequence.reads.clear()
