"""The places, pages and cross slots that running sequences have, and that leaving sequences give back."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from attrs import define, field

from ..errors import RequestTooLarge
from .limits import PlannerLimits
from .pages import CrossSlots, PageAllocator
from .sequence import Phase, Sequence


@define(eq=False)
class Room:
    """The running and the leaving sequences, the pages and the slots."""

    limits: PlannerLimits
    running: list[Sequence] = field(factory=list, init=False)  # in order
    leaving: set[Sequence] = field(factory=set, init=False)
    pages: PageAllocator = field(init=False)
    slots: CrossSlots = field(init=False)
    _came: int = field(default=0, init=False)  # how often a place, pages or a slot came back
    _blocked: tuple[str, int] | None = field(default=None, init=False)  # a request that found no room, and `_came`

    def __attrs_post_init__(self) -> None:
        self.pages = PageAllocator(self.limits.pages)
        self.slots = CrossSlots(self.limits.cross_slots)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> int:
        """The number of further sequences that may run."""
        return self.limits.max_running - len(self.running) - len(self.leaving)

    def pages_for(self, sequence: Sequence, positions: int) -> int:
        """The number of pages that the first ``positions`` of ``sequence`` take."""
        return 0 if self.limits.whole_prompts else sequence.pages_for(positions, self.limits.page_size)

    def refusal(self, sequence: Sequence) -> RequestTooLarge | None:
        """Returns why a beam search can never run here; ``None``: it can."""
        if sequence.beams == 1:
            return None
        limits, beams = self.limits, f"beam_size={sequence.beams}"
        if sequence.beams > limits.max_step_tokens:
            return RequestTooLarge(
                f"{beams} feeds so many tokens in a step; allowed: up to {limits.max_step_tokens}; ask for fewer "
                "beams, or raise EngineConfig(max_step_tokens=...)"
            )
        needed = self.pages_for(sequence, sequence.limit - 1)  # the last token is never fed
        if needed > limits.pages:
            return RequestTooLarge(
                f"{beams} and up to {sequence.limit} tokens, the prompt's included, take {needed} pages of KV; "
                f"allowed: up to {limits.pages}, all there are; ask for fewer beams or fewer max_tokens, or raise "
                "EngineConfig(self_kv_bytes=...)"
            )
        return None

    def cached_pages(self, sequence: Sequence) -> tuple[int, ...]:
        """The listed pages that hold the sequence's first tokens already."""
        if not self.limits.prefix_caching or sequence.shuns_cache:
            return ()
        return self.pages.find(sequence.page_keys.upto(sequence.tokens, sequence.most_cached()))

    def is_blocked(self, sequence: Sequence) -> bool:
        """True if the sequence has found no room, and none has come back since."""
        return self._blocked == (sequence.request.id, self._came)

    # -- changes -----------------------------------------------------------------------------------------------------

    def found_none(self, sequence: Sequence) -> None:
        """Remembers that ``sequence`` lacks nothing but room."""
        self._blocked = (sequence.request.id, self._came)

    def join(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        """A sequence that starts joins its ``cached`` pages, and its cross KV where that is resident."""
        self.pages.join(cached)
        sequence.pages = cached
        if sequence.cross_item is not None and self.slots.resident(sequence.cross_item.key):
            sequence.slot = self.slots.share(sequence.cross_item.key)

    def enter(self, sequence: Sequence) -> None:
        """The sequence runs, from the end of its cached pages on."""
        insort(self.running, sequence, key=attrgetter("key"))
        sequence.phase = Phase.RUNNING
        sequence.listed = len(sequence.pages)
        sequence.dispatched = sequence.fed = sequence.listed * self.limits.page_size

    def list_pages(self, sequence: Sequence) -> None:
        """Lists the full pages that answered steps have written, for others to find."""
        known = len(sequence.tokens) if sequence.beams == 1 else sequence.prompt_length  # beams differ after it
        full = min(sequence.fed, known) // self.limits.page_size
        keys = sequence.page_keys.upto(sequence.tokens, full, first=sequence.listed)
        for page, key in zip(sequence.pages[sequence.listed : full], keys, strict=True):
            self.pages.list_as(page, key)
        sequence.listed = max(full, sequence.listed)

    def leave(self, sequence: Sequence) -> None:
        """The sequence runs no more. It keeps its pages and slot until `give_back`."""
        sequence.phase = Phase.LEAVING
        self.running.remove(sequence)
        self.leaving.add(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """A leaving sequence that no step in flight mentions gives everything back."""
        self.leaving.discard(sequence)
        self._came += 1
        self.pages.give_back(sequence.pages)
        if sequence.slot is not None:
            self.slots.give_back((sequence.slot,))
        sequence.rewind()

    def generation_lost(self) -> None:
        """The contents of pages and slots are lost. Sequences keep their pages; they must forget their slots."""
        self.slots = CrossSlots(self.limits.cross_slots)
        self.pages.forget_contents()
