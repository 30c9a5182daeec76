"""The promises of the page allocator and of the cross-attention slots, each under its own name."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from triolet.core.planning.pages import CrossSlots, PageAllocator

from ..machines import Machine

KEYS = ("a", "b", "c", "d")


TEXTS = ("aaaa", "aabb", "bb", "c")  # the page behind a beginning is keyed by that beginning


class PagesMachine(Machine):
    """Sequences that take pages, write texts into them that others find, and give them back as they please."""

    @initialize(total=st.integers(1, 8))
    def open(self, total: int) -> None:
        self.pages = PageAllocator(total)
        self.taken: list[tuple[int, ...]] = []
        self.written: dict[int, bytes] = {}  # what lies in a page
        self.found: dict[bytes, int] = {}  # what `find` must find
        self.cached: list[int] = []  # pages without a user that may be found, the first to lose its place first

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        free = self.pages.free
        pages = self.pages.try_take(count)
        if pages is None:
            assert count > free, "what is free can be taken"
            assert self.pages.free == free, "all or nothing: a take that fails takes nothing"
            return
        assert len(pages) == count
        assert not set(pages) & set(self.in_use()), "no page is taken from its users"
        lost = max(0, count - (free - len(self.cached)))  # pages with nothing in them are taken first
        evicted, self.cached = self.cached[:lost], self.cached[lost:]
        assert set(evicted) == {page for page in pages if page in self.found.values()}, "least recently used first"
        self.found = {key: page for key, page in self.found.items() if page not in evicted}
        for page in pages:
            self.written.pop(page, None)
        self.taken.append(pages)

    @rule(text=st.sampled_from(TEXTS), others=st.integers(0, 2))
    def start(self, text: str, others: int) -> None:
        """Joins what is there of a text, and takes pages for the rest and ``others``, as the planner does."""
        keys = [text[:stop].encode() for stop in range(1, len(text) + 1)]
        pages = self.pages.find(keys)
        here = [key in self.found for key in keys]
        length = here.index(False) if False in here else len(here)
        assert pages == tuple(self.found[key] for key in keys[:length]), "the longest beginning is found, and no more"
        assert [self.written[page] for page in pages] == keys[:length], "no phantom: a page holds what it is found as"
        self.pages.join(pages)
        self.cached = [page for page in self.cached if page not in pages]
        before = len(self.taken)
        self.take(len(keys) - length + others)
        if len(self.taken) == before:
            self.give(pages)
            return
        self.taken[-1] = (*pages, *self.taken[-1])
        for key, page in zip(keys[length:], self.taken[-1][length:], strict=False):
            self.written[page] = key
            self.pages.list_as(page, key)
            self.found.setdefault(key, page)

    @rule(data=st.data(), text=st.sampled_from(TEXTS))
    def write(self, data: st.DataObject, text: str) -> None:
        """A page that one sequence alone has, and that nobody finds, is written by it: others may hold the same."""
        uses = Counter(self.in_use())
        own = [page for page, users in uses.items() if users == 1 and page not in self.written]
        if own:
            page = data.draw(st.sampled_from(own))
            self.written[page] = text.encode()
            self.pages.list_as(page, self.written[page])
            self.found.setdefault(self.written[page], page)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.taken:
            self.give(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    def give(self, pages: tuple[int, ...]) -> None:
        """The last ones are to lose their place first."""
        self.pages.give_back(pages)
        unused = set(pages) - set(self.in_use())
        self.cached += [page for page in reversed(pages) if page in unused and page in self.found.values()]

    @rule(really=st.sampled_from((False, False, True)))
    def contents_are_lost(self, really: bool) -> None:
        if really:
            self.pages.forget_contents()
            self.written.clear()
            self.found.clear()
            self.cached.clear()

    def in_use(self) -> list[int]:
        return [page for pages in self.taken for page in pages]

    @invariant()
    def every_page_is_free_or_taken(self) -> None:
        taken = set(self.in_use())
        assert self.pages.free + len(taken) == self.pages.total, "books balance"
        assert taken <= set(range(self.pages.total))
        assert self.pages.cached == len(self.cached), "books balance: of cached pages"

    @invariant()
    def what_is_listed_is_found(self) -> None:
        for key, page in self.found.items():
            assert self.pages.find([key]) == (page,), "what is listed is found while it keeps its place"
        for text in TEXTS:
            found = self.pages.find([text.encode()])
            assert not found or text.encode() in self.found, "no phantom: nothing else is found"

    def teardown(self) -> None:
        """Whatever was taken can be taken again."""
        if self.failed:
            return
        while self.taken:
            self.give(self.taken.pop())
        assert sorted(self.pages.try_take(self.pages.total) or ()) == list(range(self.pages.total))


class SlotsMachine(Machine):
    """Users that join and leave keys, while some writes fail."""

    @initialize(total=st.integers(1, 3))
    def open(self, total: int) -> None:
        self.slots = CrossSlots(total)
        self.users: list[tuple[str, int]] = []  # key and slot of every user
        self.written: dict[int, str] = {}  # what lies in a slot

    @rule(key=st.sampled_from(KEYS))
    def use(self, key: str) -> None:
        if self.slots.resident(key):
            index = self.slots.share(key)
            assert self.written[index] == key, "no phantom: who joins finds its own key"
        elif self.slots.free:
            index = self.slots.take(key)
            assert index not in {slot for _, slot in self.users}, "no slot is taken from its users"
            self.written[index] = key
        else:
            assert len({slot for _, slot in self.users}) == self.slots.total, "idle slots can be taken"
            return
        self.users.append((key, index))

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.users:
            _, slot = self.users.pop(data.draw(st.integers(0, len(self.users) - 1)))
            self.slots.give_back((slot,))

    @rule(data=st.data())
    def write_fails(self, data: st.DataObject) -> None:
        if not self.written:
            return
        index = data.draw(st.sampled_from(sorted(self.written)))
        key = self.written[index]
        self.slots.write_failed(key, index)
        if (key, index) in self.users or self.slots.resident(key):
            assert not self.slots.resident(key) or self._lies_elsewhere(key, index), "nobody joins a failed write"
        del self.written[index]

    def _lies_elsewhere(self, key: str, index: int) -> bool:
        return any(other == key and slot != index for slot, other in self.written.items())

    @invariant()
    def books_balance(self) -> None:
        """Every slot is free, idle or used, and used ones are those that somebody uses."""
        used = {slot for _, slot in self.users}
        assert self.slots.used == len(used)
        assert self.slots.used + self.slots.cached <= self.slots.total
        for slot in used & set(self.written):
            assert all(key == self.written[slot] for key, index in self.users if index == slot)

    def teardown(self) -> None:
        """Once all have left, every slot can be taken."""
        if self.failed:
            return
        for _, slot in self.users:
            self.slots.give_back((slot,))
        assert self.slots.used == 0
        taken = {self.slots.take(f"new {number}") for number in range(self.slots.total)}
        assert taken == set(range(self.slots.total))


TestPages = PagesMachine.TestCase
TestPages.settings = settings(stateful_step_count=30, max_examples=settings.default.max_examples // 2)
TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(stateful_step_count=30, max_examples=settings.default.max_examples // 2)


def test_the_least_recently_used_key_loses_its_place():
    slots = CrossSlots(2)
    for key in ("a", "b"):
        slots.give_back((slots.take(key),))
    slots.give_back((slots.share("a"),))
    slots.take("c")
    assert slots.resident("a")
    assert not slots.resident("b")
