"""The promises of the page allocator and of the cross-attention slots, each under its own name."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule

from triolet.core.pages import CrossSlots, PageAllocator

from .machines import Machine

KEYS = ("a", "b", "c", "d")


class PagesMachine(Machine):
    """Sequences that take pages and give them back as they please."""

    @initialize(total=st.integers(1, 8))
    def open(self, total: int) -> None:
        self.pages = PageAllocator(total)
        self.taken: list[tuple[int, ...]] = []

    @rule(count=st.integers(0, 9))
    def take(self, count: int) -> None:
        free = self.pages.free
        pages = self.pages.try_take(count)
        if pages is None:
            assert count > free, "what is free can be taken"
            assert self.pages.free == free, "all or nothing: a take that fails takes nothing"
            return
        assert len(pages) == count
        self.taken.append(pages)

    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        if self.taken:
            self.pages.give_back(self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1))))

    @invariant()
    def every_page_is_free_or_taken_once(self) -> None:
        taken = [page for pages in self.taken for page in pages]
        assert len(taken) == len(set(taken)), "a page belongs to one sequence"
        assert self.pages.free + len(taken) == self.pages.total, "books balance"
        assert set(taken) <= set(range(self.pages.total))

    def teardown(self) -> None:
        """Whatever was taken can be taken again."""
        if self.failed:
            return
        for pages in self.taken:
            self.pages.give_back(pages)
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
            index = self.slots.join(key)
            assert self.written[index] == key, "no phantom: who joins finds its own key"
        elif self.slots.available():
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
            self.slots.leave(*self.users.pop(data.draw(st.integers(0, len(self.users) - 1))))

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
        assert self.slots.used + self.slots.idle <= self.slots.total
        for slot in used & set(self.written):
            assert all(key == self.written[slot] for key, index in self.users if index == slot)

    def teardown(self) -> None:
        """Once all have left, every slot can be taken."""
        if self.failed:
            return
        for user in self.users:
            self.slots.leave(*user)
        assert self.slots.used == 0
        taken = {self.slots.take(f"new {number}") for number in range(self.slots.total)}
        assert taken == set(range(self.slots.total))


TestPages = PagesMachine.TestCase
TestPages.settings = settings(stateful_step_count=30)
TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(stateful_step_count=30)


def test_the_least_recently_used_key_loses_its_place():
    slots = CrossSlots(2)
    for key in ("a", "b"):
        slots.leave(key, slots.take(key))
    slots.leave("a", slots.join("a"))
    slots.take("c")
    assert slots.resident("a")
    assert not slots.resident("b")


def test_a_page_given_back_twice_is_our_bug_and_said_so():
    pages = PageAllocator(2)
    taken = pages.try_take(1)
    pages.give_back(taken)
    with pytest.raises(AssertionError, match="it is not taken"):
        pages.give_back(taken)
