"""The values that the encoder ledger keeps and returns: entries, waits, holds, decisions, statistics."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from .errors import EncodeFailed, RequestTooLarge, caused
from .ledger_table import State
from .ordered import Place
from .request import EncoderItem


@frozen
class Hold:
    """An acquire: the ``holder``, whose name is new for every acquire, and the ``key`` that it acquires."""

    holder: str
    key: str


@frozen
class Refusal:
    """An acquire that ends without the entry. ``error`` is the reason."""

    holder: str
    key: str
    error: Exception


@define
class Decisions:
    """The decisions that the actor carries out after one fact. ``ready`` holders may read. The runner must drop
    ``free`` keys. ``retried`` keys of a failed encode batch are reserved again. ``shrunk`` is the new budget of encode
    batches, if a batch did not fit the device's memory."""

    reserved: list[tuple[str, int]] = field(factory=list)
    ready: list[Hold] = field(factory=list)
    refused: list[Refusal] = field(factory=list)
    dropped: list[str] = field(factory=list)
    free: list[str] = field(factory=list)
    retried: list[str] = field(factory=list)
    shrunk: int | None = None


@define(eq=False)
class Entry:
    """One encoder output in the books."""

    item: EncoderItem  # has its payload while the entry is held, since it may be encoded again
    place: Place  # in the queue of reserved entries: the best place of its holders so far
    state: State = State.ABSENT
    holders: dict[str, None] = field(factory=dict)  # in order of arrival
    failed_alone: bool = False  # once; after a second time the holders are refused


@frozen(eq=False)
class Wait:
    """An acquire that waits."""

    hold: Hold
    place: Place
    item: EncoderItem


def encode_failure(error: Exception) -> EncodeFailed:
    """Returns the error for a holder of an item that failed in the encoder. Each holder gets a new error, since two
    tasks must not raise the same exception object.
    """
    failure = EncodeFailed(
        f"the encoder failed on this request's input twice, alone in its batch ({type(error).__name__}: {error}); "
        f"other requests go on; the input is the likely cause"
    )
    return caused(failure, error)


def too_large(size: int, capacity: int) -> RequestTooLarge:
    """Returns the error for an acquire of an output that the encoder cache can never hold."""
    return RequestTooLarge(
        f"an encoder output of {size} bytes does not fit into the encoder cache; allowed: up to {capacity} bytes. "
        f"Give EngineConfig(encoder_cache_bytes={size}) or more"
    )


@define(kw_only=True)
class LedgerCounters:
    """The ledger's counters since the start of the engine."""

    acquires: int = 0
    hits: int = 0  # acquires served by an entry that was already reserved, being encoded or resident
    encoded: int = 0
    evicted: int = 0


@frozen(kw_only=True)
class LedgerStatistics(LedgerCounters):
    """A snapshot of the ledger's figures. Sizes are in bytes."""

    capacity: int
    taken: int  # reserved, resident and freeing together
    entries: int
    held: int
    idle: int
    waiting: int
    bytes_by_state: Mapping[str, int]  # `taken` in parts: reserved, encoding, ready (held), idle, freeing
