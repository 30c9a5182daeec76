"""The encoder ledger: which encoder outputs are wanted, computed, readable, idle or on their way out, and their bytes.

Pure: no clock, no I/O. Every method takes facts and returns `Decisions`; the encoder-cache actor turns those into
messages. The life of an entry is `TRANSITIONS`; `transition_table` prints it for the docs.

Promises (each a property in ``tests/properties``): no free while held, no use before ready, no phantom, always freed
eventually, every acquire is answered, books balance, encode once.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

from attrs import define, field, frozen

from .errors import EncodeFailed, RequestTooLarge
from .plan import EncodeJob


class State(enum.Enum):
    """Where an entry is in its life. ABSENT entries are not in the books."""

    ABSENT = "absent"
    RESERVED = "reserved"  # bytes taken, nothing dispatched
    ENCODING = "encoding"  # the runner works on it
    READY = "ready"  # resident and held
    IDLE = "idle"  # resident, nobody holds it
    FREEING = "freeing"  # the runner was told to drop it


class Change(enum.Enum):
    """What can happen to an entry."""

    RESERVE = "acquire, with room"
    JOIN = "acquire by one more holder"
    LEAVE = "release, others hold it still"
    LAST_LEAVE = "release by the last holder"
    DISPATCH = "dispatched"
    ENCODED = "encoded, held"
    ENCODED_UNHELD = "encoded, without holders"
    ENCODE_RETRIED = "encode failed in a batch, held"
    ENCODE_FAILED = "encode failed"
    EVICT = "evict (pressure, idle time, close)"
    FREED = "freed"
    LOST_HELD = "runner generation lost, held"
    LOST_UNHELD = "runner generation lost, without holders"


TRANSITIONS: dict[tuple[State, Change], State] = {
    (State.ABSENT, Change.RESERVE): State.RESERVED,
    (State.RESERVED, Change.JOIN): State.RESERVED,
    (State.RESERVED, Change.LEAVE): State.RESERVED,
    (State.RESERVED, Change.LAST_LEAVE): State.ABSENT,
    (State.RESERVED, Change.DISPATCH): State.ENCODING,
    (State.ENCODING, Change.JOIN): State.ENCODING,
    (State.ENCODING, Change.LEAVE): State.ENCODING,
    (State.ENCODING, Change.LAST_LEAVE): State.ENCODING,
    (State.ENCODING, Change.ENCODED): State.READY,
    (State.ENCODING, Change.ENCODED_UNHELD): State.IDLE,
    (State.ENCODING, Change.ENCODE_RETRIED): State.RESERVED,
    (State.ENCODING, Change.ENCODE_FAILED): State.ABSENT,
    (State.READY, Change.JOIN): State.READY,
    (State.READY, Change.LEAVE): State.READY,
    (State.READY, Change.LAST_LEAVE): State.IDLE,
    (State.IDLE, Change.JOIN): State.READY,
    (State.IDLE, Change.EVICT): State.FREEING,
    (State.FREEING, Change.FREED): State.ABSENT,
    (State.RESERVED, Change.LOST_HELD): State.RESERVED,
    (State.ENCODING, Change.LOST_HELD): State.RESERVED,
    (State.READY, Change.LOST_HELD): State.RESERVED,
    (State.ENCODING, Change.LOST_UNHELD): State.ABSENT,
    (State.IDLE, Change.LOST_UNHELD): State.ABSENT,
    (State.FREEING, Change.LOST_UNHELD): State.ABSENT,
}


def transition_table() -> str:
    """`TRANSITIONS` as a Markdown table."""
    rows = [f"| {old.value} | {change.value} | {new.value} |" for (old, change), new in TRANSITIONS.items()]
    return "\n".join(["| from | event | to |", "|---|---|---|", *rows])


@frozen
class Hold:
    """``holder`` (a request id) and the ``key`` it asked for."""

    holder: str
    key: str


@frozen
class Refusal:
    """An acquire that ends without the entry: ``error`` says why."""

    holder: str
    key: str
    error: Exception


@frozen(kw_only=True)
class Decisions:
    """What the actor must tell others after one fact. ``ready`` holders may read; ``free`` keys go to the runner."""

    reserved: tuple[tuple[str, int], ...] = ()
    ready: tuple[Hold, ...] = ()
    refused: tuple[Refusal, ...] = ()
    dropped: tuple[str, ...] = ()
    free: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reserved or self.ready or self.refused or self.dropped or self.free)


@define
class _Draft:
    """`Decisions` while they are being made."""

    reserved: list[tuple[str, int]] = field(factory=list)
    ready: list[Hold] = field(factory=list)
    refused: list[Refusal] = field(factory=list)
    dropped: list[str] = field(factory=list)
    free: list[str] = field(factory=list)

    def done(self) -> Decisions:
        return Decisions(
            reserved=tuple(self.reserved),
            ready=tuple(self.ready),
            refused=tuple(self.refused),
            dropped=tuple(self.dropped),
            free=tuple(self.free),
        )


@define(eq=False)
class _Entry:
    key: str
    size: int
    embeddings: int
    payload: Any  # kept while somebody wants the entry, so that a lost generation can be encoded again
    state: State = State.ABSENT
    holders: dict[str, None] = field(factory=dict)  # an ordered set
    idle_since: float = 0.0

    def become(self, change: Change) -> None:
        new = TRANSITIONS.get((self.state, change))
        assert new is not None, f"entry {self.key} cannot go through {change.value!r} in state {self.state.value!r}"
        self.state = new


@define(eq=False)
class _Wait:
    holder: str
    key: str
    size: int
    embeddings: int
    payload: Any


def _encode_failure(error: Exception) -> EncodeFailed:
    """One for each holder: two tasks must not raise the same exception object."""
    failure = EncodeFailed(
        f"the encoder failed on this request's input, alone in its batch ({type(error).__name__}: {error}); other "
        f"requests go on; the input is the likely cause"
    )
    failure.__cause__ = error
    return failure


@frozen(kw_only=True)
class LedgerStatistics:
    """A snapshot of the ledger. Sizes in bytes; counters since the start."""

    capacity: int
    taken: int  # reserved, resident and freeing together
    entries: int
    held: int
    idle: int
    waiting: int
    acquires: int
    hits: int  # answered by an entry that was already wanted or resident
    encoded: int
    evicted: int


@define(eq=False)
class EncoderLedger:
    """The books of the encoder cache.

    ``capacity`` is in bytes. Acquires are served strictly first come, first served: one that finds others waiting waits
    behind them even on a hit, so that a popular entry cannot keep a waiting request out for ever.
    """

    capacity: int
    taken: int = 0
    _entries: dict[str, _Entry] = field(factory=dict)
    _reserved: OrderedDict[str, None] = field(factory=OrderedDict)  # in the order they will be dispatched
    _halves: deque[tuple[str, ...]] = field(factory=deque)  # of failed batches: reserved too, and dispatched first
    _idle: OrderedDict[str, None] = field(factory=OrderedDict)  # oldest first
    _waiting: OrderedDict[Hold, _Wait] = field(factory=OrderedDict)  # in the order they will be served
    _closed: bool = False
    _acquires: int = 0
    _hits: int = 0
    _encoded: int = 0
    _evicted: int = 0

    # -- facts -------------------------------------------------------------------------------------------------------

    def acquire(self, holder: str, key: str, *, size: int, embeddings: int, payload: Any) -> Decisions:
        """``holder`` wants to read ``key``. Answered by ``ready`` or ``refused``, now or in a later `Decisions`."""
        assert not self._closed, "acquire after close"
        assert not self.holds(holder, key), f"{holder} acquired {key} twice"
        self._acquires += 1
        draft = _Draft()
        if size > self.capacity:
            error = RequestTooLarge(
                f"an encoder output of {size} bytes cannot fit the encoder cache; allowed: up to "
                f"{self.capacity} bytes; raise EngineConfig(encoder_cache_bytes=...) to {size} or more"
            )
            draft.refused.append(Refusal(holder, key, error))
            return draft.done()
        self._waiting[Hold(holder, key)] = _Wait(holder, key, size, embeddings, payload)
        self._serve(draft)
        return draft.done()

    def release(self, holder: str, key: str, *, now: float) -> Decisions:
        """``holder`` no longer reads or wants ``key``: a wait is withdrawn, a hold given back."""
        draft = _Draft()
        if self._waiting.pop(Hold(holder, key), None) is None:
            self._leave(holder, key, now, draft)
        self._serve(draft)
        return draft.done()

    def take_encode_batch(self, budget: int) -> tuple[EncodeJob, ...]:
        """Dispatches reserved entries, first come first served, up to ``budget`` embeddings and at least one. The
        halves of a batch that failed come first, each in a batch of its own."""
        while self._halves:
            half = [key for key in self._halves.popleft() if key in self._reserved]
            if half:
                jobs = self._dispatch_within(half, budget)
                self._halves.appendleft(tuple(half[len(jobs) :]))
                return jobs
        return self._dispatch_within(list(self._reserved), budget)

    def _dispatch_within(self, keys: list[str], budget: int) -> tuple[EncodeJob, ...]:
        jobs: list[EncodeJob] = []
        left = budget
        for key in keys:
            if jobs and self._entries[key].embeddings > left:
                break
            jobs.append(self._dispatch(key))
            left -= jobs[-1].embeddings
        return tuple(jobs)

    def _dispatch(self, key: str) -> EncodeJob:
        entry = self._entries[key]
        del self._reserved[key]
        entry.become(Change.DISPATCH)
        return EncodeJob(key=key, payload=entry.payload, embeddings=entry.embeddings, size=entry.size)

    def encoded(self, keys: Iterable[str], *, now: float) -> Decisions:
        """The runner has stored the outputs of ``keys``."""
        draft = _Draft()
        for key in keys:
            entry = self._entries[key]
            self._encoded += 1
            if entry.holders:
                entry.become(Change.ENCODED)
                draft.ready.extend(Hold(holder, key) for holder in entry.holders)
            else:
                entry.become(Change.ENCODED_UNHELD)
                self._to_idle(entry, now)
        self._serve(draft)
        return draft.done()

    def encode_failed(self, keys: Iterable[str], error: Exception) -> Decisions:
        """The encode batch of ``keys`` failed and left nothing behind. What is still wanted of it is tried again in
        halves, so that one bad item fails alone; who holds that one hears of ``error``."""
        draft = _Draft()
        wanted, alone = [], len(keys := tuple(keys)) == 1
        for key in keys:
            entry = self._entries[key]
            if entry.holders and not alone:
                entry.become(Change.ENCODE_RETRIED)
                self._reserved[key] = None
                wanted.append(key)
                continue
            draft.refused.extend(Refusal(holder, key, _encode_failure(error)) for holder in entry.holders)
            entry.become(Change.ENCODE_FAILED)
            self._forget(entry)
            draft.dropped.append(key)
        middle = (len(wanted) + 1) // 2
        self._halves.extend(tuple(half) for half in (wanted[:middle], wanted[middle:]) if half)
        self._serve(draft)
        return draft.done()

    def freed(self, keys: Iterable[str]) -> Decisions:
        """The runner has dropped ``keys``: only now their bytes are given back."""
        draft = _Draft()
        for key in keys:
            entry = self._entries[key]
            entry.become(Change.FREED)
            self._forget(entry)
        self._serve(draft)
        return draft.done()

    def evict_idle(self, *, now: float, idle_seconds: float) -> Decisions:
        """Frees entries that have been idle for ``idle_seconds``."""
        draft = _Draft()
        for key in list(self._idle):
            if self._entries[key].idle_since + idle_seconds > now:
                break
            self._evict(key, draft)
        return draft.done()

    def generation_lost(self) -> Decisions:
        """The runner lost everything it held: wanted entries are to be encoded again, the rest is gone."""
        draft = _Draft()
        for entry in list(self._entries.values()):
            if entry.holders:
                if entry.state is not State.RESERVED:
                    self._reserved[entry.key] = None
                entry.become(Change.LOST_HELD)
                continue
            entry.become(Change.LOST_UNHELD)
            self._idle.pop(entry.key, None)
            self._forget(entry)
            draft.dropped.append(entry.key)
        self._serve(draft)
        return draft.done()

    def close(self, *, now: float) -> Decisions:
        """No more acquires: waits are withdrawn, holds taken back, idle entries freed. See `drained`."""
        self._closed = True
        self._waiting.clear()
        draft = _Draft()
        for entry in list(self._entries.values()):
            for holder in list(entry.holders):
                self._leave(holder, entry.key, now, draft)
        for key in list(self._idle):
            self._evict(key, draft)
        return draft.done()

    # -- questions ---------------------------------------------------------------------------------------------------

    def holds(self, holder: str, key: str) -> bool:
        """Whether ``holder`` holds ``key`` or waits for it."""
        entry = self._entries.get(key)
        if entry is not None and holder in entry.holders:
            return True
        return Hold(holder, key) in self._waiting

    def state(self, key: str) -> State:
        """The entry's state."""
        entry = self._entries.get(key)
        return State.ABSENT if entry is None else entry.state

    @property
    def drained(self) -> bool:
        """Nothing is reserved, resident, being computed or being freed."""
        return not self._entries

    @property
    def oldest_idle(self) -> float | None:
        """When the oldest idle entry became idle."""
        return next((self._entries[key].idle_since for key in self._idle), None)

    def entries(self) -> dict[str, tuple[State, tuple[str, ...], int]]:
        """Every entry: its state, holders and size in bytes."""
        return {key: (entry.state, tuple(entry.holders), entry.size) for key, entry in self._entries.items()}

    def waiting(self) -> tuple[Hold, ...]:
        """Who waits, in the order they will be served."""
        return tuple(self._waiting)

    def holds_and_waits(self) -> tuple[Hold, ...]:
        """Every ask that has not been released or refused."""
        holds = [Hold(holder, entry.key) for entry in self._entries.values() for holder in entry.holders]
        return (*holds, *self.waiting())

    def statistics(self) -> LedgerStatistics:
        """A snapshot."""
        return LedgerStatistics(
            capacity=self.capacity,
            taken=self.taken,
            entries=len(self._entries),
            held=sum(1 for entry in self._entries.values() if entry.holders),
            idle=len(self._idle),
            waiting=len(self._waiting),
            acquires=self._acquires,
            hits=self._hits,
            encoded=self._encoded,
            evicted=self._evicted,
        )

    # -- moves -------------------------------------------------------------------------------------------------------

    def _serve(self, draft: _Draft) -> None:
        """Answers waits from the front until one must go on waiting."""
        while self._waiting and self._try_serve(next(iter(self._waiting.values())), draft):
            self._waiting.popitem(last=False)

    def _try_serve(self, wait: _Wait, draft: _Draft) -> bool:
        entry = self._entries.get(wait.key)
        if entry is None:
            return self._try_reserve(wait, draft)
        if entry.state is State.FREEING:
            return False  # never resurrected: its output may be gone already
        self._hits += 1
        if entry.state is State.IDLE:
            del self._idle[entry.key]
        entry.become(Change.JOIN)
        entry.holders[wait.holder] = None
        entry.payload = wait.payload
        if entry.state is State.READY:
            draft.ready.append(Hold(wait.holder, wait.key))
        return True

    def _try_reserve(self, wait: _Wait, draft: _Draft) -> bool:
        if self.taken + wait.size > self.capacity:
            self._make_room(wait.size, draft)
            return False
        entry = _Entry(wait.key, wait.size, wait.embeddings, wait.payload)
        entry.become(Change.RESERVE)
        entry.holders[wait.holder] = None
        self._entries[wait.key] = entry
        self._reserved[wait.key] = None
        self.taken += wait.size
        draft.reserved.append((wait.key, wait.size))
        return True

    def _make_room(self, size: int, draft: _Draft) -> None:
        """Evicts idle entries, oldest first, until ``size`` bytes will be free once the runner has dropped them."""
        freeing = sum(entry.size for entry in self._entries.values() if entry.state is State.FREEING)
        for key in list(self._idle):
            if self.taken - freeing + size <= self.capacity:
                return
            freeing += self._entries[key].size
            self._evict(key, draft)

    def _leave(self, holder: str, key: str, now: float, draft: _Draft) -> None:
        entry = self._entries.get(key)
        assert entry is not None, f"{holder} released {key}, which is absent"
        assert holder in entry.holders, f"{holder} released {key}, which it does not hold"
        del entry.holders[holder]
        if entry.holders:
            entry.become(Change.LEAVE)
            return
        entry.become(Change.LAST_LEAVE)
        entry.payload = None
        if entry.state is State.ABSENT:
            del self._reserved[key]
            self._forget(entry)
            draft.dropped.append(key)
        elif entry.state is State.IDLE:
            self._to_idle(entry, now)

    def _to_idle(self, entry: _Entry, now: float) -> None:
        entry.idle_since = now
        self._idle[entry.key] = None

    def _evict(self, key: str, draft: _Draft) -> None:
        del self._idle[key]
        self._entries[key].become(Change.EVICT)
        self._evicted += 1
        draft.free.append(key)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        self.taken -= entry.size
