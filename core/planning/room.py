"""The places, pages, cross slots, states and slots of adapters that running sequences have and leaving sequences give
back."""

from __future__ import annotations

from bisect import insort
from collections.abc import Container
from operator import attrgetter

from attrs import define, field

from ..errors import RequestTooLarge
from ..plan import Keep, StepPlan
from .draft import Part, StepDraft
from .limits import PlannerLimits
from .pages import CrossSlots, PageAllocator
from .sequence import Phase, Sequence
from .states import StatePool


@define(eq=False)
class Room:
    """The running and the leaving sequences, the pages, the slots and the states."""

    limits: PlannerLimits
    running: list[Sequence] = field(factory=list, init=False)  # in order
    leaving: set[Sequence] = field(factory=set, init=False)
    pages: PageAllocator = field(init=False)
    slots: CrossSlots = field(init=False)
    states: StatePool = field(init=False)
    adapters: CrossSlots = field(init=False)  # those of adapters, by their keys
    _came: int = field(default=0, init=False)  # how often a place, pages, a slot or a state came back
    _blocked: tuple[str, int] | None = field(default=None, init=False)  # a request without room; `_came` at that time

    def __attrs_post_init__(self) -> None:
        self.states = StatePool(self.limits.states)
        self.pages = PageAllocator(self.limits.pages, evicted=self.states.unlist)
        self.slots = CrossSlots(self.limits.cross_slots)
        self.adapters = CrossSlots(self.limits.adapters)

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
        if limits.states and sequence.beams > limits.states:
            return RequestTooLarge(
                f"{beams} needs a recurrent state for each beam; allowed: up to {limits.states}, all that the engine "
                "has. Give fewer beams, or a larger EngineConfig(state_bytes=...)"
            )
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
        """Returns the listed pages that hold the first tokens of the sequence already. If the model has recurrent
        layers, they end where a kept state has read them all. A search whose beams need all states goes on from none.
        """
        if not self.limits.prefix_caching or sequence.shuns_cache or sequence.beams == self.limits.states:
            return ()
        pages = self.pages.find(sequence.page_keys.upto(sequence.tokens, sequence.most_cached()))
        return pages[: self._kept_pages(sequence, len(pages))] if self.limits.states else pages

    def _kept_pages(self, sequence: Sequence, most: int) -> int:
        """Returns the number of pages, up to ``most``, that the last kept state of the sequence's prefix has read."""
        ends = range(most, 0, -1)
        return next((end for end in ends if self.states.resident(sequence.page_keys.last_of(end))), 0)

    def states_for(self, sequence: Sequence, cached: tuple[int, ...], joined: Container[bytes]) -> int:
        """Returns the number of states that ``sequence`` takes when it starts behind ``cached`` pages: one for each
        beam, and the kept one until it is copied, unless that is in use or among ``joined``."""
        if not self.limits.states:
            return 0
        key = sequence.page_keys.last_of(len(cached)) if cached else None
        return sequence.beams + (key is not None and key not in joined and self.states.is_cached(key))

    def is_blocked(self, sequence: Sequence) -> bool:
        """True if the sequence has found no room, and no room has come back since."""
        return self._blocked == (sequence.request.id, self._came)

    # -- changes -----------------------------------------------------------------------------------------------------

    def found_none(self, sequence: Sequence) -> None:
        """Remembers that ``sequence`` lacks nothing but room."""
        self._blocked = (sequence.request.id, self._came)

    def join(self, sequence: Sequence, cached: tuple[int, ...]) -> None:
        """Gives a sequence that starts its ``cached`` pages, the state that has read them, and the slots of its cross
        KV and adapter if these are resident."""
        if self.limits.states and self.limits.prefix_caching:
            behind = sequence.page_keys.upto(sequence.tokens, sequence.most_cached(), first=len(cached))
            sequence.find_ends(len(cached) + len(self.pages.find(behind)))
        self.pages.join(cached)
        sequence.pages = cached
        if self.limits.states and cached:
            sequence.source = self.states.share(sequence.page_keys.last_of(len(cached)))
        if sequence.cross_item is not None and self.slots.resident(sequence.cross_item.key):
            sequence.slot = self.slots.share(sequence.cross_item.key)
        if self.adapters.resident(sequence.request.adapter):
            sequence.adapter = self.adapters.share(sequence.request.adapter)

    def enter(self, sequence: Sequence) -> None:
        """Adds the sequence to the running ones. It runs from the end of its cached pages on."""
        insort(self.running, sequence, key=attrgetter("key"))
        sequence.phase = Phase.RUNNING
        sequence.listed = len(sequence.pages)
        sequence.dispatched = sequence.fed = sequence.listed * self.limits.page_size

    def take(self, part: Part) -> None:
        """Gives the sequence of ``part`` the pages and states that the part was drafted with."""
        pages, states = self.pages.try_take(part.pages), self.states.try_take(part.states)
        assert pages is not None, "a step was drafted with pages that are not there"
        assert states is not None, "a step was drafted with states that are not there"
        if pages:  # a chunk's tuple stays the same while it may
            part.sequence.pages += pages
        if states:
            part.sequence.states += states

    def take_keeps(self, part: Part, draft: StepDraft) -> tuple[Keep, ...]:
        """Returns the copies of its state that the part writes. They take what states are left."""
        if not (self.limits.states and self.limits.prefix_caching) or part.beams > 1:
            return ()
        positions = part.sequence.keeps(part.start, part.stop + part.draft_tokens)
        states = self.states.try_take(min(len(positions), draft.states)) or ()
        draft.states -= len(states)
        return tuple(map(Keep, positions[len(positions) - len(states) :], states))

    def settle_states(self, sequence: Sequence, keeps: tuple[Keep, ...]) -> None:
        """Notes that a step was answered: the state that the sequence went on from is copied, and the step has written
        ``keeps``. Those whose pages are listed are listed, too."""
        self._came += bool(keeps) or sequence.source is not None
        self._release_source(sequence)
        for keep in keeps:
            end = keep.position // self.limits.page_size
            if end > sequence.listed:
                self.states.give_back((keep.state,))
                continue
            key = sequence.page_keys.last_of(end)
            anew = self.states.keep(keep.state, key, worth=end in sequence.ends)
            if sequence.trail is not None and sequence.trail != key:
                self.states.give_way(sequence.trail)
            sequence.trail = key if anew else None

    def _release_source(self, sequence: Sequence) -> None:
        if sequence.source is not None:
            self.states.give_back((sequence.source,))
            sequence.source = None

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
        """Takes pages, states and slots back from a leaving sequence that no step in flight mentions."""
        self.leaving.discard(sequence)
        self._came += 1
        self.pages.give_back(sequence.pages)
        self.states.give_back(sequence.states)
        self._release_source(sequence)
        if sequence.slot is not None:
            self.slots.give_back((sequence.slot,))
        if sequence.adapter is not None:
            self.adapters.give_back((sequence.adapter,))
        sequence.rewind()

    def write_failed(self, plan: StepPlan) -> None:
        """Notes that no slot was written by a step. The users of these slots must leave."""
        for write in plan.cross_writes:
            self.slots.write_failed(write.key, write.slot)
        for load in plan.adapter_writes:
            self.adapters.write_failed(load.key, load.slot)

    def generation_lost(self) -> None:
        """Notes that the contents of pages, states and slots are lost. Sequences keep their pages and states, and must
        forget their slots."""
        self.slots = CrossSlots(self.limits.cross_slots)
        self.adapters = CrossSlots(self.limits.adapters)
        self.pages.forget_contents()
        self.states.forget_contents()
