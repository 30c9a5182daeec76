"""Who owns which page of self-attention KV and which slot of cross-attention KV. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from attrs import define, field


@define(eq=False)
class PageAllocator:
    """Pages ``0 .. total-1``, each free or taken by one sequence."""

    total: int
    _free: list[int] = field(init=False)
    _taken: set[int] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return len(self._free)

    def try_take(self, count: int) -> tuple[int, ...] | None:
        """``count`` pages, or ``None`` (and nothing taken) where fewer are free."""
        if count > len(self._free):
            return None
        pages = tuple(self._free.pop() for _ in range(count))
        self._taken.update(pages)
        return pages

    def give_back(self, pages: Iterable[int]) -> None:
        """The pages are free again."""
        for page in pages:
            assert page in self._taken, f"page {page} was given back, but it is not taken"
            self._taken.remove(page)
            self._free.append(page)


@define(eq=False)
class _Slot:
    index: int
    key: str
    users: int = 1
    listed: bool = True  # may be joined; false once its write has failed


@define(eq=False)
class CrossSlots:
    """Slots of cross-attention KV, keyed by content and shared by count.

    A slot that nobody uses stays listed, for reuse, until another key needs its place: least recently used first. A
    slot may be joined as soon as the step that writes it is dispatched, since the runner runs steps in order; if that
    step fails, `write_failed` unlists it.
    """

    total: int
    _free: list[int] = field(init=False)
    _slots: dict[str, _Slot] = field(factory=dict, init=False)
    _unlisted: dict[int, _Slot] = field(factory=dict, init=False)
    _idle: OrderedDict[str, None] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def used(self) -> int:
        """Slots that some sequence uses."""
        return self.total - len(self._free) - len(self._idle)

    @property
    def idle(self) -> int:
        """Slots kept for reuse."""
        return len(self._idle)

    def resident(self, key: str) -> bool:
        """Whether ``key`` can be joined."""
        return key in self._slots

    def available(self) -> bool:
        """Whether `take` would succeed."""
        return bool(self._free or self._idle)

    def join(self, key: str) -> int:
        """One more user of a resident ``key``; its slot."""
        slot = self._slots[key]
        slot.users += 1
        self._idle.pop(key, None)
        return slot.index

    def take(self, key: str) -> int:
        """A slot to write ``key`` into, with one user. The least recently used idle key loses its place if need be."""
        assert key not in self._slots, f"cross KV of {key} is resident already"
        assert self.available(), "no cross slot is free or idle"
        if not self._free:
            oldest, _ = self._idle.popitem(last=False)
            self._free.append(self._slots.pop(oldest).index)
        slot = _Slot(self._free.pop(), key)
        self._slots[key] = slot
        return slot.index

    def leave(self, key: str, index: int) -> None:
        """One user of slot ``index`` less."""
        slot = self._unlisted.get(index) or self._slots[key]
        assert slot.index == index, f"{key} was left in slot {index}, but it lies in slot {slot.index}"
        assert slot.users > 0, f"slot {index} of {key} was left more often than joined"
        slot.users -= 1
        if slot.users:
            return
        if slot.listed:
            self._idle[key] = None
            return
        del self._unlisted[index]
        self._free.append(index)

    def write_failed(self, key: str, index: int) -> None:
        """The step that should have written the slot failed: its users must leave, nobody may join."""
        slot = self._slots.get(key)
        if slot is None or slot.index != index:
            return  # already unlisted
        del self._slots[key]
        slot.listed = False
        self._idle.pop(key, None)
        if slot.users:
            self._unlisted[index] = slot
        else:
            self._free.append(index)
