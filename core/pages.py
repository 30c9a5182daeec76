"""Who owns which page of self-attention KV and which slot of cross-attention KV. Pure bookkeeping, no tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

from attrs import define, field


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
    _keys: dict[int, bytes] = field(factory=dict, init=False)  # of listed pages
    _listed: dict[bytes, int] = field(factory=dict, init=False)
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

    def find(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The listed pages of the longest beginning of ``keys``, which are read no further."""
        pages = map(self._listed.get, keys)
        return tuple(takewhile(_is_page, pages))  # type: ignore[arg-type]

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

    def list_as(self, page: int, key: bytes) -> None:
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


def _is_page(page: int | None) -> bool:
    return page is not None


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

    @property
    def available(self) -> int:
        """How often `take` would succeed."""
        return len(self._free) + len(self._idle)

    def is_idle(self, key: str) -> bool:
        """Whether ``key`` is resident, and nobody uses it."""
        return key in self._idle

    def has_one_user(self, key: str) -> bool:
        """Whether the slot of a resident ``key`` is idle as soon as its one user leaves."""
        return self._slots[key].users == 1

    def join(self, key: str) -> int:
        """One more user of a resident ``key``; its slot."""
        slot = self._slots[key]
        slot.users += 1
        self._idle.pop(key, None)
        return slot.index

    def take(self, key: str) -> int:
        """A slot to write ``key`` into, with one user. The least recently used idle key loses its place if need be."""
        assert key not in self._slots, f"cross KV of {key} is resident already"
        assert self.available, "no cross slot is free or idle"
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
