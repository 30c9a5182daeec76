"""The states of an entry of the encoder cache, and the table of the changes between them."""

from __future__ import annotations

import enum


class _Key(enum.Enum):
    __hash__ = object.__hash__  # Enum's own is slow; the table is looked up for every change


class State(_Key):
    """The state of an entry. The books keep no ABSENT entries."""

    ABSENT = "absent"
    RESERVED = "reserved"  # bytes taken, nothing dispatched
    ENCODING = "encoding"  # the runner works on it
    BORROWING = "borrowing"  # a lender was asked for it, or the runner puts in what has come
    READY = "ready"  # resident and held here
    LENT = "lent"  # resident, held by borrowers alone
    IDLE = "idle"  # resident, not held
    FREEING = "freeing"  # the runner was ordered to drop it


RESIDENT = frozenset({State.READY, State.LENT, State.IDLE, State.FREEING})
"""The states in which the device has the output."""


class Held(_Key):
    """The kind of holders of an entry after a change. A loan is a hold whose holder is another engine."""

    NOT = "no"
    HERE = "yes"  # by holders of this engine, and perhaps by borrowers too
    LENT = "by borrowers"  # by borrowers alone


class Change(_Key):
    """A change that can happen to an entry."""

    ACQUIRE = "acquire"
    RELEASE = "release"
    DISPATCH = "dispatched"
    ENCODED = "encoded"
    ENCODE_FAILED = "encode failed"
    BORROW = "asked of a lender"
    BORROWED = "borrowed"
    BORROW_FAILED = "borrow failed"
    EVICT = "evict (pressure, idle time, close)"
    FREED = "freed"
    LOST = "runner generation lost"


TRANSITIONS: dict[tuple[State, Change, Held], State] = {
    (State.ABSENT, Change.ACQUIRE, Held.HERE): State.RESERVED,
    (State.ABSENT, Change.ACQUIRE, Held.LENT): State.RESERVED,
    (State.RESERVED, Change.ACQUIRE, Held.HERE): State.RESERVED,
    (State.RESERVED, Change.ACQUIRE, Held.LENT): State.RESERVED,
    (State.RESERVED, Change.RELEASE, Held.HERE): State.RESERVED,
    (State.RESERVED, Change.RELEASE, Held.LENT): State.RESERVED,
    (State.RESERVED, Change.RELEASE, Held.NOT): State.ABSENT,
    (State.RESERVED, Change.DISPATCH, Held.HERE): State.ENCODING,
    (State.RESERVED, Change.DISPATCH, Held.LENT): State.ENCODING,
    (State.ENCODING, Change.ACQUIRE, Held.HERE): State.ENCODING,
    (State.ENCODING, Change.ACQUIRE, Held.LENT): State.ENCODING,
    (State.ENCODING, Change.RELEASE, Held.HERE): State.ENCODING,
    (State.ENCODING, Change.RELEASE, Held.LENT): State.ENCODING,
    (State.ENCODING, Change.RELEASE, Held.NOT): State.ENCODING,
    (State.ENCODING, Change.ENCODED, Held.HERE): State.READY,
    (State.ENCODING, Change.ENCODED, Held.LENT): State.LENT,
    (State.ENCODING, Change.ENCODED, Held.NOT): State.IDLE,
    (State.ENCODING, Change.ENCODE_FAILED, Held.HERE): State.RESERVED,  # the entry is tried again
    (State.ENCODING, Change.ENCODE_FAILED, Held.LENT): State.RESERVED,
    (State.ENCODING, Change.ENCODE_FAILED, Held.NOT): State.ABSENT,
    (State.RESERVED, Change.BORROW, Held.HERE): State.BORROWING,
    (State.BORROWING, Change.ACQUIRE, Held.HERE): State.BORROWING,
    (State.BORROWING, Change.RELEASE, Held.HERE): State.BORROWING,
    (State.BORROWING, Change.RELEASE, Held.NOT): State.BORROWING,
    (State.BORROWING, Change.BORROWED, Held.HERE): State.READY,
    (State.BORROWING, Change.BORROWED, Held.NOT): State.IDLE,
    (State.BORROWING, Change.BORROW_FAILED, Held.HERE): State.RESERVED,  # encoded here, or asked of another lender
    (State.BORROWING, Change.BORROW_FAILED, Held.NOT): State.ABSENT,
    (State.READY, Change.ACQUIRE, Held.HERE): State.READY,
    (State.READY, Change.RELEASE, Held.HERE): State.READY,
    (State.READY, Change.RELEASE, Held.LENT): State.LENT,
    (State.READY, Change.RELEASE, Held.NOT): State.IDLE,
    (State.LENT, Change.ACQUIRE, Held.HERE): State.READY,
    (State.LENT, Change.ACQUIRE, Held.LENT): State.LENT,
    (State.LENT, Change.RELEASE, Held.LENT): State.LENT,
    (State.LENT, Change.RELEASE, Held.NOT): State.IDLE,
    (State.IDLE, Change.ACQUIRE, Held.HERE): State.READY,
    (State.IDLE, Change.ACQUIRE, Held.LENT): State.LENT,
    (State.IDLE, Change.EVICT, Held.NOT): State.FREEING,
    (State.FREEING, Change.FREED, Held.NOT): State.ABSENT,
    (State.RESERVED, Change.LOST, Held.HERE): State.RESERVED,
    (State.RESERVED, Change.LOST, Held.LENT): State.RESERVED,
    (State.ENCODING, Change.LOST, Held.HERE): State.RESERVED,
    (State.ENCODING, Change.LOST, Held.LENT): State.RESERVED,
    (State.BORROWING, Change.LOST, Held.HERE): State.RESERVED,
    (State.READY, Change.LOST, Held.HERE): State.RESERVED,
    (State.LENT, Change.LOST, Held.LENT): State.RESERVED,
    (State.ENCODING, Change.LOST, Held.NOT): State.ABSENT,
    (State.BORROWING, Change.LOST, Held.NOT): State.ABSENT,
    (State.IDLE, Change.LOST, Held.NOT): State.ABSENT,
    (State.FREEING, Change.LOST, Held.NOT): State.ABSENT,
}


def transition_table() -> str:
    """Returns `TRANSITIONS` as a Markdown table."""
    rows = [
        f"| {old.value} | {change.value} | {held.value} | {new.value} |"
        for (old, change, held), new in TRANSITIONS.items()
    ]
    return "\n".join(["| from | event | held then | to |", "|---|---|---|---|", *rows])
