"""The books of recurrent states: those of sequences, and those that are kept for sequences with the same prefix."""

from __future__ import annotations

from attrs import define, field

from .pages import Key, PageAllocator


@define(eq=False)
class StatePool(PageAllocator):
    """The states ``0 .. total-1``. A state that a sequence changes has one user and no key. A kept state is listed
    under the key of the last page that it has read, and never changes. A sequence that goes on from it is a user of it
    until the step that makes a copy is answered.

    A state is *worth* keeping where prefixes probably end: at the last pages of a prompt, and where a prompt turned out
    to leave another one. All others are those of sequences that read on: such a state gives way to the next one of its
    sequence.
    """

    _worth: set[Key] = field(factory=set, init=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.evicted = self._worth.discard

    def is_cached(self, key: Key) -> bool:
        """True if a state is listed under ``key``, and nobody uses it."""
        return self._listed.get(key) in self._cached

    def keep(self, state: int, key: Key, *, worth: bool) -> bool:
        """Lists a state that a step has written, and takes it from the sequence that kept it. False if another state is
        listed under ``key`` already; the state is then free."""
        anew = key not in self._listed
        self.list_as(state, key)
        if worth:
            self._worth.add(key)
        self.give_back((state,))
        return anew

    def give_way(self, key: Key) -> None:
        """Unlists the state of a sequence that has kept a later one, unless it is worth keeping or in use."""
        if key not in self._worth and self.is_cached(key):
            self.unlist(key)

    def unlist(self, key: Key) -> None:
        """Unlists the state under ``key``, if there is one: its pages are gone. Its users keep it."""
        super().unlist(key)
        self._worth.discard(key)

    def forget_contents(self) -> None:
        super().forget_contents()
        self._worth.clear()
