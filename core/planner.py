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

`Room` keeps the books of places, pages and slots, `Acquirer` decides who acquires encoder outputs next, and `Acts`
drafts a step. Nothing changes before the draft is committed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from attrs import asdict, define, evolve, field

from .acquirer import Acquirer
from .actions import Abort, Action, Commit, Fail, Finish, Preempt, Shrink, Start, Suspect
from .acts import Acts
from .batch_size import BatchSize
from .draft import Part, StepDraft
from .errors import RunnerCrashed
from .holds import EncoderHolds
from .ledger import Hold, too_large
from .limits import PlannerLimits
from .ordered import Ordered
from .plan import Chunk, CrossWrite, SampledToken, SequenceStart, StepPlan, StepResult
from .quarantine import Quarantine
from .request import EncoderItem, FinishReason, Request
from .room import Room
from .sequence import Phase, Sequence
from .statistics import Counters, PlannerStatistics


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
    _sequences: dict[str, Sequence] = field(factory=dict, init=False)  # by request id
    _waiting: Ordered[Sequence] = field(factory=Ordered, init=False)
    _room: Room = field(init=False)
    _holds: EncoderHolds = field(init=False)
    _acquirer: Acquirer = field(init=False)
    _quarantine: Quarantine = field(init=False)
    _step_size: BatchSize = field(init=False)
    _acts: Acts = field(init=False)
    _steps: deque[_InFlightStep] = field(factory=deque, init=False)
    _actions: list[Action] = field(factory=list, init=False)
    _to_forget: list[int] = field(factory=list, init=False)  # executor records to drop with the next step
    _arrivals: int = field(default=0, init=False)
    _next_sequence_id: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _counters: Counters = field(factory=Counters, init=False)

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self._room = Room(limits)
        self._holds = EncoderHolds(limits.encoder_cache_bytes, self._actions)
        self._acquirer = Acquirer(limits, self._room, self._holds)
        self._quarantine = Quarantine(limits.crashes_alone)
        self._step_size = BatchSize(limits.max_step_tokens)
        self._acts = Acts(limits, self._sequences, self._room, self._acquirer, self._quarantine, self._step_size)

    # -- facts -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A new request joins the queue. Its values were checked by the caller."""
        assert request.id not in self._sequences, f"request {request.id} was submitted twice"
        sequence = Sequence.of(request, self._arrivals, self.limits)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
        largest = max((item.size for item in request.items), default=0)
        if largest > self.limits.encoder_cache_bytes:
            self._end(sequence, Fail(request.id, too_large(largest, self.limits.encoder_cache_bytes)))

    def encoder_ready(self, holder: str) -> None:
        """``holder`` may read its encoder output. An unknown holder has withdrawn meanwhile."""
        self._acquirer.granted(holder)

    def encoder_refused(self, holder: str, error: Exception) -> None:
        """The encoder cache will not give the output: the request fails. An unknown holder has withdrawn meanwhile."""
        sequence = self._acquirer.refused(holder)
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
        self._room.generation_lost()
        self._holds.generation_lost()
        for sequence in list(self._sequences.values()):
            sequence.slot = sequence.id = None
            if sequence.phase is Phase.WAITING:
                self._acquirer.waits(sequence)
            self._leave(sequence)
        self._to_forget.clear()

    def step_done(self, result: StepResult) -> None:
        """The oldest step in flight has been run."""
        step = self._answered(result.step_id)
        assert len(result.sampled) == len(step.sequences), "a step result must answer every chunk"
        self._quarantine.step_done()
        self._step_size.done()
        for sequence in step.writes:
            self._counters.cross_written += 1
            self._acquirer.release(sequence)
        if self._quarantine:
            self._clear(step)
        for sequence, chunk, sampled in zip(step.sequences, step.plan.chunks, result.sampled, strict=True):
            self._chunk_done(sequence, chunk, sampled)

    def _clear(self, step: _InFlightStep) -> None:
        """Who has sampled a token is no suspect. A chunk that goes well says nothing of the chunks to come."""
        for sequence, chunk in zip(step.sequences, step.plan.chunks, strict=True):
            if chunk.samples:
                self._quarantine.clear(sequence.request.id)

    def _chunk_done(self, sequence: Sequence, chunk: Chunk, sampled: SampledToken) -> None:
        accepted = len(sampled.accepted)
        sequence.fed = chunk.start + chunk.length + accepted
        sequence.sampling -= chunk.samples
        if chunk.draft_tokens:
            sequence.drafting -= 1
            sequence.dispatched += accepted
            self._counters.tokens_accepted += accepted
        if not sequence.ended and (chunk.samples or sampled.probe is not None):
            self._commit_tokens(sequence, sampled, samples=chunk.samples)
        if sequence.fed >= (sequence.listed + 1) * self.limits.page_size and self.limits.prefix_caching:
            self._room.list_pages(sequence)
        if chunk.start < sequence.placed.stop:
            self._acquirer.has_read(sequence)
        sequence.in_flight -= 1  # only now what has ended gives back its pages
        if sequence in self._room.leaving:
            self._settle(sequence)

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
        self._counters.failed_steps += 1
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
            self._room.slots.write_failed(write.key, write.slot)
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
        self._acquirer.acquire_next()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_step(self) -> StepPlan | None:
        """The next step to dispatch, or ``None`` where there is nothing to do or enough is in flight."""
        while len(self._steps) < self.limits.steps_in_flight:
            draft = self._acts.draft()
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
        room = self._room
        return PlannerStatistics(
            waiting=len(self._waiting),
            running=len(room.running),
            leaving=len(room.leaving),
            steps_in_flight=len(self._steps),
            pages=self.limits.pages,
            pages_free=room.pages.free,
            pages_cached=room.pages.cached,
            cross_slots=self.limits.cross_slots,
            cross_slots_used=room.slots.used,
            cross_slots_idle=room.slots.cached,
            step_tokens=self._step_size.budget,
            **asdict(self._counters),
        )

    # -- committing it -----------------------------------------------------------------------------------------------

    def _move(self, draft: StepDraft) -> None:
        """Those that must leave their places do. Those that lost what they relied on acquire anew. Who found no room is
        remembered."""
        for victim in draft.preempted:
            self._counters.preemptions += 1
            self._actions.append(Preempt(victim.request.id))
            self._leave(victim)
        for sequence in draft.lost:
            sequence.shuns_cache = bool(sequence.placed and self._holds.keys(sequence))
            self._acquirer.waits(sequence)
        if draft.blocked is not None:
            self._room.found_none(draft.blocked)

    def _dispatch(self, draft: StepDraft) -> StepPlan:
        written, reads = self._start(draft)
        chunks = tuple([self._chunk(part) for part in draft.parts])
        placed = [part for part in draft.parts if part.start < part.sequence.placed.stop]
        reads += [hold for part in placed for hold in self._reads(part)]
        plan = StepPlan(
            step_id=self._counters.steps,
            epoch=self._epoch,
            started=tuple(map(_sequence_start, draft.starts)),
            ended=tuple(self._to_forget),
            cross_writes=tuple(map(_cross_write, written)),
            chunks=chunks,
        )
        self._counters.steps += 1
        self._to_forget = []
        self._counters.tokens_fed += plan.tokens
        sequences = tuple([part.sequence for part in draft.parts])
        self._steps.append(_InFlightStep(plan, sequences, tuple(written), tuple(reads)))
        return plan

    def _start(self, draft: StepDraft) -> tuple[list[Sequence], list[Hold]]:
        """Gives those that start their places. Returns which of them write cross KV, and the encoder outputs that they
        read."""
        for sequence, cached in draft.starts.items():  # what is there is joined before anything new may take its place
            self._room.join(sequence, cached)
        written, reads = [], []
        for sequence in draft.starts:
            self._begin(sequence)
            item = sequence.cross_item
            if item is None:
                self._acquirer.has_read(sequence)
            elif self._take_slot(sequence, item):
                written.append(sequence)
                reads.append(Hold(self._holds.holder(sequence, item.key), item.key))
        return written, reads

    def _begin(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)
        self._acquirer.waits_no_more(sequence)
        self._room.enter(sequence)
        sequence.id = self._next_sequence_id
        self._next_sequence_id += 1
        sequence.shuns_cache = False
        self._counters.tokens_cached += sequence.fed
        self._actions.append(Start(sequence.request.id))

    def _take_slot(self, sequence: Sequence, item: EncoderItem) -> bool:
        """Gives the sequence a slot. True if the step must write its cross KV. One that is there needs no encoder
        output."""
        slots = self._room.slots
        if sequence.slot is None and slots.resident(item.key):  # another one that starts now writes it
            sequence.slot = slots.share(item.key)
        if sequence.slot is not None:
            self._counters.cross_shared += 1
            self._acquirer.release(sequence)
            return False
        assert self._holds.holds_all(sequence), f"{sequence.request.id} would write cross KV from nothing that it holds"
        sequence.slot = slots.take(item.key)
        return True

    def _chunk(self, part: Part) -> Chunk:
        sequence, samples = part.sequence, part.samples
        if part.pages:
            pages = self._room.pages.try_take(part.pages)
            assert pages is not None, "a step was drafted with pages that are not there"
            sequence.pages += pages
        assert sequence.id is not None, "a running sequence has an id"
        sequence.dispatched = part.start + part.length
        sequence.sampling += samples
        sequence.in_flight += 1
        sequence.last_step = self._counters.steps
        if part.draft_tokens:
            sequence.drafting += 1
            self._counters.tokens_drafted += part.draft_tokens
        return Chunk(sequence.id, part.start, part.length, sequence.pages, sequence.slot, samples, part.draft_tokens)

    def _reads(self, part: Part) -> Iterator[Hold]:
        """The placed encoder outputs that a part of a step reads."""
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
        request, reason = sequence.request, None
        given = (evolve(sampled, accepted=()), *sampled.accepted) if sampled.accepted else (sampled,)
        if samples and request.pooling is not None:
            assert sampled.vector is not None, "a chunk that pools must answer with a vector"
            reason = FinishReason.POOLED
        elif samples:
            before = len(sequence.tokens)
            reason = sequence.extend(given)
            given = given[: len(sequence.tokens) - before]
            self._counters.tokens_committed += len(given)
        self._actions.append(Commit(request.id, given))
        if reason is not None:
            self._end(sequence, Finish(request.id, reason))

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, end: Finish | Fail | Abort) -> None:
        assert not sequence.ended, f"request {sequence.request.id} would end twice"
        sequence.ended = True
        self._quarantine.clear(sequence.request.id)
        self._actions.append(end)
        if sequence.phase is Phase.WAITING:
            self._waiting.discard(sequence)
            self._acquirer.waits_no_more(sequence)
            self._acquirer.release(sequence)
            del self._sequences[sequence.request.id]
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence has no further chunks; it is settled as soon as no step in flight mentions it."""
        if sequence.phase is Phase.RUNNING:
            self._room.leave(sequence)
            self._acquirer.reads_no_more(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """A leaving sequence that no step mentions gives everything back; it is then gone, or waits to start anew."""
        if sequence.in_flight or sequence not in self._room.leaving:
            return
        if sequence.id is not None:
            self._to_forget.append(sequence.id)
        self._room.give_back(sequence)
        if sequence.ended or sequence.placed:
            self._acquirer.release(sequence)
        if sequence.ended:
            del self._sequences[sequence.request.id]
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self._waiting.put(sequence, sequence.key)
        self._acquirer.waits(sequence)


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


def _one_more(error: RunnerCrashed) -> RunnerCrashed:
    """One for each request: two tasks must not raise the same object."""
    failure = RunnerCrashed(str(error))
    failure.__cause__ = error.__cause__
    return failure
