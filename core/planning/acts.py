"""The plan of a step: the acts that fill a `StepDraft`. They read the planner's state, and write only the draft.

The acts come in this order. Running sequences *give way* to a more urgent waiting sequence. Each sequence that
*decodes* is fed one token; if pages run out, the last running sequences are preempted for it. Prompts that are partly
fed *read on* with the tokens that are left. Waiting sequences are *admitted*. Tokens that are still left *fill up* the
prompts that wanted more, and are then used for *proposed* draft tokens. Only `_eligible` decides which sequences a step
may run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from attrs import define, evolve

from ..batch_size import BatchSize
from ..request import EncoderItem
from .acquirer import Acquirer
from .draft import Part, StepDraft
from .limits import PlannerLimits
from .quarantine import Quarantine
from .room import Room
from .sequence import Phase, Sequence

_SCORED = 32  # tokens of prompts with log-probabilities in a step, and one of each: the logits of all take gigabytes
_MOST_WORK = 4096  # page look-ups in one step to admit sequences; computing a page key counts as `_KEY_WORK` look-ups
_KEY_WORK = 4
_IN_ORDER = attrgetter("key")


@define(eq=False)
class Acts:
    """The acts of one planner. ``sequences`` has all sequences of the planner, by request id."""

    limits: PlannerLimits
    sequences: Mapping[str, Sequence]
    room: Room
    acquirer: Acquirer
    quarantine: Quarantine
    step_size: BatchSize

    def draft(self) -> StepDraft:
        """Returns the draft of the next step. Suspects run in steps of their own. If no suspect can run, the other
        sequences do. If a suspect waits for room, no sequence that comes after it starts then.
        """
        lost: dict[Sequence, None] = {}
        blocked: Sequence | None = None
        for only in (*self._turns(), None):
            draft = StepDraft(
                tokens=self.step_size.budget,
                pages=self.room.pages.free,
                slots=self.room.slots.free,
                states=self.room.states.free,
                adapters=self.room.adapters.free,
                places=self.room.places,
                lost=lost,
                blocked=blocked,
            )
            running, ready = self._eligible(only)
            if only is None:
                self._give_way(draft)
            decoding, reading = self._split(running)
            self._decode(draft, decoding)
            self._read_on(draft, reading)
            self._admit(draft, ready)
            self._fill_up(draft)
            self._propose(draft)
            if draft.parts:  # a turn without parts is discarded, with its preemptions
                break
            blocked = draft.blocked
        return draft

    # -- which sequences a step may run ------------------------------------------------------------------------------

    def _turns(self) -> Iterable[frozenset[str]]:
        if not self.quarantine:
            return ()
        suspects = [self.sequences[request_id] for request_id in self.quarantine]
        may_run = [s for s in suspects if s.phase is Phase.RUNNING or s in self.acquirer.ready]
        return self.quarantine.turns(s.request.id for s in sorted(may_run, key=_IN_ORDER))

    def _eligible(self, only: frozenset[str] | None) -> tuple[list[Sequence], Iterable[Sequence]]:
        """Returns the running and the ready sequences that a step may run: those in ``only``, or for ``None`` all but
        suspects."""
        if only is not None:
            chosen = sorted((self.sequences[request_id] for request_id in only), key=_IN_ORDER)
            running = [sequence for sequence in chosen if sequence.phase is Phase.RUNNING]
            return running, [sequence for sequence in chosen if sequence.phase is Phase.WAITING]
        if not self.quarantine:
            return self.room.running, self.acquirer.ready
        free = [sequence for sequence in self.room.running if sequence.request.id not in self.quarantine]
        return free, (sequence for sequence in self.acquirer.ready if sequence.request.id not in self.quarantine)

    def _split(self, running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that decode (one token, and no item that they lack), and those that read their prompt.
        A sequence with draft tokens in flight is in neither list, since the number of tokens that it will have sampled
        is not known."""
        decoding, reading = [], []
        for sequence in running:
            known = len(sequence.tokens) + sequence.sampling
            wanted = known - sequence.dispatched
            if wanted < 1 or known >= sequence.limit or sequence.drafting:
                continue
            if wanted == 1 and self._wanted(sequence, sequence.dispatched, scored=0):
                decoding.append(sequence)
            else:
                reading.append(sequence)
        return decoding, reading

    # -- giving way --------------------------------------------------------------------------------------------------

    def _give_way(self, draft: StepDraft) -> None:
        """Preempts running sequences for the first ready sequence. Only sequences that are less urgent and come later
        are preempted, the last ones first, and as few as suffice. If all of them together have too little room, none is
        preempted."""
        urgent, running = self.acquirer.ready.first(), self.room.running
        if urgent is None or self.room.leaving or not running or self.room.is_blocked(urgent) or urgent.lets_pass:
            return
        if not _yields(running[-1], urgent) or not self.acquirer.has_what_it_needs(urgent):
            return
        cached = self.room.cached_pages(urgent)
        trial = evolve(draft, growth={}, preempted={})
        while not self._fits(trial, urgent, cached):
            victim = running[-1 - len(trial.preempted)] if len(trial.preempted) < len(running) else None
            if victim is None or not _yields(victim, urgent):
                return
            trial.preempted[victim] = urgent
            self._grow(trial, victim, -1)
            trial.places += 1
            trial.pages += self.room.pages.exclusive(victim.pages)
            trial.states += len(victim.states)
            if victim.slot is not None:
                trial.slots += self.room.slots.exclusive((victim.slot,))
            if victim.adapter is not None:
                trial.adapters += self.room.adapters.exclusive((victim.adapter,))
        for victim in trial.preempted:
            draft.preempt(victim, self.room.pages.exclusive(victim.pages), to=urgent)

    # -- running sequences -------------------------------------------------------------------------------------------

    def _decode(self, draft: StepDraft, decoding: list[Sequence]) -> None:
        """Feeds one token to each sequence, or to each beam of a search. If the step has too few tokens, the sequences
        that have waited longest are fed."""
        page_size = self.limits.page_size
        for sequence in self._chosen(draft, decoding):
            start, has = sequence.dispatched, len(sequence.pages)
            inside = sequence.beams == 1 and start < has * page_size
            pages = 0 if inside else self.room.pages_for(sequence, start + 1) - has
            if sequence in draft.preempted or (pages > draft.pages and not self._make_room(draft, sequence, pages)):
                continue
            draft.add(Part(sequence, start, 1, 1, pages, beams=sequence.rows(start)))

    def _chosen(self, draft: StepDraft, decoding: list[Sequence]) -> list[Sequence]:
        """Returns the sequences for whose rows the step has enough tokens. A search that alone has more rows than a
        step may feed now runs in a step without other sequences.
        """
        if sum([sequence.rows(sequence.dispatched) for sequence in decoding]) <= draft.tokens:
            return decoding
        left = draft.tokens
        chosen: list[Sequence] = []
        for sequence in sorted(decoding, key=attrgetter("last_step")):
            rows = sequence.rows(sequence.dispatched)
            if rows <= left or not (chosen or draft.parts):
                chosen.append(sequence)
                left -= rows
        return sorted(chosen, key=_IN_ORDER)

    def _make_room(self, draft: StepDraft, wanting: Sequence, pages: int) -> bool:
        """Preempts the last running sequences until ``pages`` pages are left. If ``wanting`` is the last one itself, it
        gives way to the one before it. False if ``wanting`` cannot run in this step."""
        while draft.pages < pages:
            if self.room.leaving or draft.awaits:
                return False  # pages are on their way back already
            victim = self.room.running[-1 - len(draft.preempted)]  # ``wanting`` or a later sequence: no part yet
            alone = victim is wanting and len(self.room.running) == 1
            assert not alone, "one sequence alone does not fit the pages"
            to = self.room.running[-2 - len(draft.preempted)] if victim is wanting else wanting
            draft.preempt(victim, self.room.pages.exclusive(victim.pages), to=to)
            if victim is wanting:
                return False
        return True

    def _read_on(self, draft: StepDraft, reading: list[Sequence]) -> None:
        """Divides the tokens that decoding has left among the partly fed prompts: half to the first prompt, half of the
        remainder to the next one, and so on. These sequences have had all their pages since they started."""
        for index, sequence in enumerate(reading):
            if draft.tokens <= 0:
                return
            wanted = self._wanted(sequence, sequence.dispatched, draft.scored)
            others = index + 1 < len(reading) or bool(self.acquirer.ready)
            length = draft.share(wanted, self.limits.page_size, others=others)
            if length > 0 and sequence not in draft.preempted:
                draft.add(Part(sequence, sequence.dispatched, length, wanted))

    def _wanted(self, sequence: Sequence, start: int, scored: int) -> int:
        """Returns the number of tokens that can be fed from ``start`` on, up to the first item that the sequence does
        not hold. ``scored``: the tokens with log-probabilities that the step has."""
        stop = sequence.known
        if start < sequence.placeholders.stop:
            reach = sequence.placeholders.reach(start, sequence.held)
            stop = stop if reach is None else min(stop, reach)
        if sequence.is_scored and start < sequence.prompt_length:
            return min(stop - start, max(1, _SCORED - scored))
        return stop - start

    # -- waiting sequences -------------------------------------------------------------------------------------------

    def _admit(self, draft: StepDraft, ready: Iterable[Sequence]) -> None:
        """Starts ready sequences, in order. No sequence starts after one that waits for room or lets another one pass,
        or in a step that had to preempt. A sequence that starts is part of the same step. If the step fails, it starts
        anew."""
        if draft.preempted:
            return
        for sequence in ready:
            if draft.tokens <= 0 or draft.work > _MOST_WORK or draft.waits_before(sequence) or sequence.lets_pass:
                return
            if self.room.is_blocked(sequence):
                draft.blocked = sequence
                return
            if not self.acquirer.has_what_it_needs(sequence):
                draft.lost[sequence] = None
                continue
            if not self._try_admit(draft, sequence):
                return

    def _try_admit(self, draft: StepDraft, sequence: Sequence) -> bool:
        computed = len(sequence.page_keys)
        cached = self.room.cached_pages(sequence)
        draft.work += 1 + len(cached) + _KEY_WORK * (len(sequence.page_keys) - computed)
        start = len(cached) * self.limits.page_size
        wanted = self._wanted(sequence, start, draft.scored)
        length = self._first_share(draft, wanted)
        if not length:
            return False
        if not self._fits(draft, sequence, cached):
            draft.blocked = sequence
            return False
        item = sequence.cross_item
        if item is not None:
            draft.slots -= self._slots_taken(draft, item)
            draft.slot_keys.add(item.key)
        if sequence.request.adapter:
            draft.adapters -= self._adapters_taken(draft, sequence)
            draft.adapter_keys.add(sequence.request.adapter)
        draft.states -= self.room.states_for(sequence, cached, draft.state_keys)
        draft.pages -= self._unused(draft, cached)
        draft.joined.update(cached)
        if cached and self.limits.states:
            draft.state_keys.add(sequence.page_keys.last_of(len(cached)))
        draft.places -= 1
        draft.starts[sequence] = cached
        self._grow(draft, sequence, 1)
        pages = self.room.pages_for(sequence, len(sequence.tokens)) - len(cached)
        own = sequence.beams if self.limits.states else 0  # the rest of ``states`` is joined
        draft.add(Part(sequence, start, length, wanted, pages, own))
        return True

    def _first_share(self, draft: StepDraft, wanted: int) -> int:
        """Returns the length of a newcomer's first chunk; 0: the newcomer waits for a step with more tokens left. A
        prompt that cannot be divided runs alone if it is too long for a step's tokens."""
        if self.limits.whole_prompts:
            return wanted if wanted <= draft.tokens or not draft.parts else 0
        others = len(self.acquirer.ready) > len(draft.starts) + 1
        length = draft.share(wanted, self.limits.page_size, others=others)
        return 0 if length < min(wanted, self.limits.page_size) and draft.parts else length

    def _fits(self, draft: StepDraft, sequence: Sequence, cached: tuple[int, ...]) -> bool:
        """True if there are a place, slots, states and enough pages to start ``sequence``: pages for all of its
        tokens, and pages for the next tokens of all sequences.
        """
        item = sequence.cross_item
        if draft.states < self.room.states_for(sequence, cached, draft.state_keys):
            return False
        if draft.adapters < self._adapters_taken(draft, sequence):
            return False
        if draft.places < 1 or (item is not None and draft.slots < self._slots_taken(draft, item)):
            return False
        needed = self.room.pages_for(sequence, len(sequence.tokens)) - len(cached) + self._unused(draft, cached)
        if needed > draft.pages or not (self.room.running or draft.starts) or self.limits.whole_prompts:
            return needed <= draft.pages
        tokens = self.limits.headroom * self.limits.page_size + len(sequence.tokens) // self.step_size.budget
        return needed + self._growth(sequence, tokens) + self._growth_beside(draft, tokens) <= draft.pages

    def _growth_beside(self, draft: StepDraft, tokens: int) -> int:
        """Returns the number of pages that the sequences beside a newcomer need for their next ``tokens`` tokens. The
        sum is computed once a step."""
        if tokens not in draft.growth:
            beside = (other for other in (*self.room.running, *draft.starts) if other not in draft.preempted)
            draft.growth[tokens] = sum(self._growth(other, tokens) for other in beside)
        return draft.growth[tokens]

    def _grow(self, draft: StepDraft, sequence: Sequence, sign: int) -> None:
        """Adds ``sequence`` to the sequences beside a newcomer (``sign`` 1), or removes it (-1)."""
        for tokens in draft.growth:
            draft.growth[tokens] += sign * self._growth(sequence, tokens)

    def _growth(self, sequence: Sequence, tokens: int) -> int:
        """Returns the number of pages that ``sequence`` needs for its next ``tokens`` tokens."""
        has = max(len(sequence.pages), self.room.pages_for(sequence, len(sequence.tokens)))
        return max(0, self.room.pages_for(sequence, min(sequence.known + tokens, sequence.limit)) - has)

    def _unused(self, draft: StepDraft, cached: Iterable[int]) -> int:
        """Returns how many of the ``cached`` pages count as free: no sequence uses them, and no start of this draft
        joins them.
        """
        return self.room.pages.unused(page for page in cached if page not in draft.joined)

    def _slots_taken(self, draft: StepDraft, item: EncoderItem) -> int:
        """Returns how many slots a start with ``item`` takes from those that are left; 0 if the item's cross KV is in
        use."""
        return item.key not in draft.slot_keys and not self.room.slots.in_use(item.key)

    def _adapters_taken(self, draft: StepDraft, sequence: Sequence) -> int:
        """Returns how many slots of adapters a start takes from those that are left; 0 if it has no adapter, or one in
        use."""
        key = sequence.request.adapter
        return bool(key) and key not in draft.adapter_keys and not self.room.adapters.in_use(key)

    # -- what is left over -------------------------------------------------------------------------------------------

    def _fill_up(self, draft: StepDraft) -> None:
        """Gives the tokens that are left to the prompts that wanted more than their share."""
        for part in draft.parts:
            if draft.tokens <= 0:
                return
            if part.wanted > part.length:
                more = min(part.wanted - part.length, draft.tokens)
                if part.sequence.is_scored:
                    more = min(more, max(0, _SCORED - draft.scored))
                    draft.scored += more
                part.length += more
                draft.tokens -= more

    def _propose(self, draft: StepDraft) -> None:
        """Adds draft tokens, with the tokens and pages that no sequence of the step needs otherwise."""
        running = len(self.room.running) + len(draft.starts)
        if not self.limits.draft_tokens or running > self.limits.draft_running:
            return
        for part in draft.parts:
            sequence = part.sequence
            if draft.tokens <= 0:
                return
            if not part.samples or sequence.request.id in self.quarantine or not sequence.may_draft:
                continue
            if part.stop < sequence.placeholders.stop:
                continue  # the next tokens are read with an item
            if self.limits.drafts_follow and (sequence in draft.starts or part.start < sequence.begun):
                continue
            states = int(bool(self.limits.states) and len(sequence.states) < 2)  # see `OwnState`
            if states > draft.states:
                continue
            most = min(self.limits.draft_tokens, sequence.left - 1, draft.tokens)
            had = part.pages + (len(draft.starts[sequence]) if sequence in draft.starts else len(sequence.pages))
            pages = min(max(0, self.room.pages_for(sequence, part.stop + most) - had), draft.pages)
            part.draft_tokens = max(0, min(most, (had + pages) * self.limits.page_size - part.stop))
            part.pages += pages
            draft.pages -= pages
            draft.tokens -= part.draft_tokens
            if part.draft_tokens:
                part.states += states
                draft.states -= states


def _yields(running: Sequence, urgent: Sequence) -> bool:
    """True if ``running`` gives way to ``urgent``: ``running`` has a less urgent priority and comes later."""
    return running.request.priority > urgent.request.priority and running.key > urgent.key
