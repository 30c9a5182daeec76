"""Who owns which page of self-attention KV and which slot of cross-attention KV. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

from attrs import define, field

Key: TypeAlias = bytes | str  # of a content


@define(eq=False)
class PageAllocator:
    """Pages ``0 .. total-1``: free, taken by one or more sequences, or cached.

    A taken page may be listed under the key of its content (see `triolet.core.prefix`), so that others join it. When
    its last user has given it back it is cached: it stays listed until its place is needed, the least recently used
    first.
    """

    total: int
    _free: list[int] = field(init=False)
    _users: dict[int, int] = field(factory=dict, init=False)  # of taken pages
    _keys: dict[int, Key] = field(factory=dict, init=False)  # of listed pages
    _listed: dict[Key, int] = field(factory=dict, init=False)
    _cached: OrderedDict[int, None] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Pages that can be taken now, cached ones among them."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody uses, kept for their content."""
        return len(self._cached)

    def try_take(self, count: int) -> tuple[int, ...] | None:
        """``count`` pages, or ``None`` (and nothing taken) where fewer are free."""
        if count > self.free:
            return None
        pages = tuple(self._pop() for _ in range(count))
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def _pop(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        del self._listed[self._keys.pop(page)]
        return page

    def find(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """The listed pages of the longest beginning of ``keys``, which are read no further."""
        return tuple(self._listed[key] for key in takewhile(self._listed.__contains__, keys))

    def unused(self, pages: Iterable[int]) -> int:
        """How many of these listed pages nobody uses: whoever joins them takes them from those that are free."""
        return sum(page in self._cached for page in pages)

    def exclusive(self, pages: Iterable[int]) -> int:
        """How many of these taken pages have one user: they are free when that one gives them back."""
        return sum(self._users[page] == 1 for page in pages)

    def join(self, pages: Iterable[int]) -> None:
        """One more user of each of these listed pages."""
        for page in pages:
            assert page in self._keys, f"page {page} was joined, but it is not listed"
            self._users[page] = self._users.get(page, 0) + 1
            self._cached.pop(page, None)

    def list_as(self, page: int, key: Key) -> None:
        """The taken ``page`` holds the content of ``key`` now. Where another page does so already, that one stays the
        one to be found."""
        assert page in self._users, f"page {page} was listed, but nobody uses it"
        if key not in self._listed and page not in self._keys:
            self._listed[key] = page
            self._keys[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        """One user less of each page. The last ones are to lose their place first: they are of no use without those
        before them."""
        for page in reversed(pages):
            assert page in self._users, f"page {page} was given back, but it is not taken"
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def forget_contents(self) -> None:
        """What was in the pages is lost: nothing can be found any more. Users keep theirs."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._keys.clear()
        self._listed.clear()


@define(eq=False)
class CrossSlots(PageAllocator):
    """Slots of cross-attention KV: each is listed under its content as soon as it is taken.

    It may be joined when the step that writes it is dispatched, since the runner runs steps in order; if that step
    fails, `write_failed` unlists it.
    """

    @property
    def used(self) -> int:
        """Slots that some sequence uses."""
        return self.total - self.free

    def resident(self, key: str) -> bool:
        """Whether ``key`` can be shared."""
        return key in self._listed

    def in_use(self, key: str) -> bool:
        """Whether ``key`` is resident, and somebody uses it."""
        return self._listed.get(key) in self._users

    def share(self, key: str) -> int:
        """One more user of a resident ``key``; its slot."""
        slot = self._listed[key]
        self.join((slot,))
        return slot

    def take(self, key: str) -> int:
        """A slot to write ``key`` into, with one user."""
        assert key not in self._listed, f"cross KV of {key} is resident already"
        slots = self.try_take(1)
        assert slots is not None, "no cross slot is free or idle"
        self.list_as(slots[0], key)
        return slots[0]

    def write_failed(self, key: str, slot: int) -> None:
        """The step that should have written the slot failed: its users must leave, nobody may join."""
        if self._listed.get(key) != slot:
            return  # already unlisted
        del self._listed[key], self._keys[slot]
        if slot in self._cached:
            del self._cached[slot]
            self._free.append(slot)
