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
    READY = "ready"  # resident and held
    IDLE = "idle"  # resident, not held
    FREEING = "freeing"  # the runner was ordered to drop it


RESIDENT = frozenset({State.READY, State.IDLE, State.FREEING})
"""The states in which the device has the output."""


class Change(_Key):
    """A change that can happen to an entry."""

    ACQUIRE = "acquire"
    RELEASE = "release"
    DISPATCH = "dispatched"
    ENCODED = "encoded"
    ENCODE_FAILED = "encode failed"
    EVICT = "evict (pressure, idle time, close)"
    FREED = "freed"
    LOST = "runner generation lost"


TRANSITIONS: dict[tuple[State, Change, bool], State] = {  # True: the entry is held after the change
    (State.ABSENT, Change.ACQUIRE, True): State.RESERVED,
    (State.RESERVED, Change.ACQUIRE, True): State.RESERVED,
    (State.RESERVED, Change.RELEASE, True): State.RESERVED,
    (State.RESERVED, Change.RELEASE, False): State.ABSENT,
    (State.RESERVED, Change.DISPATCH, True): State.ENCODING,
    (State.ENCODING, Change.ACQUIRE, True): State.ENCODING,
    (State.ENCODING, Change.RELEASE, True): State.ENCODING,
    (State.ENCODING, Change.RELEASE, False): State.ENCODING,
    (State.ENCODING, Change.ENCODED, True): State.READY,
    (State.ENCODING, Change.ENCODED, False): State.IDLE,
    (State.ENCODING, Change.ENCODE_FAILED, True): State.RESERVED,  # the entry is tried again
    (State.ENCODING, Change.ENCODE_FAILED, False): State.ABSENT,
    (State.READY, Change.ACQUIRE, True): State.READY,
    (State.READY, Change.RELEASE, True): State.READY,
    (State.READY, Change.RELEASE, False): State.IDLE,
    (State.IDLE, Change.ACQUIRE, True): State.READY,
    (State.IDLE, Change.EVICT, False): State.FREEING,
    (State.FREEING, Change.FREED, False): State.ABSENT,
    (State.RESERVED, Change.LOST, True): State.RESERVED,
    (State.ENCODING, Change.LOST, True): State.RESERVED,
    (State.READY, Change.LOST, True): State.RESERVED,
    (State.ENCODING, Change.LOST, False): State.ABSENT,
    (State.IDLE, Change.LOST, False): State.ABSENT,
    (State.FREEING, Change.LOST, False): State.ABSENT,
}


def transition_table() -> str:
    """Returns `TRANSITIONS` as a Markdown table."""
    rows = [
        f"| {old.value} | {change.value} | {'yes' if held else 'no'} | {new.value} |"
        for (old, change, held), new in TRANSITIONS.items()
    ]
    return "\n".join(["| from | event | held then | to |", "|---|---|---|---|", *rows])
