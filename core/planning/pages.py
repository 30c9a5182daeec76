"""The books of the pages of self-attention KV and of the slots of cross-attention KV. Only numbers are kept here, no
tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import TypeAlias

from attrs import define, field

Key: TypeAlias = bytes | str  # names the content of a page or slot


def _unheard(_: Key) -> None:
    """Hears of a key that nobody cares for. No lambda: the exhaustive search pickles planners."""


@define(eq=False)
class PageAllocator:
    """Pages ``0 .. total-1``. Each page is free, taken by one or more sequences, or cached.

    A taken page may be listed under the key of its content (see `triolet.core.planning.prefix`), so that other
    sequences join it. A listed page is cached when its last user has given it back. It then stays listed until it is
    needed for new content. The least recently used page is evicted first.
    """

    total: int
    evicted: Callable[[Key], object] = field(default=_unheard, kw_only=True)  # hears of each key that is evicted
    _free: list[int] = field(init=False)
    _users: dict[int, int] = field(factory=dict, init=False)  # number of users of each taken page
    _keys: dict[int, Key] = field(factory=dict, init=False)  # key of each listed page
    _listed: dict[Key, int] = field(factory=dict, init=False)
    _cached: OrderedDict[int, None] = field(factory=OrderedDict, init=False)

    def __attrs_post_init__(self) -> None:
        self._free = list(range(self.total - 1, -1, -1))

    @property
    def free(self) -> int:
        """The number of pages that can be taken now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """The number of pages that no sequence uses and that are kept for their content."""
        return len(self._cached)

    def try_take(self, count: int) -> tuple[int, ...] | None:
        """Takes ``count`` pages. Returns ``None`` and takes no page if fewer are free."""
        if count > self.free:
            return None
        pages = tuple(self._pop() for _ in range(count))
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def _pop(self) -> int:
        if self._free:
            return self._free.pop()
        page, _ = self._cached.popitem(last=False)
        key = self._keys.pop(page)
        del self._listed[key]
        self.evicted(key)
        return page

    def find(self, keys: Iterable[Key]) -> tuple[int, ...]:
        """Returns the pages of the longest listed prefix of ``keys``. Keys after the first unlisted one are not
        computed."""
        return tuple(self._listed[key] for key in takewhile(self._listed.__contains__, keys))

    def unused(self, pages: Iterable[int]) -> int:
        """Returns how many of these listed pages no sequence uses. Joining them makes so many fewer pages free."""
        return sum(page in self._cached for page in pages)

    def exclusive(self, pages: Iterable[int]) -> int:
        """Returns how many of these taken pages have only one user. They become free when that user gives them back."""
        return sum(self._users[page] == 1 for page in pages)

    def join(self, pages: Iterable[int]) -> None:
        """Adds one user to each of these listed pages."""
        for page in pages:
            assert page in self._keys, f"page {page} was joined, but it is not listed"
            self._users[page] = self._users.get(page, 0) + 1
            self._cached.pop(page, None)

    def list_as(self, page: int, key: Key) -> None:
        """Lists the taken ``page`` under ``key``, its content. If another page is listed under ``key`` already, nothing
        changes.
        """
        assert page in self._users, f"page {page} was listed, but nobody uses it"
        if key not in self._listed and page not in self._keys:
            self._listed[key] = page
            self._keys[page] = key

    def give_back(self, pages: Sequence[int]) -> None:
        """Removes one user from each page. The last of a sequence's cached pages are evicted first, since they are of
        no use without the pages before them."""
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

    def resident(self, key: Key) -> bool:
        """True if a page is listed under ``key``, so that sequences can share it."""
        return key in self._listed

    def share(self, key: Key) -> int:
        """Adds one user to the page that is listed under ``key``, and returns the page."""
        page = self._listed[key]
        self.join((page,))
        return page

    def unlist(self, key: Key) -> None:
        """Unlists the page under ``key``, if there is one. Its users keep it."""
        page = self._listed.pop(key, None)
        if page is None:
            return
        del self._keys[page]
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def forget_contents(self) -> None:
        """Unlists all pages, since their contents are lost. Sequences keep the pages that they use."""
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self._keys.clear()
        self._listed.clear()


@define(eq=False)
class CrossSlots(PageAllocator):
    """The slots of cross-attention KV. Each slot is listed under its content as soon as it is taken.

    Sequences may join a slot once the step that writes it is dispatched, since the runner runs steps in order. If that
    step fails, `write_failed` unlists the slot.
    """

    @property
    def used(self) -> int:
        """The number of slots that sequences use."""
        return self.total - self.free

    def in_use(self, key: str) -> bool:
        """True if ``key`` is resident, and a sequence uses its slot."""
        return self._listed.get(key) in self._users

    def take(self, key: str) -> int:
        """Takes a slot that ``key`` will be written into, with one user, and returns the slot."""
        assert key not in self._listed, f"cross KV of {key} is resident already"
        slots = self.try_take(1)
        assert slots is not None, "no cross slot is free or idle"
        self.list_as(slots[0], key)
        return slots[0]

    def write_failed(self, key: str, slot: int) -> None:
        """Unlists a slot whose write failed, so that no sequence joins it. The users of the slot must leave."""
        if self._listed.get(key) == slot:
            self.unlist(key)
