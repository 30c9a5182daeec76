"""The books of adapters: which are loaded, who needs them, and which lie in slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from attrs import define, field

from ..errors import UnknownModel
from ..plan import AdapterWrite
from ..request import Request
from .actions import Action, DropAdapter
from .room import Room
from .sequence import Sequence


@define(eq=False)
class AdapterBook:
    """Counts for each adapter, by its key, how often it is loaded and how many requests have it.

    The runner counts loads, too, and keeps an adapter until each was taken back. The last one is taken back only when
    no request has the adapter: one that was preempted will need it in a slot again.
    """

    _room: Room
    _actions: list[Action]
    _loads: Counter[str] = field(factory=Counter, init=False)
    _users: Counter[str] = field(factory=Counter, init=False)
    _owed: Counter[str] = field(factory=Counter, init=False)  # loads to be taken back

    def loaded(self, key: str) -> None:
        """Notes that the runner has loaded the adapter once more."""
        self._loads[key] += 1
        self._settle(key)

    def unload(self, key: str) -> None:
        """Takes one load of an adapter back. Requests that have it end as they began; later ones are refused."""
        assert self._loads[key], f"adapter {key} was unloaded, but it is not loaded"
        self._loads[key] -= 1
        self._owed[key] += 1
        self._settle(key)

    def enter(self, request: Request) -> UnknownModel | None:
        """Notes a new request. Returns the reason why it can have no adapter; ``None``: it can, or needs none."""
        self._users[request.adapter] += bool(request.adapter)
        if not request.adapter or self._loads[request.adapter]:
            return None
        return UnknownModel(f"the adapter of {request.id} was unloaded before the request began; name another one")

    def leave(self, request: Request) -> None:
        """Notes that a request is gone, and has given back all it had."""
        if request.adapter:
            self._users[request.adapter] -= 1
            self._settle(request.adapter)

    def _settle(self, key: str) -> None:
        due = self._owed[key] if self._loads[key] or not self._users[key] else max(0, self._owed[key] - 1)
        self._owed[key] -= due
        self._actions += [DropAdapter(key)] * due
        if not (self._loads[key] or self._owed[key]):
            self._room.adapters.unlist(key)
        for counter in (self._loads, self._users, self._owed):
            if not counter[key]:
                del counter[key]

    def take_slots(self, starts: Iterable[Sequence]) -> tuple[AdapterWrite, ...]:
        """Gives the starts of a step the slots of their adapters. Returns what the step must write."""
        slots, written = self._room.adapters, list[AdapterWrite]()
        for sequence in starts:
            key = sequence.request.adapter
            if not key or sequence.adapter is not None:
                continue
            if slots.resident(key):  # an earlier start of this step writes it
                sequence.adapter = slots.share(key)
                continue
            sequence.adapter = slots.take(key)
            written.append(AdapterWrite(key=key, slot=sequence.adapter))
        return tuple(written)
