"""The planner: which sequence runs when, in which pages, and what each step holds. Continuous batching, pure.

Facts come in (`Planner.submit`, `encoder_ready`, `step_done`, ...), `Action` values come out through
`Planner.take_actions`, steps through `Planner.next_step`. The scheduler actor turns actions into messages.

A request lives in the planner as a `Sequence`::

    submit -> waiting (for its encoder output, or for a place) -> running -> leaving -> gone
                 ^                                                  |
                 +----------- preempted, or its step failed --------+

Up to ``steps_in_flight`` steps are dispatched and not yet answered. The planner therefore plans with tokens it does not
know yet (the executor does), and *free follows completion*: pages, slots and encoder entries of a sequence are given
back only when no dispatched step mentions it any more.

A step is planned as a `StepDraft` by acts, in this order: running sequences *give way* to a more urgent one that waits;
those that decode have their token each; prompts that are being read *read on* with what is left; those that wait are
*admitted*; draft tokens are *proposed* with what nobody wants. Whom a step may run is one rule, `_eligible`. Nothing
changes before the draft is committed.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from attrs import define, evolve, field

from .actions import Abort, Action, Commit, Fail, Finish, Preempt, Shrink, Start, Suspect
from .batch_size import BatchSize
from .draft import Part, StepDraft
from .errors import RequestTooLarge, RunnerCrashed
from .holds import EncoderHolds
from .ledger import Hold
from .limits import PlannerLimits
from .ordered import Ordered
from .pages import CrossSlots, PageAllocator
from .plan import Chunk, CrossWrite, SampledToken, SequenceStart, StepPlan, StepResult
from .quarantine import Quarantine
from .request import EncoderItem, FinishReason, Request
from .sequence import Phase, Sequence
from .statistics import PlannerStatistics

_MOST_WORK = 4096  # pages looked at to admit sequences in one step, a key that must be computed counting as several
_KEY_WORK = 4


@define(eq=False)
class _InFlightStep:
    """A dispatched step and what must happen when it is answered."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]
    writes: tuple[Sequence, ...]  # of the plan's cross writes
    reads: tuple[Hold, ...]  # encoder outputs


@define(eq=False)
class Planner:
    """The queue, the pages and the steps in flight. See the module's docstring."""

    limits: PlannerLimits
    _pages: PageAllocator = field(init=False)
    _slots: CrossSlots = field(init=False)
    _sequences: dict[str, Sequence] = field(factory=dict, init=False)  # by request id
    _waiting: Ordered[Sequence] = field(factory=Ordered, init=False)  # all that wait
    _ready: Ordered[Sequence] = field(factory=Ordered, init=False)  # those of them that lack nothing but room
    _seeking: Ordered[Sequence] = field(factory=Ordered, init=False)  # whose items nobody has looked at yet
    _ahead: Ordered[Sequence] = field(factory=Ordered, init=False)  # that have acquired encoder outputs
    _wanting: Ordered[Sequence] = field(factory=Ordered, init=False)  # running, in need of their next items
    _running: list[Sequence] = field(factory=list, init=False)  # in order
    _leaving: dict[str, Sequence] = field(factory=dict, init=False)
    _steps: deque[_InFlightStep] = field(factory=deque, init=False)
    _actions: list[Action] = field(factory=list, init=False)
    _holds: EncoderHolds = field(init=False)
    _acquires_stale: bool = field(default=False, init=False)  # something happened by which somebody may acquire
    _room_came: int = field(default=0, init=False)  # how often a place, pages or a slot came back
    _blocked: tuple[str, int] | None = field(default=None, init=False)  # who found no room, as of `_room_came`
    _to_forget: list[int] = field(factory=list, init=False)  # executor records to drop with the next step
    _arrivals: int = field(default=0, init=False)
    _next_sequence_id: int = field(default=0, init=False)
    _next_step_id: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _step_size: BatchSize = field(init=False)
    _quarantine: Quarantine = field(init=False)
    _cross_written: int = field(default=0, init=False)
    _cross_shared: int = field(default=0, init=False)
    _tokens_fed: int = field(default=0, init=False)
    _tokens_cached: int = field(default=0, init=False)
    _tokens_drafted: int = field(default=0, init=False)
    _tokens_accepted: int = field(default=0, init=False)
    _tokens_committed: int = field(default=0, init=False)
    _preemptions: int = field(default=0, init=False)
    _failed_steps: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._step_size = BatchSize(self.limits.max_step_tokens)
        self._quarantine = Quarantine(self.limits.crashes_alone)
        self._holds = EncoderHolds(self.limits.encoder_cache_bytes, self._actions)
        self._pages = PageAllocator(self.limits.pages)
        self._slots = CrossSlots(self.limits.cross_slots)

    # -- facts -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A new request joins the queue. Its values were checked by the caller."""
        assert request.id not in self._sequences, f"request {request.id} was submitted twice"
        sequence = Sequence.of(request, self._arrivals, page_size=self.limits.page_size, identity=self.limits.identity)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
        largest = max((item.size for item in request.items), default=0)
        if largest > self.limits.encoder_cache_bytes:
            self._end(sequence, Fail(request.id, _too_large(largest, self.limits.encoder_cache_bytes)))

    def encoder_ready(self, holder: str) -> None:
        """``holder`` may read its encoder output. An unknown holder has withdrawn meanwhile."""
        request_id = self._holds.ready(holder)
        if request_id is not None and (sequence := self._sequences[request_id]).phase is Phase.WAITING:
            self._ready.put(sequence, sequence.key)

    def encoder_refused(self, holder: str, error: Exception) -> None:
        """The encoder cache will not give the output: the request fails. An unknown holder has withdrawn meanwhile."""
        request_id = self._holds.refused(holder)
        self._acquires_stale = True
        if request_id is not None and not self._sequences[request_id].ended:
            self._end(self._sequences[request_id], Fail(request_id, error))

    def abort(self, request_id: str) -> None:
        """The client no longer wants the request. Unknown ids have ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.ended:
            self._end(sequence, Abort(request_id))

    def abort_all(self) -> None:
        """Every request that has not ended is aborted."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def fail_all(self, error: RunnerCrashed) -> None:
        """The runner is gone and answers no more: every request fails, whatever was in flight counts as answered."""
        self._steps.clear()
        for sequence in list(self._sequences.values()):
            sequence.in_flight = 0
            if sequence.ended:
                self._settle(sequence)
        self.fail_waiting(lambda: _one_more(error))

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """No device will be there for them: every request that is here fails, each with an error of its own."""
        for sequence in list(self._sequences.values()):
            if not sequence.ended:
                self._end(sequence, Fail(sequence.request.id, make_error()))

    def generation_lost(self) -> None:
        """The runner has started anew: no step is in flight, no cross KV is written, no encoder output is there. Who
        ran starts anew from its committed tokens; who held an output waits for it, as its acquire still stands."""
        self._epoch += 1
        for step in self._steps:
            self._unanswered(step)
        self._steps.clear()
        self._slots = CrossSlots(self.limits.cross_slots)
        self._pages.forget_contents()
        self._holds.generation_lost()
        for sequence in list(self._sequences.values()):
            sequence.slot = sequence.id = None
            if sequence.phase is Phase.WAITING:
                self._look_again(sequence)
            self._leave(sequence)
        self._to_forget.clear()

    def step_done(self, result: StepResult) -> None:
        """The oldest step in flight has been run."""
        step = self._answered(result.step_id)
        assert len(result.sampled) == len(step.sequences), "a step result must answer every chunk"
        self._quarantine.step_done()
        self._step_size.done()
        for sequence in step.writes:
            self._cross_written += 1
            self._release(sequence)
        for sequence, chunk, sampled in zip(step.sequences, step.plan.chunks, result.sampled, strict=True):
            self._chunk_done(sequence, chunk, sampled)

    def _chunk_done(self, sequence: Sequence, chunk: Chunk, sampled: SampledToken) -> None:
        accepted = len(sampled.accepted)
        sequence.sampling -= chunk.samples
        sequence.drafting -= chunk.draft_tokens > 0
        sequence.fed = chunk.start + chunk.length + accepted
        sequence.dispatched += accepted
        self._tokens_accepted += accepted
        if chunk.samples and self._quarantine:  # a chunk that goes well says nothing of the chunks to come
            self._quarantine.clear(sequence.request.id)
        if not sequence.ended and (chunk.samples or sampled.probe is not None):
            self._commit_tokens(sequence, sampled, samples=chunk.samples)
        if sequence.fed >= (sequence.listed + 1) * self.limits.page_size and self.limits.prefix_caching:
            self._list_pages(sequence)
        if sequence.placed and chunk.start < sequence.placed.stop:
            self._items_read(sequence)
        sequence.in_flight -= 1  # only now what has ended gives back its pages
        if sequence.phase is Phase.LEAVING:
            self._settle(sequence)

    def _items_read(self, sequence: Sequence) -> None:
        if self._holds.release_read(sequence) and sequence.phase is Phase.RUNNING:
            self._wanting.put(sequence, sequence.key)
        self._acquires_stale = True

    def step_failed(self, step_id: int, error: Exception, *, skipped: bool = False) -> None:
        """The oldest step in flight failed and committed nothing; ``skipped``: it was not run, because the one before
        it failed. Its sequences go back to the queue and start anew from their committed tokens.

        A step that was too large for the device's memory accuses none of them: the next ones are half as large."""
        step = self._answered(step_id)
        self._unanswered(step)
        if skipped:
            self._to_forget.extend(step.plan.ended)  # a step that was run has forgotten them, even if it failed then
        else:
            self._step_raised(step, error)
        for sequence in step.sequences:
            self._settle(sequence)

    def _step_raised(self, step: _InFlightStep, error: Exception) -> None:
        self._failed_steps += 1
        self._epoch += 1
        for doomed in (step, *self._steps):  # the runner will skip what was dispatched meanwhile
            self._doom(doomed)
        if isinstance(error, MemoryError) and self._divisible(step):
            self._step_size.too_large(step.plan.tokens)
            self._actions.append(Shrink(self._step_size.budget))
            return
        self._quarantine.step_failed(tuple(sequence.request.id for sequence in step.sequences))
        for sequence in step.sequences:
            self._suspect(sequence, error)

    def _divisible(self, step: _InFlightStep) -> bool:
        """Whether less could be fed at once."""
        return len(step.sequences) > 1 if self.limits.whole_prompts else step.plan.tokens > 1

    def _doom(self, step: _InFlightStep) -> None:
        """The step will not be run: nobody may join what it should have written, nor go on from where it leads."""
        for write in step.plan.cross_writes:
            self._slots.write_failed(write.key, write.slot)
        for sequence in step.sequences:
            self._leave(sequence)

    def _suspect(self, sequence: Sequence, error: Exception) -> None:
        request_id = sequence.request.id
        if sequence.ended:
            self._quarantine.clear(request_id)
            return
        self._actions.append(Suspect(request_id))
        steps = 1 if self.limits.whole_prompts else -(-len(sequence.tokens) // self._step_size.budget)
        poison = self._quarantine.poison(request_id, error, steps=steps)
        if poison is not None:
            self._end(sequence, Fail(request_id, poison))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """What has to be told since the last call, in order."""
        if self._acquires_stale:
            self._acquires_stale = False
            self._acquire_next()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_step(self) -> StepPlan | None:
        """The next step to dispatch, or ``None`` where there is nothing to do or enough is in flight."""
        while len(self._steps) < self.limits.steps_in_flight:
            draft = self._draft_step()
            self._move(draft)
            if draft.parts or (self._to_forget and not self._steps):  # else nobody tells the executor to forget
                return self._dispatch(draft)
            if not draft.preempted:
                return None
        return None

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is here and no step is in flight."""
        return not self._sequences and not self._steps

    def has(self, request_id: str) -> bool:
        """Whether the request is here and has not ended."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and not sequence.ended

    def requests_of(self, step_id: int) -> tuple[str, ...]:
        """Ids of the requests that a step in flight runs."""
        return tuple([sequence.request.id for sequence in self._step(step_id).sequences])

    def reads_of(self, step_id: int) -> tuple[Hold, ...]:
        """The encoder outputs that a step in flight reads, and their holders."""
        return self._step(step_id).reads

    def _step(self, step_id: int) -> _InFlightStep:
        return next(step for step in self._steps if step.plan.step_id == step_id)

    def statistics(self) -> PlannerStatistics:
        """A snapshot."""
        return PlannerStatistics(
            waiting=len(self._waiting),
            running=len(self._running),
            leaving=len(self._leaving),
            steps_in_flight=len(self._steps),
            pages=self.limits.pages,
            pages_free=self._pages.free,
            pages_cached=self._pages.cached,
            cross_slots=self.limits.cross_slots,
            cross_slots_used=self._slots.used,
            cross_slots_idle=self._slots.idle,
            cross_written=self._cross_written,
            cross_shared=self._cross_shared,
            steps=self._next_step_id,
            tokens_fed=self._tokens_fed,
            tokens_cached=self._tokens_cached,
            tokens_drafted=self._tokens_drafted,
            tokens_accepted=self._tokens_accepted,
            tokens_committed=self._tokens_committed,
            preemptions=self._preemptions,
            failed_steps=self._failed_steps,
            step_tokens=self._step_size.budget,
        )

    # -- drafting a step: nothing changes here -----------------------------------------------------------------------

    def _draft_step(self) -> StepDraft:
        """Suspects run in steps of their own; where none of them can run, everybody else does."""
        lost: dict[Sequence, None] = {}
        for only in (*self._turns(), None):
            draft = StepDraft(
                tokens=self._step_size.budget,
                pages=self._pages.free,
                slots=self._slots.available,
                places=self.limits.max_running - len(self._running) - len(self._leaving),
                lost=lost,
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
            if draft.parts:
                break
        return draft

    def _turns(self) -> Iterable[frozenset[str]]:
        if not self._quarantine:
            return ()
        suspects = [self._sequences[request_id] for request_id in self._quarantine]
        may_run = [s for s in suspects if s.phase is Phase.RUNNING or s in self._ready]
        return self._quarantine.turns(s.request.id for s in sorted(may_run, key=_key))

    def _eligible(self, only: frozenset[str] | None) -> tuple[list[Sequence], Iterable[Sequence]]:
        """Whom a step may run, of those that run and of those that are ready: ``only`` these, or all but suspects."""
        if only is not None:
            chosen = sorted((self._sequences[request_id] for request_id in only), key=_key)
            running = [sequence for sequence in chosen if sequence.phase is Phase.RUNNING]
            return running, [sequence for sequence in chosen if sequence.phase is Phase.WAITING]
        if not self._quarantine:
            return self._running, self._ready
        free = [sequence for sequence in self._running if sequence.request.id not in self._quarantine]
        return free, (sequence for sequence in self._ready if sequence.request.id not in self._quarantine)

    def _split(self, running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those that want one token and need no item for it, and those that read their prompt. A sequence with draft
        tokens in flight wants nothing: how many it will have sampled is not known."""
        decoding, reading = [], []
        for sequence in running:
            known = len(sequence.tokens) + sequence.sampling
            wanted = known - sequence.dispatched
            if wanted < 1 or known >= sequence.limit or sequence.drafting:
                continue
            if wanted == 1 and sequence.dispatched >= sequence.placed.stop:
                decoding.append(sequence)
            else:
                reading.append(sequence)
        return decoding, reading

    def _give_way(self, draft: StepDraft) -> None:
        """A waiting sequence that lacks nothing but room has that of running ones that are less urgent and come later:
        of the last ones first, of as few as will do, and of none where all of them together would not do."""
        urgent = self._ready.first()
        if urgent is None or self._leaving or not self._running or self._is_blocked(urgent):
            return
        if not _yields(self._running[-1], urgent) or not self._has_what_it_needs(urgent):
            return
        room = evolve(draft, starts={}, joined=set(), slot_keys=set())
        victims: list[Sequence] = []
        while not self._fits(room, urgent, self._cached_pages(urgent), without=victims):
            victim = self._running[-1 - len(victims)] if len(victims) < len(self._running) else None
            if victim is None or not _yields(victim, urgent):
                return
            victims.append(victim)
            room.places += 1
            room.pages += self._pages.exclusive(victim.pages)
            room.slots += victim.cross_item is not None and self._slots.has_one_user(victim.cross_item.key)
        for victim in victims:
            draft.preempt(victim, self._pages.exclusive(victim.pages))

    def _decode(self, draft: StepDraft, decoding: list[Sequence]) -> None:
        """One token for each; where a step may not feed as many, for those that have waited longest."""
        if len(decoding) > draft.tokens:
            longest = sorted(decoding, key=lambda sequence: sequence.last_step)[: draft.tokens]
            decoding = sorted(longest, key=_key)
        page_size = self.limits.page_size
        for sequence in decoding:
            start = sequence.dispatched
            pages = 0 if start < len(sequence.pages) * page_size else self._pages_for(start + 1) - len(sequence.pages)
            if sequence in draft.settled or (pages > draft.pages and not self._make_room(draft, sequence, pages)):
                continue
            draft.add(Part(sequence, start, 1, 1, pages))

    def _make_room(self, draft: StepDraft, wanting: Sequence, pages: int) -> bool:
        """Whether ``pages`` are left once the latest running sequences, perhaps ``wanting`` itself, have given way."""
        while draft.pages < pages:
            if self._leaving or draft.awaits:
                return False  # pages are on their way back already
            victim = next(sequence for sequence in reversed(self._running) if sequence not in draft.settled)
            alone = victim is wanting and len(self._running) == 1
            assert not alone, "one sequence alone does not fit the pages"
            draft.preempt(victim, self._pages.exclusive(victim.pages))
            if victim is wanting:
                return False
        return True

    def _read_on(self, draft: StepDraft, reading: list[Sequence]) -> None:
        """What decoding leaves of the step's tokens goes to the prompts that are being read, half of it to the first
        one, half of the rest to the next one, and so on. They have had all their pages since they started."""
        for index, sequence in enumerate(reading):
            if draft.tokens <= 0:
                return
            wanted = self._wanted(sequence, sequence.dispatched)
            others = index + 1 < len(reading) or bool(self._ready)
            length = draft.share(wanted, self.limits.page_size, others=others)
            if length > 0 and sequence not in draft.settled:
                draft.add(Part(sequence, sequence.dispatched, length, wanted))

    def _wanted(self, sequence: Sequence, start: int) -> int:
        """Tokens that could be fed from ``start`` on: up to the first item that the sequence does not hold."""
        stop = sequence.known
        if start < sequence.placed.stop:
            reach = sequence.placed.reach(start, self._holds.held(sequence))
            stop = stop if reach is None else min(stop, reach)
        return stop - start

    def _admit(self, draft: StepDraft, ready: Iterable[Sequence]) -> None:
        """Those that wait and lack nothing but room start, in order: nobody while one before it waits for room, nor in
        a step that had to preempt. Who starts is part of that very step: a step that fails starts it anew."""
        if draft.preempted:
            return
        for sequence in ready:
            if draft.tokens <= 0 or draft.work > _MOST_WORK or self._is_blocked(sequence):
                return
            if not self._has_what_it_needs(sequence):
                draft.lost[sequence] = None
                continue
            if not self._try_admit(draft, sequence):
                return

    def _try_admit(self, draft: StepDraft, sequence: Sequence) -> bool:
        computed = len(sequence.page_keys)
        cached = self._cached_pages(sequence)
        draft.work += 1 + len(cached) + _KEY_WORK * (len(sequence.page_keys) - computed)
        start = len(cached) * self.limits.page_size
        wanted = self._wanted(sequence, start)
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
        unused = [page for page in cached if page not in draft.joined]
        draft.pages -= self._pages.unused(unused)
        draft.joined.update(cached)
        draft.places -= 1
        draft.starts[sequence] = cached
        draft.add(Part(sequence, start, length, wanted, self._pages_for(len(sequence.tokens)) - len(cached)))
        return True

    def _first_share(self, draft: StepDraft, wanted: int) -> int:
        """The length of a newcomer's first chunk; 0: it had better wait for a step with more to give. A prompt that
        cannot be divided runs alone where it is long."""
        if self.limits.whole_prompts:
            return wanted if wanted <= draft.tokens or not draft.parts else 0
        length = draft.share(wanted, self.limits.page_size, others=len(self._ready) > len(draft.starts) + 1)
        return 0 if length < min(wanted, self.limits.page_size) and draft.parts else length

    def _fits(
        self, draft: StepDraft, sequence: Sequence, cached: tuple[int, ...], without: Iterable[Sequence] = ()
    ) -> bool:
        """Whether there is a place, a slot, pages for all tokens of ``sequence``, and some for those to come: for its
        own, and for those of whoever runs beside it, except ``without``."""
        item = sequence.cross_item
        if draft.places < 1 or (item is not None and draft.slots < self._slots_taken(draft, item)):
            return False
        unused = self._pages.unused(page for page in cached if page not in draft.joined)
        needed = self._pages_for(len(sequence.tokens)) - len(cached) + unused
        if needed > draft.pages or not (self._running or draft.starts) or self.limits.whole_prompts:
            return needed <= draft.pages
        steps = self.limits.headroom * self.limits.page_size + len(sequence.tokens) // self._step_size.budget
        beside = sum(self._growth(other, steps) for other in (*self._running, *draft.starts) if other not in without)
        return needed + self._growth(sequence, steps) + beside <= draft.pages

    def _growth(self, sequence: Sequence, tokens: int) -> int:
        """Pages that it will take for its next ``tokens`` tokens."""
        has = max(len(sequence.pages), self._pages_for(len(sequence.tokens)))
        return max(0, self._pages_for(min(sequence.known + tokens, sequence.limit)) - has)

    def _slots_taken(self, draft: StepDraft, item: EncoderItem) -> int:
        """Slots that a start with ``item`` takes from those that are left: none where its cross KV is in use."""
        if item.key in draft.slot_keys:
            return 0
        return not self._slots.resident(item.key) or self._slots.is_idle(item.key)

    def _has_what_it_needs(self, sequence: Sequence) -> bool:
        """Whether what made it ready is there still: its cross KV may have lost its slot, and the cached pages that
        covered some of its items may have been taken."""
        item = sequence.cross_item
        if item is not None:
            return self._slots.resident(item.key) or self._holds.holds_all(sequence)
        if not sequence.placed:
            return True
        first = next(sequence.placed.needed(len(self._cached_pages(sequence)) * self.limits.page_size), None)
        return first is None or first.key in self._holds.held(sequence)

    def _fill_up(self, draft: StepDraft) -> None:
        """Tokens that nobody has taken go to the prompts that wanted more than their share."""
        for part in draft.parts:
            if draft.tokens <= 0:
                return
            if part.wanted > part.length:
                more = min(part.wanted - part.length, draft.tokens)
                part.length += more
                draft.tokens -= more

    def _propose(self, draft: StepDraft) -> None:
        """Draft tokens, from what is left when everybody has what it wants: they cost nobody a token or a page."""
        if not self.limits.draft_tokens:
            return
        for part in draft.parts:
            sequence = part.sequence
            if draft.tokens <= 0:
                return
            if not part.samples or sequence.request.id in self._quarantine or sequence.request.pooling is not None:
                continue
            most = min(self.limits.draft_tokens, sequence.left - 1, draft.tokens)
            had = part.pages + (len(draft.starts[sequence]) if sequence in draft.starts else len(sequence.pages))
            pages = min(max(0, self._pages_for(part.stop + most) - had), draft.pages)
            part.draft_tokens = max(0, min(most, (had + pages) * self.limits.page_size - part.stop))
            part.pages += pages
            draft.pages -= pages
            draft.tokens -= part.draft_tokens

    def _cached_pages(self, sequence: Sequence) -> tuple[int, ...]:
        """The pages that hold the beginning of its tokens already."""
        if not self.limits.prefix_caching or sequence.shuns_cache:
            return ()
        return self._pages.find(sequence.page_keys.upto(sequence.tokens, sequence.most_cached()))

    def _pages_for(self, positions: int) -> int:
        return 0 if self.limits.whole_prompts else -(-positions // self.limits.page_size)

    def _is_blocked(self, sequence: Sequence) -> bool:
        """Whether it has found no room, and none has come since."""
        return self._blocked == (sequence.request.id, self._room_came)

    # -- committing it -----------------------------------------------------------------------------------------------

    def _move(self, draft: StepDraft) -> None:
        """Those that must leave their places do, and who found no room is remembered."""
        for victim in draft.preempted:
            self._preemptions += 1
            self._actions.append(Preempt(victim.request.id))
            self._leave(victim)
        for sequence in draft.lost:
            sequence.shuns_cache = bool(sequence.placed and self._holds.keys(sequence))
            self._look_again(sequence)
        if draft.blocked is not None:
            self._blocked = (draft.blocked.request.id, self._room_came)

    def _dispatch(self, draft: StepDraft) -> StepPlan:
        written, reads = self._start(draft)
        chunks = [self._chunk(part) for part in draft.parts]
        reads += [hold for part in draft.parts for hold in self._reads(part)]
        plan = StepPlan(
            step_id=self._next_step_id,
            epoch=self._epoch,
            started=tuple([_sequence_start(sequence) for sequence in draft.starts]),
            ended=tuple(self._to_forget),
            cross_writes=tuple(map(_cross_write, written)),
            chunks=tuple(chunks),
        )
        self._next_step_id += 1
        self._to_forget = []
        self._tokens_fed += plan.tokens
        sequences = tuple([part.sequence for part in draft.parts])
        self._steps.append(_InFlightStep(plan, sequences, tuple(written), tuple(reads)))
        return plan

    def _start(self, draft: StepDraft) -> tuple[list[Sequence], list[Hold]]:
        """Those that start have their places; which of them write cross KV, and the encoder outputs that they read."""
        for sequence, cached in draft.starts.items():  # what is there is joined before anything new may take its place
            self._pages.join(cached)
            sequence.pages = cached
            if sequence.cross_item is not None and self._slots.resident(sequence.cross_item.key):
                sequence.slot = self._slots.join(sequence.cross_item.key)
        written, reads = [], []
        for sequence, cached in draft.starts.items():
            self._begin(sequence, len(cached))
            item = sequence.cross_item
            if item is None:
                self._items_read(sequence)
            elif self._find_slot(sequence, item):
                written.append(sequence)
                reads.append(Hold(self._holds.holder(sequence, item.key), item.key))
        return written, reads

    def _begin(self, sequence: Sequence, cached: int) -> None:
        for queue in (self._waiting, self._ready, self._ahead):
            queue.discard(sequence)
        insort(self._running, sequence, key=_key)
        self._acquires_stale = True
        sequence.phase = Phase.RUNNING
        sequence.id = self._next_sequence_id
        self._next_sequence_id += 1
        sequence.dispatched = sequence.fed = cached * self.limits.page_size
        sequence.listed = cached
        sequence.shuns_cache = False
        self._tokens_cached += sequence.fed
        self._actions.append(Start(sequence.request.id))

    def _find_slot(self, sequence: Sequence, item: EncoderItem) -> bool:
        """Whether the step must write the sequence's cross KV. One that is there needs no encoder output."""
        if sequence.slot is None and self._slots.resident(item.key):  # another one that starts now writes it
            sequence.slot = self._slots.join(item.key)
        if sequence.slot is not None:
            self._cross_shared += 1
            self._release(sequence)
            return False
        assert self._holds.holds_all(sequence), f"{sequence.request.id} would write cross KV from nothing that it holds"
        sequence.slot = self._slots.take(item.key)
        return True

    def _chunk(self, part: Part) -> Chunk:
        sequence, samples = part.sequence, part.samples
        if part.pages:
            pages = self._pages.try_take(part.pages)
            assert pages is not None, "a step was drafted with pages that are not there"
            sequence.pages += pages
        assert sequence.id is not None, "a running sequence has an id"
        sequence.dispatched = part.start + part.length
        sequence.sampling += samples
        sequence.in_flight += 1
        sequence.last_step = self._next_step_id
        if part.draft_tokens:
            sequence.drafting += 1
            self._tokens_drafted += part.draft_tokens
        return Chunk(
            sequence_id=sequence.id,
            start=part.start,
            length=part.length,
            block_table=sequence.pages,
            cross_slot=sequence.slot,
            samples=samples,
            draft_tokens=part.draft_tokens,
        )

    def _reads(self, part: Part) -> Iterator[Hold]:
        """The placed encoder outputs that a part of a step reads."""
        if part.start < part.sequence.placed.stop:
            for key in part.sequence.placed.touched(part.start, part.stop):
                yield Hold(self._holds.holder(part.sequence, key), key)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answered(self, step_id: int) -> _InFlightStep:
        assert self._steps, f"step {step_id} was answered, but none is in flight"
        step = self._steps.popleft()
        assert step.plan.step_id == step_id, f"step {step_id} was answered before step {step.plan.step_id}"
        return step

    def _unanswered(self, step: _InFlightStep) -> None:
        """Nothing comes of the step any more."""
        for sequence, chunk in zip(step.sequences, step.plan.chunks, strict=True):
            sequence.in_flight -= 1
            sequence.sampling -= chunk.samples
            sequence.drafting -= chunk.draft_tokens > 0

    def _commit_tokens(self, sequence: Sequence, sampled: SampledToken, *, samples: bool) -> None:
        """All tokens that the chunk gave, up to one that ends the request."""
        request = sequence.request
        all_of_them = (evolve(sampled, accepted=()), *sampled.accepted) if sampled.accepted else (sampled,)
        if not samples:
            self._actions.append(Commit(request.id, all_of_them))
            return
        if request.pooling is not None:
            assert sampled.vector is not None, "a chunk that pools must answer with a vector"
            self._actions.append(Commit(request.id, all_of_them))
            self._end(sequence, Finish(request.id, FinishReason.POOLED))
            return
        before, reason = len(sequence.tokens), None
        for one in all_of_them:
            assert one.token_id is not None, "a chunk that samples must answer with a token"
            sequence.tokens.append(one.token_id)
            reason = self._ends(sequence, one.token_id)
            if reason is not None:
                break
        count = len(sequence.tokens) - before
        self._tokens_committed += count
        self._actions.append(Commit(request.id, all_of_them[:count]))
        if reason is not None:
            self._end(sequence, Finish(request.id, reason))

    def _ends(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why ``token_id``, its latest token, ends the request."""
        sampling = sequence.request.sampling
        if token_id in self.limits.eos_token_ids and not sampling.ignore_eos:
            return FinishReason.STOP
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sequence.tokens) >= sequence.limit else None

    def _list_pages(self, sequence: Sequence) -> None:
        """What answered steps have written may be found by others."""
        full = min(sequence.fed, len(sequence.tokens)) // self.limits.page_size
        keys = sequence.page_keys.upto(sequence.tokens, full, first=sequence.listed)
        for page, key in zip(sequence.pages[sequence.listed : full], keys, strict=True):
            self._pages.list_as(page, key)
        sequence.listed = max(full, sequence.listed)

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, end: Finish | Fail | Abort) -> None:
        assert not sequence.ended, f"request {sequence.request.id} would end twice"
        sequence.ended = True
        self._quarantine.clear(sequence.request.id)
        self._actions.append(end)
        if sequence.phase is Phase.WAITING:
            self._dequeue(sequence)
            self._release(sequence)
            del self._sequences[sequence.request.id]
        self._leave(sequence)

    def _dequeue(self, sequence: Sequence) -> None:
        for queue in (self._waiting, self._ready, self._seeking, self._ahead):
            queue.discard(sequence)
        self._acquires_stale = True

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence has no further chunks; it is settled as soon as no step in flight mentions it."""
        if sequence.phase is Phase.RUNNING:
            sequence.phase = Phase.LEAVING
            self._running.remove(sequence)
            self._wanting.discard(sequence)
            self._leaving[sequence.request.id] = sequence
        if sequence.phase is Phase.LEAVING:
            self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """A leaving sequence that no step mentions gives everything back; it is then gone, or waits to start anew."""
        if sequence.in_flight or self._leaving.pop(sequence.request.id, None) is None:
            return
        self._room_came += 1
        self._pages.give_back(sequence.pages)
        if sequence.slot is not None and sequence.cross_item is not None:
            self._slots.leave(sequence.cross_item.key, sequence.slot)
        if sequence.id is not None:
            self._to_forget.append(sequence.id)
        sequence.rewind()
        if sequence.ended or sequence.placed:
            self._release(sequence)
        if sequence.ended:
            del self._sequences[sequence.request.id]
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self._waiting.put(sequence, sequence.key)
        self._look_again(sequence)

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def _look_again(self, sequence: Sequence) -> None:
        """Whether a waiting sequence lacks nothing but room. One that has acquired keeps that, except placed items,
        of which it may need others now."""
        if not sequence.request.items:
            self._ready.put(sequence, sequence.key)
            return
        if sequence.placed:
            self._release(sequence)
        holds, ready = bool(self._holds.keys(sequence)), self._holds.holds_all(sequence)
        _put(self._ahead, sequence, member=holds)
        _put(self._seeking, sequence, member=not holds)
        _put(self._ready, sequence, member=ready)
        self._acquires_stale = True

    def _acquire_next(self) -> None:
        """Running sequences acquire their next items, and those at the head of the queue what they need to start, in
        order and as far as there is room; for an earlier one the latest that wait give up theirs."""
        while (sequence := self._wanting.first()) is not None:
            if not self._try_acquire(sequence, sequence.fed):
                return
            self._wanting.discard(sequence)
        while (sequence := self._seeking.first()) is not None:
            last = self._ahead.last()
            if last is not None and len(self._ahead) >= self.limits.acquire_ahead and last.key < sequence.key:
                return
            if not self._try_acquire(sequence, len(self._cached_pages(sequence)) * self.limits.page_size):
                return
            self._seeking.discard(sequence)

    def _try_acquire(self, sequence: Sequence, start: int) -> bool:
        """Acquires what ``sequence`` needs to go on from position ``start``; one that waits and needs nothing is
        ready."""
        item = sequence.cross_item
        if item is None:
            items = self._holds.group(sequence.placed.needed(start))
        else:
            items = [] if self._slots.resident(item.key) else [item]
        while not self._holds.fits(items):
            if not self._withdraw_for(sequence):
                return False
        if items:
            self._holds.acquire(sequence, items)
        if sequence.phase is Phase.WAITING:
            (self._ahead if items else self._ready).put(sequence, sequence.key)
        return True

    def _withdraw_for(self, sequence: Sequence) -> bool:
        """The last one that has acquired and waits gives that up, if ``sequence`` runs or comes before it."""
        last = self._ahead.last()
        if last is None or (sequence.phase is Phase.WAITING and last.key < sequence.key):
            return False
        self._holds.release_all(last)
        self._ahead.discard(last)
        self._ready.discard(last)
        self._seeking.put(last, last.key)
        return True

    def _release(self, sequence: Sequence) -> None:
        if self._holds.keys(sequence):
            self._holds.release_all(sequence)
            self._acquires_stale = True


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key


def _put(queue: Ordered[Sequence], sequence: Sequence, *, member: bool) -> None:
    if member:
        queue.put(sequence, sequence.key)
    else:
        queue.discard(sequence)


def _yields(running: Sequence, urgent: Sequence) -> bool:
    """Whether ``running`` gives way to ``urgent``: its priority is less urgent, and it comes later."""
    return running.request.priority > urgent.request.priority and running.key > urgent.key


def _sequence_start(sequence: Sequence) -> SequenceStart:
    request = sequence.request
    assert sequence.id is not None, "a sequence that starts has an id"
    return SequenceStart(
        sequence_id=sequence.id,
        token_ids=tuple(sequence.tokens),
        prompt_length=len(request.prompt_token_ids),
        sampling=request.sampling,
        rules=request.rules,
        probe=request.probe,
        placements=sequence.placed.placements,
        pooling=request.pooling,
    )


def _cross_write(sequence: Sequence) -> CrossWrite:
    assert sequence.cross_item is not None, "who writes cross KV has an item for it"
    assert sequence.slot is not None, "who writes cross KV has a slot for it"
    return CrossWrite(key=sequence.cross_item.key, slot=sequence.slot)


def _too_large(size: int, capacity: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"an encoder output of {size} bytes cannot fit the encoder cache; allowed: up to {capacity} bytes; raise "
        f"EngineConfig(encoder_cache_bytes=...) to {size} or more"
    )


def _one_more(error: RunnerCrashed) -> RunnerCrashed:
    """One for each request: two tasks must not raise the same object."""
    failure = RunnerCrashed(str(error))
    failure.__cause__ = error.__cause__
    return failure
