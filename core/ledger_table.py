"""The states of an entry of the encoder cache, and the table of the changes between them."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """Where an entry is in its life. The books have no ABSENT entries."""

    ABSENT = "absent"
    RESERVED = "reserved"  # bytes taken, nothing dispatched
    ENCODING = "encoding"  # the runner works on it
    READY = "ready"  # resident and held
    IDLE = "idle"  # resident, not held
    FREEING = "freeing"  # the runner was told to drop it


HELD, UNHELD = True, False  # whether the entry has a holder once the change has happened


class Change(enum.Enum):
    """What can happen to an entry."""

    ACQUIRE = "acquire"
    RELEASE = "release"
    DISPATCH = "dispatched"
    ENCODED = "encoded"
    ENCODE_FAILED = "encode failed"
    EVICT = "evict (pressure, idle time, close)"
    FREED = "freed"
    LOST = "runner generation lost"


TRANSITIONS: dict[tuple[State, Change, bool], State] = {
    (State.ABSENT, Change.ACQUIRE, HELD): State.RESERVED,
    (State.RESERVED, Change.ACQUIRE, HELD): State.RESERVED,
    (State.RESERVED, Change.RELEASE, HELD): State.RESERVED,
    (State.RESERVED, Change.RELEASE, UNHELD): State.ABSENT,
    (State.RESERVED, Change.DISPATCH, HELD): State.ENCODING,
    (State.ENCODING, Change.ACQUIRE, HELD): State.ENCODING,
    (State.ENCODING, Change.RELEASE, HELD): State.ENCODING,
    (State.ENCODING, Change.RELEASE, UNHELD): State.ENCODING,
    (State.ENCODING, Change.ENCODED, HELD): State.READY,
    (State.ENCODING, Change.ENCODED, UNHELD): State.IDLE,
    (State.ENCODING, Change.ENCODE_FAILED, HELD): State.RESERVED,  # it is tried again
    (State.ENCODING, Change.ENCODE_FAILED, UNHELD): State.ABSENT,
    (State.READY, Change.ACQUIRE, HELD): State.READY,
    (State.READY, Change.RELEASE, HELD): State.READY,
    (State.READY, Change.RELEASE, UNHELD): State.IDLE,
    (State.IDLE, Change.ACQUIRE, HELD): State.READY,
    (State.IDLE, Change.EVICT, UNHELD): State.FREEING,
    (State.FREEING, Change.FREED, UNHELD): State.ABSENT,
    (State.RESERVED, Change.LOST, HELD): State.RESERVED,
    (State.ENCODING, Change.LOST, HELD): State.RESERVED,
    (State.READY, Change.LOST, HELD): State.RESERVED,
    (State.ENCODING, Change.LOST, UNHELD): State.ABSENT,
    (State.IDLE, Change.LOST, UNHELD): State.ABSENT,
    (State.FREEING, Change.LOST, UNHELD): State.ABSENT,
}


def transition_table() -> str:
    """`TRANSITIONS` as a Markdown table."""
    rows = [
        f"| {old.value} | {change.value} | {'yes' if held else 'no'} | {new.value} |"
        for (old, change, held), new in TRANSITIONS.items()
    ]
    return "\n".join(["| from | event | held then | to |", "|---|---|---|---|", *rows])
