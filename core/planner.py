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

Pages that answered steps have filled are found by their content (`triolet.core.prefix`) while they keep their place, so
a sequence starts behind the longest beginning that is there already.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from attrs import define, evolve, field

from .actions import Abort, Action, Commit, Fail, Finish
from .asks import Asks
from .blame import Blame
from .errors import RunnerCrashed
from .ledger import Hold
from .limits import PlannerLimits
from .pages import CrossSlots, PageAllocator
from .plan import Chunk, CrossWrite, SampledToken, SequenceStart, StepPlan, StepResult
from .request import EncoderItem, FinishReason, Request
from .sequence import Phase, Sequence
from .statistics import PlannerStatistics
from .step_size import StepSize


@define(eq=False)
class _Flight:
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
    _waiting: list[Sequence] = field(factory=list, init=False)  # in the order they start
    _active: dict[str, Sequence] = field(factory=dict, init=False)  # those that run or leave: all the others
    _flights: deque[_Flight] = field(factory=deque, init=False)
    _actions: list[Action] = field(factory=list, init=False)
    _asks: Asks = field(init=False)
    _to_forget: list[int] = field(factory=list, init=False)  # executor records to drop with the next step
    _next_arrival: int = field(default=0, init=False)
    _next_sequence_id: int = field(default=0, init=False)
    _next_step_id: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _cross_written: int = field(default=0, init=False)
    _cross_shared: int = field(default=0, init=False)
    _tokens_fed: int = field(default=0, init=False)
    _tokens_cached: int = field(default=0, init=False)
    _tokens_drafted: int = field(default=0, init=False)
    _tokens_accepted: int = field(default=0, init=False)
    _tokens_committed: int = field(default=0, init=False)
    _preemptions: int = field(default=0, init=False)
    _failed_steps: int = field(default=0, init=False)
    _step_size: StepSize = field(init=False)
    _blame: Blame = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._step_size = StepSize(self.limits.max_step_tokens)
        self._blame = Blame(self.limits.crashes_alone)
        self._asks = Asks(self.limits.encoder_cache_bytes, self._actions)
        self._pages = PageAllocator(self.limits.pages)
        self._slots = CrossSlots(self.limits.cross_slots)

    # -- facts -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A new request joins the queue. Its values were checked by the caller."""
        assert request.id not in self._sequences, f"request {request.id} was submitted twice"
        sequence = Sequence.of(
            request, self._next_arrival, page_size=self.limits.page_size, identity=self.limits.identity
        )
        self._next_arrival += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)

    def encoder_ready(self, holder: str) -> None:
        """``holder`` may read its encoder output. An unknown holder has withdrawn meanwhile."""
        self._asks.ready(holder)

    def encoder_refused(self, holder: str, error: Exception) -> None:
        """The encoder cache will not give the output: the request fails. An unknown holder has withdrawn meanwhile."""
        sequence = self._asks.refused(holder)
        if sequence is not None and not sequence.ended:
            self._end(sequence, Fail(sequence.request.id, error))

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
        self._flights.clear()
        for sequence in list(self._sequences.values()):
            sequence.in_flight = 0
            if sequence.ended:
                self._give_back(sequence)
            else:
                failure = RunnerCrashed(str(error))  # one for each: two tasks must not raise the same object
                failure.__cause__ = error.__cause__
                self._end(sequence, Fail(sequence.request.id, failure))

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """No device will be there for them: every request that is here fails, each with an error of its own."""
        for sequence in list(self._sequences.values()):
            if not sequence.ended:
                self._end(sequence, Fail(sequence.request.id, make_error()))

    def generation_lost(self) -> None:
        """The runner has started anew: no step is in flight, no cross KV is written, no encoder output is there. Who
        ran starts anew from its committed tokens; who held an entry waits for it, as its ask still stands."""
        self._epoch += 1
        for flight in self._flights:
            for sequence, part in zip(flight.sequences, flight.plan.chunks, strict=True):
                sequence.in_flight -= 1
                sequence.draws -= part.samples
        self._flights.clear()
        self._slots = CrossSlots(self.limits.cross_slots)
        self._pages.forget_contents()
        for sequence in list(self._sequences.values()):
            sequence.id = sequence.slot = None
            for ask in sequence.asks.values():
                ask.held = False
            if sequence.phase is Phase.RUNNING:
                sequence.phase = Phase.LEAVING
            self._settle(sequence)
        self._to_forget.clear()

    def step_done(self, result: StepResult) -> None:
        """The oldest step in flight has been run."""
        flight = self._answered(result.step_id)
        assert len(result.sampled) == len(flight.sequences), "a step result must answer every chunk"
        self._blame.step_done()
        self._step_size.step_done()
        for sequence in flight.writes:
            self._cross_written += 1
            self._asks.release_all(sequence)
        for sequence, part, sampled in zip(flight.sequences, flight.plan.chunks, result.sampled, strict=True):
            self._slice_done(sequence, part, sampled)

    def _slice_done(self, sequence: Sequence, part: Chunk, sampled: SampledToken) -> None:
        sequence.draws -= part.samples
        self._tokens_accepted += len(sampled.accepted)
        sequence.fed = part.start + part.length + len(sampled.accepted)
        sequence.dispatched += len(sampled.accepted)
        if part.samples:  # a chunk that goes well says nothing of the chunks to come
            self._blame.clear(sequence)
        if not sequence.ended and (part.samples or sampled.probe is not None):
            self._commit(sequence, sampled, part.samples)
        self._list_pages(sequence)
        self._asks.release_read(sequence)
        sequence.in_flight -= 1  # only now what has ended gives back its pages
        self._settle(sequence)

    def step_failed(self, step_id: int, error: Exception, *, skipped: bool = False) -> None:
        """The oldest step in flight failed and committed nothing; ``skipped``: it was not run, because the one before
        it failed. Its sequences go back to the queue and start anew from their committed tokens.

        A step that was too large for the device's memory accuses none of them: the next ones are half as large."""
        flight = self._answered(step_id)
        too_large = not skipped and isinstance(error, MemoryError) and self._divisible(flight)
        if too_large:
            self._step_size.too_large(flight.plan.tokens)
        if not (skipped or too_large):
            self._blame.step_failed(flight.sequences)
        if not skipped:
            self._failed_steps += 1
            self._epoch += 1
            for doomed in (flight, *self._flights):  # the runner will skip what was dispatched meanwhile
                self._doom(doomed)
        if skipped:  # a step that was run has forgotten them, even if it failed afterwards
            self._to_forget.extend(flight.plan.ended)
        for sequence, part in zip(flight.sequences, flight.plan.chunks, strict=True):
            sequence.in_flight -= 1
            sequence.draws -= part.samples
            if not (skipped or too_large):
                self._suspect(sequence, alone=len(flight.sequences) == 1, error=error)
            self._settle(sequence)

    def _divisible(self, flight: _Flight) -> bool:
        """Whether less could be fed at once."""
        return len(flight.sequences) > 1 if self.limits.whole_prompts else flight.plan.tokens > 1

    def _doom(self, flight: _Flight) -> None:
        """The step will not be run: nobody may join what it should have written, nor go on from where it leads."""
        for write in flight.plan.cross_writes:
            self._slots.write_failed(write.key, write.slot)
        for sequence in flight.sequences:
            if sequence.phase is Phase.RUNNING:
                sequence.phase = Phase.LEAVING

    # -- decisions ---------------------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """What has to be told since the last call, in order."""
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_step(self) -> StepPlan | None:
        """The next step to dispatch, or ``None`` where there is nothing to do or enough is in flight."""
        if len(self._flights) >= self.limits.steps_in_flight:
            return None
        for suspects in self._suspects():
            draft = self._plan(suspects)
            if draft.chunks:
                return self._dispatch(draft)
        draft = self._plan(sequence for sequence in self._candidates() if not sequence.suspicion)
        if draft.chunks or self._nothing_but_forgetting():
            return self._dispatch(draft)
        return None

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """No request is here and no step is in flight."""
        return not self._sequences and not self._flights

    def requests_of(self, step_id: int) -> tuple[str, ...]:
        """Ids of the requests that a step in flight runs."""
        return tuple(sequence.request.id for sequence in self._flight(step_id).sequences)

    def reads_of(self, step_id: int) -> tuple[Hold, ...]:
        """The encoder outputs that a step in flight reads, and their holders."""
        return self._flight(step_id).reads

    def _flight(self, step_id: int) -> _Flight:
        return next(flight for flight in self._flights if flight.plan.step_id == step_id)

    def statistics(self) -> PlannerStatistics:
        """A snapshot."""
        phases = [sequence.phase for sequence in self._sequences.values()]
        return PlannerStatistics(
            waiting=phases.count(Phase.WAITING),
            running=phases.count(Phase.RUNNING),
            leaving=phases.count(Phase.LEAVING),
            steps_in_flight=len(self._flights),
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
            step_tokens=self._step_size.tokens,
        )

    # -- choosing ----------------------------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Sequence]:
        """Who may have a chunk: running ones first, then startable ones, each by (priority, arrival)."""
        running = [s for s in self._active.values() if s.phase is Phase.RUNNING]
        return chain(sorted(running, key=lambda s: s.order), self._startable())

    def _suspects(self) -> Iterator[list[Sequence]]:
        """Groups of suspects, of which the first that has something to run does so in a step of its own."""
        if any(sequence.suspicion for sequence in self._sequences.values()):
            yield from self._blame.halves(list(self._candidates()))

    def _startable(self) -> Iterator[Sequence]:
        """Waiting sequences that need nothing but room, in order; none while no place is free. They are looked for one
        by one: thousands may wait, and few of them start in one step."""
        stalled = self._stalled()
        if stalled:  # a running one waits: nobody who only waits for room may have what it needs
            for sequence in self._waiting:
                self._asks.release_all(sequence)
        if len(self._active) >= self.limits.max_running:
            return iter(())
        for sequence in () if stalled else self._waiting:
            self._ask(sequence)  # where it has lost what it needed no ask for
        return filter(self._needs_only_room, tuple(self._waiting))

    def _needs_only_room(self, sequence: Sequence) -> bool:
        item = sequence.cross_item
        if item is not None and self._slots.resident(item.key):
            return True
        return not sequence.waits_for_item and (item is None or bool(sequence.asks))

    def _plan(self, candidates: Iterable[Sequence]) -> _StepDraft:
        """Slices for ``candidates`` within the token budget. First come, first served: nobody starts while an earlier
        one waits for room, nor in a step that had to preempt."""
        draft = _StepDraft()
        budget = self._step_size.tokens
        for sequence in candidates:
            if budget <= 0:
                break
            if sequence.phase is Phase.WAITING and not self._has_what_it_needs(sequence):
                continue
            if sequence.phase is Phase.WAITING and (draft.preempted or not self._try_start(sequence, budget, draft)):
                break
            if sequence.phase is Phase.RUNNING:
                budget -= self._add_slice(sequence, budget, draft)
        return draft

    def _has_what_it_needs(self, sequence: Sequence) -> bool:
        """Whether that is still so: an earlier start of this very step may have taken the place of its cross KV, and
        the pages that covered its items may have been taken, or others have come to cover more of them. Then it asks
        again, for its first items together (who holds some must not wait for others), and once only: it starts without
        cached pages."""
        if sequence.cross_item is not None:
            return self._needs_only_room(sequence)
        if not sequence.placements or not self._missing(sequence):
            return True
        if self._stalled():
            return False  # it asks when no running one waits: else it would give up its ask and repeat it for ever
        if sequence.asks:
            sequence.shuns_cache = True
            self._asks.release_all(sequence)
        self._ask(sequence)
        return False

    def _try_start(self, sequence: Sequence, budget: int, draft: _StepDraft) -> bool:
        """Gives the sequence a place, a slot and pages for its first chunk (a suspect: for all its tokens), or
        nothing at all. It has a chunk in the very step that starts it: a step that fails starts it anew."""
        item = sequence.cross_item
        if self.limits.whole_prompts and draft.chunks and len(sequence.tokens) > budget:
            return False  # it cannot be divided: a long one runs alone
        if len(self._active) >= self.limits.max_running:
            return False
        if item is not None and not self._slots.resident(item.key) and not self._slots.available():
            return False
        if not self._try_take_first_pages(sequence):
            return False
        if item is not None:
            self._take_slot(sequence, item, draft)
        self._waiting.remove(sequence)
        self._active[sequence.request.id] = sequence
        sequence.phase = Phase.RUNNING
        sequence.id = self._next_sequence_id
        self._next_sequence_id += 1
        self._asks.release_read(sequence)
        request = sequence.request
        draft.started.append(
            SequenceStart(
                sequence_id=sequence.id,
                token_ids=tuple(sequence.tokens),
                prompt_length=len(request.prompt_token_ids),
                sampling=request.sampling,
                rules=request.rules,
                probe=request.probe,
                placements=sequence.placements,
                pooling=request.pooling,
            )
        )
        return True

    def _try_take_first_pages(self, sequence: Sequence) -> bool:
        """Cached pages as far as they go, and new ones behind them. A suspect runs before those that were here first:
        it must not run out of pages on its way to its next token, since it would have to give way to them, and they to
        it."""
        cached = self._cached_pages(sequence)
        start, known = len(cached) * self.limits.page_size, len(sequence.tokens)
        first = known if sequence.suspicion else min(known, start + self._step_size.tokens)
        self._pages.join(cached)
        pages = self._pages.try_take(self._pages_for(first) - len(cached))
        if pages is None:
            self._pages.give_back(cached)
            return False
        sequence.pages = [*cached, *pages]
        sequence.shuns_cache = False
        sequence.dispatched = sequence.fed = start
        sequence.listed = len(cached)
        self._tokens_cached += start
        return True

    def _cached_pages(self, sequence: Sequence) -> tuple[int, ...]:
        """The pages that hold the beginning of its tokens already."""
        if not self.limits.prefix_caching or sequence.shuns_cache:
            return ()
        return self._pages.find(sequence.keys.upto(sequence.tokens, sequence.most_cached()))

    def _pages_for(self, positions: int) -> int:
        return 0 if self.limits.whole_prompts else math.ceil(positions / self.limits.page_size)

    def _list_pages(self, sequence: Sequence) -> None:
        """What answered steps have written may be found by others."""
        if not self.limits.prefix_caching:
            return
        full = min(sequence.fed, len(sequence.tokens)) // self.limits.page_size
        if full <= sequence.listed:
            return
        keys = sequence.keys.upto(sequence.tokens, full, first=sequence.listed)
        for page, key in zip(sequence.pages[sequence.listed : full], keys, strict=True):
            self._pages.list_as(page, key)
        sequence.listed = full

    def _take_slot(self, sequence: Sequence, item: EncoderItem, draft: _StepDraft) -> None:
        if self._slots.resident(item.key):
            sequence.slot = self._slots.join(item.key)
            self._cross_shared += 1
            self._asks.release_all(sequence)
            return
        ask = sequence.asks.get(item.key)
        assert ask is not None, f"{sequence.request.id} would write cross KV from an output that it has not asked for"
        assert ask.held, f"{sequence.request.id} would write cross KV from an output that it does not hold"
        sequence.slot = self._slots.take(item.key)
        draft.cross_writes.append(CrossWrite(key=item.key, slot=sequence.slot))
        draft.writes.append(sequence)
        draft.reads.append(Hold(ask.holder, item.key))

    def _add_slice(self, sequence: Sequence, budget: int, draft: _StepDraft) -> int:
        """Adds the sequence's next chunk, within ``budget`` tokens; how many it took."""
        length = self._slice_length(sequence, budget)
        if length <= 0 or not self._try_grow(sequence, sequence.dispatched + length, draft):
            return 0
        assert sequence.id is not None, "a running sequence has an id"
        draw = sequence.dispatched + length == sequence.known
        guesses = self._guesses(sequence, length, budget - length) if draw else 0
        draft.chunks.append(
            Chunk(
                sequence_id=sequence.id,
                start=sequence.dispatched,
                length=length,
                block_table=tuple(sequence.pages),
                cross_slot=sequence.slot,
                samples=draw,
                draft_tokens=guesses,
            )
        )
        draft.sequences.append(sequence)
        draft.reads += self._reads(sequence, length)
        sequence.dispatched += length
        sequence.draws += draw
        sequence.in_flight += 1
        return length + guesses

    def _slice_length(self, sequence: Sequence, budget: int) -> int:
        """Tokens of its next chunk: none where it must wait for the steps in flight, or for an encoder output."""
        if sequence.left < 1 or (self.limits.draft_tokens and sequence.draws):
            return 0  # how many tokens a step with guesses will draw is not known before it is answered
        wanted = sequence.known - sequence.dispatched
        if self.limits.whole_prompts:
            return wanted
        return int(min(wanted, budget, sequence.reach(sequence.dispatched) - sequence.dispatched))

    def _guesses(self, sequence: Sequence, length: int, budget: int) -> int:
        """How many tokens may be guessed behind its next chunk. Guessing never costs anybody a page that is in use."""
        if sequence.suspicion or sequence.request.pooling is not None:
            return 0
        most = min(self.limits.draft_tokens, sequence.left - 1, budget)
        if most <= 0:
            return 0
        end = sequence.dispatched + length
        missing = self._pages_for(end + most) - len(sequence.pages)
        pages = self._pages.try_take(missing) if missing > 0 else ()
        if pages is None:
            most = min(most, len(sequence.pages) * self.limits.page_size - end)
        else:
            sequence.pages.extend(pages)
        self._tokens_drafted += most
        return most

    def _reads(self, sequence: Sequence, length: int) -> list[Hold]:
        """The encoder outputs that a chunk of ``length`` reads."""
        start, stop = sequence.dispatched, sequence.dispatched + length
        touched = dict.fromkeys(p.key for p in sequence.placements if p.touches(start, stop))
        return [Hold(sequence.asks[key].holder, key) for key in touched]

    def _try_grow(self, sequence: Sequence, positions: int, draft: _StepDraft) -> bool:
        """Pages for ``positions``; where none are left, the youngest running sequence gives way."""
        missing = self._pages_for(positions) - len(sequence.pages)
        while missing > 0:
            pages = self._pages.try_take(missing)
            if pages is not None:
                sequence.pages.extend(pages)
                return True
            if not self._preempt_one(sequence, draft):
                return False
        return True

    def _preempt_one(self, wanting: Sequence, draft: _StepDraft) -> bool:
        """Takes the youngest running sequence out. True where its pages came back at once."""
        if any(s.phase is Phase.LEAVING for s in self._active.values()):
            return False  # pages are on their way back already
        running = [s for s in self._active.values() if s not in draft.sequences]
        victim = max(running, key=lambda s: s.order)
        if victim is wanting and len(running) == 1 and not draft.sequences:
            raise AssertionError("one sequence alone does not fit the pages")
        self._preemptions += 1
        draft.preempted = True
        victim.phase = Phase.LEAVING
        freed = victim.in_flight == 0 and victim is not wanting
        self._settle(victim)
        return freed

    # -- dispatching -------------------------------------------------------------------------------------------------

    def _nothing_but_forgetting(self) -> bool:
        """The executor holds records of sequences that ended, and no other step will carry the news."""
        return bool(self._to_forget) and not self._flights

    def _dispatch(self, draft: _StepDraft) -> StepPlan:
        plan = StepPlan(
            step_id=self._next_step_id,
            epoch=self._epoch,
            started=tuple(draft.started),
            ended=tuple(self._to_forget),
            cross_writes=tuple(draft.cross_writes),
            chunks=tuple(draft.chunks),
        )
        self._next_step_id += 1
        self._to_forget = []
        self._tokens_fed += plan.tokens
        self._flights.append(_Flight(plan, tuple(draft.sequences), tuple(draft.writes), tuple(draft.reads)))
        return plan

    def _answered(self, step_id: int) -> _Flight:
        assert self._flights, f"step {step_id} was answered, but none is in flight"
        flight = self._flights.popleft()
        assert flight.plan.step_id == step_id, f"step {step_id} was answered before step {flight.plan.step_id}"
        return flight

    def _commit(self, sequence: Sequence, sampled: SampledToken, draw: bool) -> None:
        """All tokens that the chunk gave, up to one that ends the request."""
        for part in (evolve(sampled, accepted=()), *sampled.accepted):
            if not sequence.ended:
                self._commit_one(sequence, part, draw)

    def _commit_one(self, sequence: Sequence, sampled: SampledToken, draw: bool) -> None:
        request = sequence.request
        self._actions.append(Commit(request.id, sampled))
        if not draw:
            return
        if request.pooling is not None:
            assert sampled.vector is not None, "a chunk that pools must answer with a vector"
            self._end(sequence, Finish(request.id, FinishReason.POOLED))
            return
        assert sampled.token_id is not None, "a chunk that draws must answer with a token"
        sequence.tokens.append(sampled.token_id)
        self._tokens_committed += 1
        stops = request.sampling.stop_token_ids
        eos = sampled.token_id in self.limits.eos_token_ids and not request.sampling.ignore_eos
        if eos or sampled.token_id in stops:
            self._end(sequence, Finish(request.id, FinishReason.STOP))
        elif sequence.generated >= request.max_tokens:
            self._end(sequence, Finish(request.id, FinishReason.LENGTH))

    def _suspect(self, sequence: Sequence, *, alone: bool, error: Exception) -> None:
        steps = 1 if self.limits.whole_prompts else math.ceil(len(sequence.tokens) / self._step_size.tokens)
        poison = self._blame.accuse(sequence, error, alone=alone, steps=steps)
        if poison is not None:
            self._end(sequence, Fail(sequence.request.id, poison))

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, end: Finish | Fail | Abort) -> None:
        assert not sequence.ended, f"request {sequence.request.id} would end twice"
        sequence.ended = True
        self._blame.gone(sequence)
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        sequence.phase = Phase.LEAVING
        self._actions.append(end)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """A leaving sequence that no step mentions gives everything back; it is then gone, or waits to start anew."""
        if sequence.phase is not Phase.LEAVING or sequence.in_flight:
            return
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._active.pop(sequence.request.id, None)
        self._pages.give_back(sequence.pages)
        sequence.pages = []
        item = sequence.cross_item
        if sequence.slot is not None and item is not None:
            self._slots.leave(item.key, sequence.slot)
            sequence.slot = None
        if sequence.id is not None:
            self._to_forget.append(sequence.id)
            sequence.id = None
        if sequence.ended or item is None:
            self._asks.release_all(sequence)
        if sequence.ended:
            self._sequences.pop(sequence.request.id, None)
            return
        sequence.dispatched = sequence.fed = sequence.listed = sequence.draws = 0
        self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        insort(self._waiting, sequence, key=lambda s: s.order)
        if not self._stalled():
            self._ask(sequence)

    # -- encoder outputs ---------------------------------------------------------------------------------------------

    def _ask(self, sequence: Sequence) -> None:
        """Asks for what it needs to start, if it has asked for nothing."""
        if sequence.asks or not sequence.request.items:
            return
        item = sequence.cross_item
        if item is None:
            self._asks.ask_from(sequence, self._start_of(sequence))
        elif not self._slots.resident(item.key):
            self._asks.ask_for(sequence, item)

    def _stalled(self) -> bool:
        """Whether a running sequence waits for encoder outputs."""
        return any(s.phase is Phase.RUNNING and s.waits_for_item for s in self._active.values())

    def _start_of(self, sequence: Sequence) -> int:
        """The first position that it would have to feed if it started now."""
        return len(self._cached_pages(sequence)) * self.limits.page_size

    def _missing(self, sequence: Sequence) -> bool:
        """Whether it has not asked for what it must read first if it starts now."""
        first = next(iter(sequence.needed(self._start_of(sequence))), None)
        return first is not None and first.key not in sequence.asks


@define(eq=False)
class _StepDraft:
    """A step while it is being planned."""

    started: list[SequenceStart] = field(factory=list)
    cross_writes: list[CrossWrite] = field(factory=list)
    chunks: list[Chunk] = field(factory=list)
    sequences: list[Sequence] = field(factory=list)
    writes: list[Sequence] = field(factory=list)
    reads: list[Hold] = field(factory=list)
    preempted: bool = False
