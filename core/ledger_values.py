"""What the encoder ledger keeps, and what comes out of it: entries, waits, holds, decisions, statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define, field, fields, frozen

from .errors import EncodeFailed, RequestTooLarge
from .ledger_table import Held, State
from .ordered import Place


@frozen
class Hold:
    """``holder`` (a name that is new for every acquire) and the ``key`` that it acquires."""

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
    """What the actor must tell others after one fact. ``ready`` holders may read. The runner must drop ``free`` keys.
    ``retried`` keys of a failed encode batch or borrow are reserved again. ``shrunk`` is the new budget of encode
    batches, where a batch did not fit the device's memory. The terms of ``lapsed`` loans are over."""

    reserved: tuple[tuple[str, int], ...] = field(default=(), converter=tuple)
    ready: tuple[Hold, ...] = field(default=(), converter=tuple)
    refused: tuple[Refusal, ...] = field(default=(), converter=tuple)
    dropped: tuple[str, ...] = field(default=(), converter=tuple)
    free: tuple[str, ...] = field(default=(), converter=tuple)
    retried: tuple[str, ...] = field(default=(), converter=tuple)
    lapsed: tuple[Hold, ...] = field(default=(), converter=tuple)
    shrunk: int | None = None


@define
class Draft:
    """`Decisions` while they are being made."""

    reserved: list[tuple[str, int]] = field(factory=list)
    ready: list[Hold] = field(factory=list)
    refused: list[Refusal] = field(factory=list)
    dropped: list[str] = field(factory=list)
    free: list[str] = field(factory=list)
    retried: list[str] = field(factory=list)
    lapsed: list[Hold] = field(factory=list)
    shrunk: int | None = None

    def decisions(self) -> Decisions:
        """As they are."""
        return Decisions(**{name: getattr(self, name) for name in _DRAFTED})


_DRAFTED = tuple(one.name for one in fields(Draft))


@define(eq=False)
class Entry:
    """One encoder output in the books."""

    key: str
    size: int
    embeddings: int
    place: Place  # in the queue of reserved entries: the best place of its holders so far
    payload: Any = None  # kept while the entry is held, so that it can be encoded again after a lost generation
    state: State = State.ABSENT
    holders: dict[str, bool] = field(factory=dict)  # in their order; whether it is a loan
    holders_here: int = 0  # those that are no loans
    failed_alone: bool = False  # once; a second time its holders are refused
    borrows_failed: int = 0  # since it was resident

    @property
    def held(self) -> Held:
        """Who holds it."""
        if self.holders_here:
            return Held.HERE
        return Held.LENT if self.holders else Held.NOT


@frozen(eq=False)
class Wait:
    """An acquire that waits."""

    hold: Hold
    place: Place
    size: int
    embeddings: int
    payload: Any
    loan: bool


def encode_failure(error: Exception) -> EncodeFailed:
    """A new error for each holder: two tasks must not raise the same exception object."""
    failure = EncodeFailed(
        f"the encoder failed on this request's input twice, alone in its batch ({type(error).__name__}: {error}); "
        f"other requests go on; the input is the likely cause"
    )
    failure.__cause__ = error
    return failure


def borrow_failure(error: Exception) -> EncodeFailed:
    """A new error for each holder of what could not be borrowed."""
    failure = EncodeFailed(
        f"no lender gave this request's encoder output, and it cannot be encoded here; the last refusal was "
        f"{type(error).__name__}: {error}; start encoders, then ask again"
    )
    failure.__cause__ = error
    return failure


def too_large(size: int, capacity: int) -> RequestTooLarge:
    """The error for an acquire of an output that the encoder cache can never hold."""
    return RequestTooLarge(
        f"an encoder output of {size} bytes cannot fit the encoder cache; allowed: up to {capacity} bytes; raise "
        f"EngineConfig(encoder_cache_bytes=...) to {size} or more"
    )


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
    hits: int  # acquires served by an entry that was already reserved, being encoded or resident
    encoded: int
    borrowed: int  # outputs that came from lenders
    loans: int  # that became ready for borrowers
    evicted: int
    bytes_by_state: Mapping[str, int]  # of `taken`: reserved, encoding, borrowing, ready (held), lent, idle, freeing
