"""Workloads of an encoder cache: the operations of its users, in any order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen


@frozen
class Ask:
    """``holder`` acquires ``key``; if it waits already, it asks again."""

    holder: str
    key: str


@frozen
class Release:
    """``holder`` gives one hold of ``key`` back, or withdraws its wait."""

    holder: str
    key: str


@frozen
class Encoded:
    """The encoding of ``key`` ends: ``stored`` on the device, or in vain."""

    key: str
    stored: bool = True


@frozen
class Free:
    """The device drops the outputs that it was told to; until then frees are held back."""


Operation = Ask | Release | Encoded | Free


def _as_tuple(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    return tuple(operations)


@frozen
class Workload:
    """What the clients and the device do to a cache of ``capacity`` bytes; its ``repr`` is the way to do it again.

    Impossible operations are skipped (the end of an encoding that never began). With ``hurried`` the cache is closed
    right after the last operation, with encodings under way; ``late`` says how these end (all others are stored).
    Without, all waiting requests are served first. See `play`.
    """

    capacity: int
    sizes: Mapping[str, int]  # bytes of each key
    operations: tuple[Operation, ...] = field(default=(), converter=_as_tuple)
    hurried: bool = False
    late: tuple[Operation, ...] = field(default=(), converter=_as_tuple)  # the device's operations after `close`


KEYS = ("a", "b", "c", "d", "e", "f")
HOLDERS = ("r0", "r1", "r2", "r3", "r4", "r5")
