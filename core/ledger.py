"""The encoder ledger: the books of encoder outputs. They say which outputs are reserved, being encoded, held, idle or
being freed, and how many bytes these take.

Pure: no clock, no I/O. Methods take facts and return `Decisions`, which the encoder-cache actor turns into messages.
`TRANSITIONS` describes the life of an entry. `EncoderLedger._change` looks up the next state in it, and updates the
books of the state that the entry leaves and of the state that it enters. `transition_table` prints the table for the
docs.

The cost of a fact does not grow with the number of entries, and hardly with the number of waits (see `Ordered`). The
exceptions are a lost generation, the close, and the search for the oldest idle entry, which passes over those that
acquires wait for.

The promises are these: no free while held, no use before ready, no phantom, always freed eventually, every acquire is
answered, books balance, encode once. Each is a property in ``tests/properties``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from attrs import asdict, define, evolve, field

from .batch_size import BatchSize
from .ledger_table import RESIDENT, TRANSITIONS, Change, State
from .ledger_values import (
    Decisions,
    Entry,
    Hold,
    LedgerCounters,
    LedgerStatistics,
    Refusal,
    Wait,
    encode_failure,
    too_large,
)
from .ordered import Ordered
from .request import EncoderItem

_ANEW = frozenset({State.ABSENT, State.FREEING})  # the states in which an acquire needs bytes of its own


@define(eq=False)
class EncoderLedger:
    """The books of the encoder cache.

    ``capacity`` is in bytes, ``batch_size`` in embeddings.

    Acquires are served strictly by (order, arrival), and entries are encoded in that order too. Even if its entry is
    resident, an acquire waits until the earlier acquires are served. Otherwise a popular entry could keep a waiting
    request out for ever. No acquire starves, unless acquires of a smaller order never stop coming.
    """

    capacity: int
    batch_size: BatchSize = field(factory=lambda: BatchSize(1 << 62))
    _entries: dict[str, Entry] = field(factory=dict)
    _bytes: dict[State, int] = field(init=False)  # ``capacity`` by state; ABSENT: the bytes that no entry takes
    _reserved: Ordered[str] = field(factory=Ordered)  # entries to encode, in the order of their dispatch
    _halves: deque[tuple[str, ...]] = field(factory=deque)  # halves of failed batches: reserved too, dispatched first
    _idle: OrderedDict[str, float] = field(factory=OrderedDict)  # key -> idle since; oldest first
    _waits: dict[Hold, Wait] = field(factory=dict)
    _waiting: Ordered[Hold] = field(factory=Ordered)  # in the order in which they will be served
    _awaited: Counter[str] = field(factory=Counter)  # how many acquires wait for each key
    _lacking: int = 0  # the bytes that the awaited keys need anew
    _now: float = 0.0  # the time of the last fact that had one
    _draft: Decisions = field(factory=Decisions)
    _closed: bool = False
    _counters: LedgerCounters = field(factory=LedgerCounters)

    @_bytes.default
    def _all_free(self) -> dict[State, int]:
        return dict.fromkeys(State, 0) | {State.ABSENT: self.capacity}

    # -- facts -------------------------------------------------------------------------------------------------------

    def acquire(self, holder: str, item: EncoderItem, *, order: int = 0) -> Decisions:
        """Acquires the output of ``item`` for ``holder``. ``ready`` or ``refused`` answers, in these or in later
        `Decisions`. The smallest ``order`` is served first."""
        assert not self._closed, "acquire after close"
        assert not self.holds(holder, item.key), f"{holder} acquired {item.key} twice"
        self._counters.acquires += 1
        if item.size > self.capacity:
            self._draft.refused.append(Refusal(holder, item.key, too_large(item.size, self.capacity)))
        else:
            self._wait(Wait(Hold(holder, item.key), (order, self._counters.acquires), item))
        return self._decide()

    def release(self, holder: str, key: str, *, now: float) -> Decisions:
        """Releases ``key`` for ``holder``, or withdraws its acquire."""
        self._now = now
        self._give_back(Hold(holder, key))
        return self._decide()

    def take_encode_batch(self, most: int = 1 << 62) -> tuple[EncoderItem, ...]:
        """Dispatches reserved entries in the order of their places: at least one, and up to ``most`` embeddings within
        the budget of `batch_size`. Halves of failed batches come first, each in a batch of its own."""
        budget = min(most, self.batch_size.budget)
        while self._halves:
            half = [key for key in self._halves.popleft() if key in self._reserved]
            if half:
                jobs = self._dispatch_within(half, budget)
                self._halves.appendleft(tuple(half[len(jobs) :]))
                return jobs
        return self._dispatch_within(iter(self._reserved.first, None), budget)

    def encoded(self, keys: Iterable[str], *, now: float) -> Decisions:
        """Notes that the runner has stored the outputs of ``keys``, which were one batch."""
        self._now = now
        self.batch_size.done()
        for key in keys:
            self._counters.encoded += 1
            self._change(self._entries[key], Change.ENCODED)
        return self._decide()

    def encode_failed(self, keys: Iterable[str], error: Exception) -> Decisions:
        """Notes that the encode batch of ``keys`` failed and kept no output. Entries that are still held are tried
        again, in halves, so that one bad item fails alone. If the batch was too large for the device's memory, they are
        tried in smaller batches instead. If an item fails alone for the second time, its holders are refused, with
        ``error`` as the cause.
        """
        entries = [self._entries[key] for key in keys]
        too_large = len(entries) > 1 and isinstance(error, MemoryError)
        if too_large:
            self.batch_size.too_large(sum(entry.item.embeddings for entry in entries))
            self._draft.shrunk = self.batch_size.budget
        elif len(entries) == 1 and entries[0].failed_alone:
            self._refuse(entries[0], error)
        elif len(entries) == 1:
            entries[0].failed_alone = True  # perhaps a fault of the device; a second failure is blamed on the item
        for entry in entries:
            self._change(entry, Change.ENCODE_FAILED)
        retried = [entry.item.key for entry in entries if entry.state is State.RESERVED]
        self._draft.retried += retried
        if not too_large:
            middle = (len(retried) + 1) // 2
            self._halves.extend(tuple(half) for half in (retried[:middle], retried[middle:]) if half)
        return self._decide()

    def freed(self, keys: Iterable[str]) -> Decisions:
        """Notes that the runner has dropped ``keys``. Their bytes are free from now on."""
        for key in keys:
            self._change(self._entries[key], Change.FREED)
        return self._decide()

    def evict_idle(self, *, now: float, idle_seconds: float) -> Decisions:
        """Frees the entries that have been idle for ``idle_seconds`` and that no acquire waits for."""
        self._now = now
        while (key := self._oldest_idle()) is not None and self._idle[key] + idle_seconds <= now:
            self._evict(key)
        return self._decide()

    def generation_lost(self) -> Decisions:
        """Notes that the runner lost all encoder outputs. Held entries are to be encoded again, and the others are
        gone."""
        for entry in list(self._entries.values()):
            self._change(entry, Change.LOST)
        return self._decide()

    def close(self, *, now: float) -> Decisions:
        """Ends the acquires: withdraws waits, takes holds back, and frees entries that are idle now or become idle
        later. See `drained`."""
        self._closed, self._now = True, now
        for hold in self.holds_and_waits():
            self._give_back(hold)
        return self._decide()

    # -- questions ---------------------------------------------------------------------------------------------------

    def holds(self, holder: str, key: str) -> bool:
        """True if ``holder`` holds ``key`` or waits for it."""
        entry = self._entries.get(key)
        return Hold(holder, key) in self._waits or (entry is not None and holder in entry.holders)

    def state(self, key: str) -> State:
        """Returns the state of the entry of ``key``."""
        entry = self._entries.get(key)
        return State.ABSENT if entry is None else entry.state

    @property
    def drained(self) -> bool:
        """True if no entry is reserved, being encoded, resident or being freed."""
        return not self._entries

    @property
    def oldest_idle(self) -> float | None:
        """The time since which the oldest idle entry that no acquire waits for is idle; ``None``: there is no such
        entry.
        """
        key = self._oldest_idle()
        return None if key is None else self._idle[key]

    @property
    def taken(self) -> int:
        """The number of bytes of all entries."""
        return self.capacity - self._bytes[State.ABSENT]

    def entries(self) -> dict[str, tuple[State, tuple[str, ...], int]]:
        """Returns the state, the holders and the size in bytes of every entry, by key."""
        return {key: (entry.state, tuple(entry.holders), entry.item.size) for key, entry in self._entries.items()}

    def keys_to_come(self) -> frozenset[str]:
        """Returns the keys of all outputs that are reserved or being encoded, and of those that acquires wait for
        without a reservation.
        """
        coming = {key for key, entry in self._entries.items() if entry.state not in RESIDENT}
        return frozenset(coming | {key for key in self._awaited if self.state(key) in _ANEW})

    def waiting(self) -> tuple[Hold, ...]:
        """Returns the waiting acquires, in the order of service."""
        return tuple(self._waiting)

    def holds_and_waits(self) -> tuple[Hold, ...]:
        """Returns every acquire that has not been released or refused."""
        holds = [Hold(holder, entry.item.key) for entry in self._entries.values() for holder in entry.holders]
        return (*holds, *self.waiting())

    def statistics(self) -> LedgerStatistics:
        """Returns a snapshot of the ledger's figures."""
        return LedgerStatistics(
            capacity=self.capacity,
            taken=self.taken,
            entries=len(self._entries),
            held=sum(bool(entry.holders) for entry in self._entries.values()),
            idle=len(self._idle),
            waiting=len(self._waits),
            bytes_by_state={state.value: size for state, size in self._bytes.items() if state is not State.ABSENT},
            **asdict(self._counters),
        )

    # -- serving waits -----------------------------------------------------------------------------------------------

    def _decide(self) -> Decisions:
        """Concludes a fact: serves the acquires that can be served, makes room for the others, and returns the
        decisions."""
        self._serve()
        self._make_room()
        decisions, self._draft = self._draft, Decisions()
        return decisions

    def _serve(self) -> None:
        """Serves waits from the first one on, until one must go on waiting."""
        while (hold := self._waiting.first()) is not None:
            wait, entry = self._waits[hold], self._entries.get(hold.key)
            if entry is None and self._bytes[State.ABSENT] < wait.item.size:
                return
            if entry is not None and entry.state is State.FREEING:
                return  # an entry that is being freed is never used again: its output may be gone already
            self._counters.hits += entry is not None
            self._wait_no_more(hold)
            self._join(entry or Entry(wait.item, wait.place), wait)

    def _make_room(self) -> None:
        """Evicts idle entries, oldest first, until all waits will have room once the runner has dropped these entries.
        An idle entry that acquires wait for is evicted only to make room for the first wait. After the close, all idle
        entries that no acquire waits for are evicted."""
        while (self._closed or self._room_to_come < self._lacking) and (key := self._oldest_idle()) is not None:
            self._evict(key)
        first = self._waiting.first()
        while self._idle and first is not None and self._room_to_come < self._waits[first].item.size:
            self._evict(next(iter(self._idle)))

    @property
    def _room_to_come(self) -> int:
        """The number of bytes that are free, or will be free when the runner has dropped the entries that are being
        freed.
        """
        return self._bytes[State.ABSENT] + self._bytes[State.FREEING]

    def _oldest_idle(self) -> str | None:
        """Returns the key of the oldest idle entry that no acquire waits for."""
        return next((key for key in self._idle if key not in self._awaited), None)

    def _evict(self, key: str) -> None:
        self._counters.evicted += 1
        self._change(self._entries[key], Change.EVICT)

    def _wait(self, wait: Wait) -> None:
        key = wait.hold.key
        self._waits[wait.hold] = wait
        self._waiting.put(wait.hold, wait.place)
        self._awaited[key] += 1
        if self._awaited[key] == 1 and self.state(key) in _ANEW:
            self._lacking += wait.item.size

    def _wait_no_more(self, hold: Hold) -> None:
        wait = self._waits.pop(hold)
        self._waiting.discard(hold)
        self._awaited[hold.key] -= 1
        if self._awaited[hold.key]:
            return
        del self._awaited[hold.key]
        if self.state(hold.key) in _ANEW:
            self._lacking -= wait.item.size

    # -- encode batches ----------------------------------------------------------------------------------------------

    def _dispatch_within(self, keys: Iterable[str], budget: int) -> tuple[EncoderItem, ...]:
        jobs: list[EncoderItem] = []
        left = budget
        for key in keys:
            if jobs and self._entries[key].item.embeddings > left:
                break
            self._change(self._entries[key], Change.DISPATCH)
            jobs.append(self._entries[key].item)
            left -= jobs[-1].embeddings
        return tuple(jobs)

    def _refuse(self, entry: Entry, error: Exception) -> None:
        for holder in list(entry.holders):
            self._part(entry, holder)
            self._draft.refused.append(Refusal(holder, entry.item.key, encode_failure(error)))

    # -- holders -----------------------------------------------------------------------------------------------------

    def _join(self, entry: Entry, wait: Wait) -> None:
        entry.place = min(entry.place, wait.place) if entry.holders else wait.place
        entry.holders[wait.hold.holder] = None
        entry.item = wait.item
        if entry.state in {State.READY, State.IDLE}:
            self._draft.ready.append(wait.hold)
        self._change(entry, Change.ACQUIRE)
        if entry.state is State.RESERVED:
            self._reserved.put(entry.item.key, entry.place)

    def _give_back(self, hold: Hold) -> None:
        if hold in self._waits:
            self._wait_no_more(hold)
            return
        assert self.holds(hold.holder, hold.key), f"{hold.holder} released {hold.key}, which it does not hold"
        entry = self._entries[hold.key]
        self._part(entry, hold.holder)
        self._change(entry, Change.RELEASE)

    def _part(self, entry: Entry, holder: str) -> None:
        del entry.holders[holder]
        if not entry.holders:
            entry.item = evolve(entry.item, payload=None)

    # -- the life of an entry ----------------------------------------------------------------------------------------

    def _change(self, entry: Entry, change: Change) -> None:
        """Looks up the entry's next state. If the state changes, updates the books of both states."""
        old, held = entry.state, bool(entry.holders)
        new = TRANSITIONS.get((old, change, held))
        assert new is not None, f"{entry.item.key} cannot go through {change.value!r}, {old.value!r} and held {held}"
        if new is old:
            return
        entry.state = new
        self._bytes[old] -= entry.item.size
        self._bytes[new] += entry.item.size
        if entry.item.key in self._awaited:
            self._lacking += entry.item.size * ((new in _ANEW) - (old in _ANEW))
        if old is State.RESERVED:
            self._reserved.discard(entry.item.key)
        elif old is State.IDLE:
            del self._idle[entry.item.key]
        self._enter(entry, old, change)

    def _enter(self, entry: Entry, old: State, change: Change) -> None:
        key = entry.item.key
        if change is Change.ENCODED:
            entry.failed_alone = False
            self._draft.ready += [Hold(holder, key) for holder in entry.holders]
        match entry.state:
            case State.RESERVED:
                self._reserved.put(key, entry.place)
                if old is State.ABSENT:
                    self._entries[key] = entry
                    self._draft.reserved.append((key, entry.item.size))
            case State.IDLE:
                self._idle[key] = self._now
            case State.FREEING:
                self._draft.free.append(key)
            case State.ABSENT:
                del self._entries[key]
                if change is not Change.FREED:
                    self._draft.dropped.append(key)
