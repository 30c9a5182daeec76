"""Room: the places, pages and cross slots that sequences run in. Who runs has some, and who has left gives it back."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from attrs import define, field

from .limits import PlannerLimits
from .pages import CrossSlots, PageAllocator
from .sequence import Phase, Sequence


@define(eq=False)
class Room:
    """Who runs and who is leaving, the pages and the slots."""

    limits: PlannerLimits
    running: list[Sequence] = field(factory=list, init=False)  # in order
    leaving: set[Sequence] = field(factory=set, init=False)
    pages: PageAllocator = field(init=False)
    slots: CrossSlots = field(init=False)
    _came: int = field(default=0, init=False)  # how often a place, pages or a slot came back
    _blocked: tuple[str, int] | None = field(default=None, init=False)  # who found no room, as of `_came`

    def __attrs_post_init__(self) -> None:
        self.pages = PageAllocator(self.limits.pages)
        self.slots = CrossSlots(self.limits.cross_slots)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> int:
        """How many more may run."""
        return self.limits.max_running - len(self.running) - len(self.leaving)

    def pages_for(self, positions: int) -> int:
        """Pages that so many positions take."""
        return 0 if self.limits.whole_prompts else -(-positions // self.limits.page_size)

    def cached_pages(self, sequence: Sequence) -> tuple[int, ...]:
        """The pages that hold the beginning of its tokens already."""
        if not self.limits.prefix_caching or sequence.shuns_cache:
            return ()
        return self.pages.find(sequence.page_keys.upto(sequence.tokens, sequence.most_cached()))

    def is_blocked(self, sequence: Sequence) -> bool:
        """Whether it has found no room, and none has come since."""
        return self._blocked == (sequence.request.id, self._came)

    # -- changes -----------------------------------------------------------------------------------------------------

    def found_none(self, sequence: Sequence) -> None:
        """``sequence`` could start, if there were room for it."""
        self._blocked = (sequence.request.id, self._came)

    def join(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        """A sequence that starts uses what is there for it already: ``cached`` pages, and its cross KV."""
        self.pages.join(cached)
        sequence.pages = cached
        if sequence.cross_item is not None and self.slots.resident(sequence.cross_item.key):
            sequence.slot = self.slots.share(sequence.cross_item.key)

    def enter(self, sequence: Sequence) -> None:
        """It runs, behind its cached pages."""
        insort(self.running, sequence, key=attrgetter("key"))
        sequence.phase = Phase.RUNNING
        sequence.listed = len(sequence.pages)
        sequence.dispatched = sequence.fed = sequence.listed * self.limits.page_size

    def list_pages(self, sequence: Sequence) -> None:
        """What answered steps have written may be found by others."""
        full = min(sequence.fed, len(sequence.tokens)) // self.limits.page_size
        keys = sequence.page_keys.upto(sequence.tokens, full, first=sequence.listed)
        for page, key in zip(sequence.pages[sequence.listed : full], keys, strict=True):
            self.pages.list_as(page, key)
        sequence.listed = max(full, sequence.listed)

    def leave(self, sequence: Sequence) -> None:
        """It runs no more, and has what it has until `give_back`."""
        sequence.phase = Phase.LEAVING
        self.running.remove(sequence)
        self.leaving.add(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """A leaving sequence that no step mentions any more gives everything back."""
        self.leaving.discard(sequence)
        self._came += 1
        self.pages.give_back(sequence.pages)
        if sequence.slot is not None:
            self.slots.give_back((sequence.slot,))
        sequence.rewind()

    def generation_lost(self) -> None:
        """Nothing is in the pages and slots any more. Users keep their pages; they must forget their slots."""
        self.slots = CrossSlots(self.limits.cross_slots)
        self.pages.forget_contents()
