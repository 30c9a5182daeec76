"""The places, pages and cross slots that running sequences have and leaving sequences give back."""

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
    _blocked: tuple[str, int] | None = field(default=None, init=False)  # a request without room; `_came` at that time

    def __attrs_post_init__(self) -> None:
        self.pages = PageAllocator(self.limits.pages)
        self.slots = CrossSlots(self.limits.cross_slots)

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def places(self) -> int:
        """The number of further sequences that may start now."""
        return self.limits.max_running - len(self.running) - len(self.leaving)

    def pages_for(self, sequence: Sequence, positions: int) -> int:
        """Returns the number of pages that the first ``positions`` positions of ``sequence`` need."""
        return 0 if self.limits.whole_prompts else sequence.pages_for(positions, self.limits.page_size)

    def refusal(self, sequence: Sequence) -> RequestTooLarge | None:
        """Returns the reason why a beam search can never run here; ``None``: it can run."""
        if sequence.beams == 1:
            return None
        limits, beams = self.limits, f"beam_size={sequence.beams}"
        if sequence.beams > limits.max_step_tokens:
            return RequestTooLarge(
                f"{beams} needs a token of each beam in one step; allowed: up to {limits.max_step_tokens}. Give "
                "fewer beams, or a larger EngineConfig(max_step_tokens=...)"
            )
        needed = self.pages_for(sequence, sequence.limit - 1)  # the last token is never fed
        if needed > limits.pages:
            return RequestTooLarge(
                f"{beams} and up to {sequence.limit} tokens, the prompt's included, take {needed} pages of KV; "
                f"allowed: up to {limits.pages}, all that the engine has. Give fewer beams or fewer max_tokens, or a "
                "larger EngineConfig(self_kv_bytes=...)"
            )
        return None

    def cached_pages(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the listed pages that hold the first tokens of the sequence already."""
        if not self.limits.prefix_caching or sequence.shuns_cache:
            return ()
        return self.pages.find(sequence.page_keys.upto(sequence.tokens, sequence.most_cached()))

    def is_blocked(self, sequence: Sequence) -> bool:
        """True if the sequence has found no room, and no room has come back since."""
        return self._blocked == (sequence.request.id, self._came)

    # -- changes -----------------------------------------------------------------------------------------------------

    def found_none(self, sequence: Sequence) -> None:
        """Remembers that ``sequence`` lacks nothing but room."""
        self._blocked = (sequence.request.id, self._came)

    def join(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        """Gives a sequence that starts its ``cached`` pages, and the slot of its cross KV if that is resident."""
        self.pages.join(cached)
        sequence.pages = cached
        if sequence.cross_item is not None and self.slots.resident(sequence.cross_item.key):
            sequence.slot = self.slots.share(sequence.cross_item.key)

    def enter(self, sequence: Sequence) -> None:
        """Adds the sequence to the running ones. It runs from the end of its cached pages on."""
        insort(self.running, sequence, key=attrgetter("key"))
        sequence.phase = Phase.RUNNING
        sequence.listed = len(sequence.pages)
        sequence.dispatched = sequence.fed = sequence.listed * self.limits.page_size

    def list_pages(self, sequence: Sequence) -> None:
        """Lists the full pages that answered steps have written, so that other sequences find them."""
        known = len(sequence.tokens) if sequence.beams == 1 else sequence.prompt_length  # beams differ after the prompt
        full = min(sequence.fed, known) // self.limits.page_size
        keys = sequence.page_keys.upto(sequence.tokens, full, first=sequence.listed)
        for page, key in zip(sequence.pages[sequence.listed : full], keys, strict=True):
            self.pages.list_as(page, key)
        sequence.listed = max(full, sequence.listed)

    def leave(self, sequence: Sequence) -> None:
        """Removes the sequence from the running ones. It keeps its pages and slot until `give_back`."""
        sequence.phase = Phase.LEAVING
        self.running.remove(sequence)
        self.leaving.add(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Takes pages and slot back from a leaving sequence that no step in flight mentions."""
        self.leaving.discard(sequence)
        self._came += 1
        self.pages.give_back(sequence.pages)
        if sequence.slot is not None:
            self.slots.give_back((sequence.slot,))
        sequence.rewind()

    def generation_lost(self) -> None:
        """Notes that the contents of pages and slots are lost. Sequences keep their pages, and must forget their
        slots."""
        self.slots = CrossSlots(self.limits.cross_slots)
        self.pages.forget_contents()
