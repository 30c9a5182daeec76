"""The planner: decides which sequence runs when, in which pages, and what each step feeds (continuous batching). Pure.

Methods such as `Planner.submit`, `encoder_ready` and `step_done` report facts to the planner. `Planner.take_actions`
returns `Action` values, and `Planner.next_step` returns steps. The scheduler actor turns actions into messages.

A request lives in the planner as a `Sequence`::

    submit -> waiting (for its encoder output, or for a place) -> running -> leaving -> gone
                 ^                                                  |
                 +----------- preempted, or its step failed --------+

Up to ``steps_in_flight`` steps are dispatched and not yet answered. So the planner must plan with tokens that it does
not know yet. *Free follows completion*: pages, slots and encoder outputs of a sequence are given back only when no
dispatched step mentions the sequence any more.

`Room` keeps the books of places, pages and slots, `Acquirer` decides which sequence acquires encoder outputs next, and
`Acts` drafts a step. Nothing changes before the draft is committed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from attrs import asdict, define, evolve, field

from ..batch_size import BatchSize
from ..errors import RunnerCrashed, caused
from ..events import RequestPreempted, RequestStarted, RequestSuspected, StepShrunk
from ..ledger_values import Hold, too_large
from ..ordered import Ordered
from ..plan import Chunk, CrossWrite, Keep, SampledToken, StepPlan, StepResult
from ..request import EncoderItem, Request
from .acquirer import Acquirer
from .actions import Abort, Action, Commit, Fail, Finish
from .acts import Acts
from .adapters import AdapterBook
from .draft import InFlightStep, Part, StepDraft
from .limits import PlannerLimits
from .quarantine import Quarantine
from .room import Room
from .sequence import Phase, Sequence
from .statistics import Counters, PlannerStatistics


@define(eq=False)
class Planner:
    """The queue, the pages and the steps in flight. The docstring of the module describes them."""

    limits: PlannerLimits
    adapters: AdapterBook = field(init=False)
    _sequences: dict[str, Sequence] = field(factory=dict, init=False)  # by request id
    _waiting: Ordered[Sequence] = field(factory=Ordered, init=False)
    _room: Room = field(init=False)
    _acquirer: Acquirer = field(init=False)
    _quarantine: Quarantine = field(init=False)
    _step_size: BatchSize = field(init=False)
    _acts: Acts = field(init=False)
    _steps: deque[InFlightStep] = field(factory=deque, init=False)
    _actions: list[Action] = field(factory=list, init=False)
    _to_forget: list[int] = field(factory=list, init=False)  # ids that the executor drops with the next step
    _arrivals: int = field(default=0, init=False)
    _next_sequence_id: int = field(default=0, init=False)
    _epoch: int = field(default=0, init=False)
    _counters: Counters = field(factory=Counters, init=False)

    def __attrs_post_init__(self) -> None:
        limits = self.limits
        self._room = Room(limits)
        self._acquirer = Acquirer(limits, self._room, self._actions)
        self.adapters = AdapterBook(self._room, self._actions)
        self._quarantine = Quarantine(limits.crashes_alone)
        self._step_size = BatchSize(limits.max_step_tokens)
        self._acts = Acts(limits, self._sequences, self._room, self._acquirer, self._quarantine, self._step_size)

    # -- facts -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Adds a new request to the queue. The caller has checked the request's values."""
        assert request.id not in self._sequences, f"request {request.id} was submitted twice"
        sequence = Sequence.of(request, self._arrivals, self.limits)
        self._arrivals += 1
        self._sequences[request.id] = sequence
        self._enqueue(sequence)
        if request.suspect:
            self._quarantine.suspect(request.id)
        refusal = self.adapters.enter(request) or self._room.refusal(sequence)
        largest = max((item.size for item in request.items), default=0)
        if largest > self.limits.encoder_cache_bytes:
            self._end(sequence, Fail(request.id, too_large(largest, self.limits.encoder_cache_bytes)))
        elif refusal is not None:
            self._end(sequence, Fail(request.id, refusal))

    def encoder_ready(self, holder: str) -> None:
        """Notes that ``holder`` holds its encoder output now. An unknown holder has withdrawn its acquire."""
        self._acquirer.granted(holder)

    def encoder_refused(self, holder: str, error: Exception) -> None:
        """Fails the request whose acquire the encoder cache refuses. An unknown holder has withdrawn its acquire."""
        sequence = self._acquirer.refused(holder)
        if sequence is not None and not sequence.ended:
            self._end(sequence, Fail(sequence.request.id, error))

    def abort(self, request_id: str, *, stopped: bool = False) -> None:
        """Aborts the request. An unknown id has ended already."""
        sequence = self._sequences.get(request_id)
        if sequence is not None and not sequence.ended:
            self._end(sequence, Abort(request_id, stopped))

    def abort_all(self) -> None:
        """Aborts every request that has not ended."""
        for request_id in list(self._sequences):
            self.abort(request_id)

    def fail_all(self, error: RunnerCrashed) -> None:
        """Fails every request, since the runner has crashed. The steps in flight count as answered."""
        for step in self._steps:
            self._unanswered(step)
        self._steps.clear()
        for sequence in list(self._sequences.values()):
            if sequence.ended:
                self._settle(sequence)
        self.fail_waiting(lambda: _one_more(error))

    def fail_waiting(self, make_error: Callable[[], Exception]) -> None:
        """Fails every request that has not ended, since no device will run it. Each gets an error of its own."""
        for sequence in list(self._sequences.values()):
            if not sequence.ended:
                self._end(sequence, Fail(sequence.request.id, make_error()))

    def generation_lost(self) -> None:
        """Notes that the runner has restarted: the steps in flight, the KV and the encoder outputs are lost. A running
        sequence starts anew from its committed tokens. The acquire of a held output stays open, and the sequence waits
        for the output again."""
        self._epoch += 1
        for step in self._steps:
            self._unanswered(step)
        self._steps.clear()
        self._room.generation_lost()
        self._acquirer.generation_lost()
        for sequence in list(self._sequences.values()):
            sequence.slot = sequence.adapter = sequence.id = None
            if sequence.phase is Phase.WAITING:
                self._acquirer.waits(sequence)
            self._leave(sequence)
        self._to_forget.clear()

    def step_done(self, result: StepResult) -> None:
        """Commits the results of the oldest step in flight, which went well."""
        step = self._answered(result.step_id)
        assert len(result.sampled) == len(step.sequences), "a step result must answer every chunk"
        self._quarantine.step_done()
        self._step_size.done()
        for sequence in step.writes:
            self._counters.cross_written += 1
            self._acquirer.release(sequence)
        if self._quarantine:
            for request_id in _to_clear(step):
                self._quarantine.clear(request_id)
        for sequence, chunk, sampled in zip(step.sequences, step.plan.chunks, result.sampled, strict=True):
            self._chunk_done(sequence, chunk, sampled)

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
        if chunk.draft_tokens:
            sequence.judge_drafts(accepted, chunk.draft_tokens)
        if sequence.fed >= (sequence.listed + 1) * self.limits.page_size and self.limits.prefix_caching:
            self._room.list_pages(sequence)
        if chunk.states:
            self._room.settle_states(sequence, chunk.keeps)
        if chunk.start < sequence.placeholders.stop:
            self._acquirer.has_read(sequence)
        sequence.in_flight -= 1  # not earlier: a sequence that ends above keeps its pages until here
        if sequence in self._room.leaving:
            self._settle(sequence)

    def step_failed(self, step_id: int, error: Exception, *, skipped: bool = False) -> None:
        """Notes that the oldest step in flight failed and committed nothing. Its sequences go back to the queue and
        start anew from their committed tokens. ``skipped``: the step was not run, because the step before it failed.

        A step that was too large for the device's memory makes no suspects: the next steps are half as large."""
        step = self._answered(step_id)
        self._unanswered(step)
        if skipped:
            self._to_forget.extend(step.plan.ended)  # the executor forgot them if the step ran, even in vain
        else:
            self._step_raised(step, error)
        for sequence in step.sequences:
            self._settle(sequence)

    def _step_raised(self, step: InFlightStep, error: Exception) -> None:
        self._counters.failed_steps += 1
        self._epoch += 1
        to_clear = _to_clear(step)  # read here, as `replaying` is, before the searches of the step are set back
        replaying = frozenset([sequence.request.id for sequence in step.sequences if sequence.replays])
        for doomed in (step, *self._steps):  # the runner will skip what was dispatched meanwhile
            self._doom(doomed)
        if isinstance(error, MemoryError) and self._divisible(step):
            self._step_size.too_large(step.plan.tokens)
            self._actions.append(StepShrunk(self._step_size.budget))
            return
        self._quarantine.step_failed(step.request_ids, to_clear=to_clear, replaying=replaying)
        for sequence in step.sequences:
            self._suspect(sequence, error)

    def _divisible(self, step: InFlightStep) -> bool:
        """True if the same work could be done in smaller steps."""
        if len(step.sequences) > 1 or self.limits.whole_prompts:
            return len(step.sequences) > 1
        return any(part.length + part.draft_tokens > 1 for part in step.plan.chunks)  # beams cannot be divided

    def _doom(self, step: InFlightStep) -> None:
        """Notes that the step writes nothing: no sequence may join its cross KV, and its sequences leave to start
        anew."""
        self._room.write_failed(step.plan)
        for sequence in step.sequences:
            self._leave(sequence)

    def _suspect(self, sequence: Sequence, error: Exception) -> None:
        request_id = sequence.request.id
        if sequence.ended:
            self._quarantine.clear(request_id)
            return
        self._actions.append(RequestSuspected(request_id))
        steps = sequence.steps(self._step_size.budget)
        poison = self._quarantine.poison(request_id, error, steps=steps)
        if poison is not None:
            self._end(sequence, Fail(request_id, poison))

    # -- decisions ---------------------------------------------------------------------------------------------------

    def take_actions(self) -> list[Action]:
        """Returns the actions since the last call, in order."""
        self._acquirer.acquire_next()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def next_step(self) -> StepPlan | None:
        """Returns the next step to dispatch; ``None``: there is nothing to do, or enough steps are in flight."""
        while len(self._steps) < self.limits.steps_in_flight:
            draft = self._acts.draft()
            self._move(draft)
            empty = self._to_forget and not (self._steps or draft.preempted)  # it tells the executor what to forget
            if draft.parts or empty:
                return self._dispatch(draft)
            if not draft.preempted:  # else the next draft has the room that came back
                return None
        return None

    # -- questions ---------------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """True if there is no request and no step in flight."""
        return not self._sequences and not self._steps

    def has(self, request_id: str) -> bool:
        """True if the planner has the request, and it has not ended."""
        sequence = self._sequences.get(request_id)
        return sequence is not None and not sequence.ended

    def in_flight(self, step_id: int) -> InFlightStep:
        """Returns the step in flight with this id."""
        return next(step for step in self._steps if step.plan.step_id == step_id)

    @property
    def pages_used(self) -> int:
        """The number of pages that sequences use now."""
        return self.limits.pages - self._room.pages.free

    def statistics(self) -> PlannerStatistics:
        """Returns a snapshot of the planner's figures."""
        room = self._room
        return PlannerStatistics(
            waiting=len(self._waiting),
            running=len(room.running),
            leaving=len(room.leaving),
            steps_in_flight=len(self._steps),
            pages=self.limits.pages,
            pages_free=room.pages.free,
            pages_cached=room.pages.cached,
            states=self.limits.states,
            states_free=room.states.free,
            states_cached=room.states.cached,
            cross_slots=self.limits.cross_slots,
            cross_slots_used=room.slots.used,
            cross_slots_idle=room.slots.cached,
            step_tokens=self._step_size.budget,
            **asdict(self._counters),
        )

    # -- committing a draft ------------------------------------------------------------------------------------------

    def _move(self, draft: StepDraft) -> None:
        """Notes the sequence that lacks room, preempts the victims of the draft, and makes the sequences that are no
        longer ready acquire anew.
        """
        if draft.blocked is not None:
            self._room.found_none(draft.blocked)  # first, since the room that victims give back counts as new
        for victim, to in draft.preempted.items():
            victim.gave_way = to, to.last_step
            self._counters.preemptions += 1
            self._actions.append(RequestPreempted(victim.request.id, to.request.id))
            self._leave(victim)
        for sequence in draft.lost:
            sequence.shuns_cache = bool(sequence.placeholders and sequence.holds)
            self._acquirer.waits(sequence)

    def _dispatch(self, draft: StepDraft) -> StepPlan:
        written, reads = self._start(draft)
        for part in draft.parts:  # all takes come first: what is kept takes what is left
            self._room.take(part)
        chunks = tuple([self._chunk(part, self._room.take_keeps(part, draft)) for part in draft.parts])
        placed = [part for part in draft.parts if part.start < part.sequence.placeholders.stop]
        reads += [hold for part in placed for hold in self._reads(part)]
        plan = StepPlan(
            adapter_writes=self.adapters.take_slots(draft.starts),  # first: a start names its slot
            step_id=self._counters.steps,
            epoch=self._epoch,
            started=tuple(map(Sequence.as_start, draft.starts)),
            ended=tuple(self._to_forget),
            cross_writes=tuple(map(_cross_write, written)),
            chunks=chunks,
        )
        self._counters.steps += 1
        self._to_forget = []
        self._counters.tokens_fed += plan.tokens
        sequences = tuple([part.sequence for part in draft.parts])
        self._steps.append(InFlightStep(plan, sequences, tuple(written), tuple(reads)))
        return plan

    def _start(self, draft: StepDraft) -> tuple[list[Sequence], list[Hold]]:
        """Gives the draft's starts their places. Returns the sequences that write cross KV, and the holds of the
        encoder outputs that they read."""
        for sequence, cached in draft.starts.items():  # all joins come first: a new page or slot may evict cached ones
            self._room.join(sequence, cached)
        written, reads = [], []
        for sequence in draft.starts:
            self._begin(sequence)
            item = sequence.cross_item
            if item is None:
                self._acquirer.has_read(sequence)
            elif self._take_slot(sequence, item):
                written.append(sequence)
                reads.append(Hold(sequence.holds[item.key].holder, item.key))
        return written, reads

    def _begin(self, sequence: Sequence) -> None:
        self._waiting.discard(sequence)
        self._acquirer.waits_no_more(sequence)
        self._room.enter(sequence)
        sequence.id = self._next_sequence_id
        self._next_sequence_id += 1
        sequence.shuns_cache, sequence.gave_way, sequence.begun = False, None, len(sequence.tokens)
        self._counters.tokens_cached += sequence.fed
        self._actions.append(RequestStarted(sequence.request.id, len(sequence.tokens) - sequence.fed))

    def _take_slot(self, sequence: Sequence, item: EncoderItem) -> bool:
        """Gives the sequence a slot. True if the step must write the sequence's cross KV. If the cross KV is resident,
        the sequence releases its encoder output."""
        slots = self._room.slots
        if sequence.slot is None and slots.resident(item.key):  # an earlier start of this step writes it
            sequence.slot = slots.share(item.key)
        if sequence.slot is not None:
            self._counters.cross_shared += 1
            self._acquirer.release(sequence)
            return False
        assert sequence.holds_all, f"{sequence.request.id} would write cross KV from nothing that it holds"
        sequence.slot = slots.take(item.key)
        return True

    def _chunk(self, part: Part, keeps: tuple[Keep, ...]) -> Chunk:
        sequence, samples = part.sequence, part.samples
        assert sequence.id is not None, "a running sequence has an id"
        sequence.dispatched = part.start + part.length
        sequence.sampling += samples
        sequence.in_flight += 1
        sequence.last_step = self._counters.steps
        if part.draft_tokens:
            sequence.drafting += 1
            self._counters.tokens_drafted += part.draft_tokens
        own = sequence.pages, sequence.slot, samples, part.draft_tokens, part.beams, sequence.states
        return Chunk(sequence.id, part.start, part.length, *own, keeps)

    def _reads(self, part: Part) -> Iterator[Hold]:
        """Yields the holds of the placed encoder outputs that ``part`` reads."""
        for key in part.sequence.placeholders.touched(part.start, part.stop):
            yield Hold(part.sequence.holds[key].holder, key)

    # -- answers -----------------------------------------------------------------------------------------------------

    def _answered(self, step_id: int) -> InFlightStep:
        assert self._steps, f"step {step_id} was answered, but none is in flight"
        step = self._steps.popleft()
        assert step.plan.step_id == step_id, f"step {step_id} was answered before step {step.plan.step_id}"
        return step

    def _unanswered(self, step: InFlightStep) -> None:
        """Notes that no result of the step will come."""
        for sequence, chunk in zip(step.sequences, step.plan.chunks, strict=True):
            sequence.in_flight -= 1
            sequence.sampling -= chunk.samples
            sequence.drafting -= chunk.draft_tokens > 0
            self._room.states.give_back([keep.state for keep in chunk.keeps])

    def _commit_tokens(self, sequence: Sequence, sampled: SampledToken, *, samples: bool) -> None:
        """Commits the tokens that the chunk sampled, up to one that ends the request."""
        request, reason = sequence.request, None
        given = (evolve(sampled, accepted=()), *sampled.accepted) if sampled.accepted else (sampled,)
        if samples and request.reads is not None:
            assert (sampled.vector or sampled.aligned) is not None, "a prompt that was read must be answered"
            reason = request.reads
        elif samples and sequence.beams > 1:
            reason = sequence.search_on(sampled.hypotheses)
            self._counters.tokens_committed += len(sampled.hypotheses[0].token_ids) if reason is not None else 0
            if reason is None and sampled.probe is None:
                return  # nothing is committed before the end
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
            self.adapters.leave(sequence.request)
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Stops a running sequence from getting further chunks. The sequence is settled as soon as no step in flight
        mentions it."""
        if sequence.phase is Phase.RUNNING:
            self._room.leave(sequence)
            self._acquirer.waits_no_more(sequence)
        self._settle(sequence)

    def _settle(self, sequence: Sequence) -> None:
        """Takes everything back from a leaving sequence that no step in flight mentions. The sequence is then gone, or
        waits again."""
        if sequence.in_flight or sequence not in self._room.leaving:
            return
        if sequence.id is not None:
            self._to_forget.append(sequence.id)
        self._room.give_back(sequence)
        if sequence.ended or sequence.placeholders:
            self._acquirer.release(sequence)
        if sequence.ended:
            del self._sequences[sequence.request.id]
            self.adapters.leave(sequence.request)
        else:
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        sequence.phase = Phase.WAITING
        self._waiting.put(sequence, sequence.key)
        self._acquirer.waits(sequence)


def _to_clear(step: InFlightStep) -> tuple[str, ...]:
    """Returns the requests that are no suspects any more if the step goes well: those that sample a token in it. A
    search that replays is cleared only when it is further than ever before. A chunk that goes well says nothing about
    later chunks.
    """
    chunks = zip(step.sequences, step.plan.chunks, strict=True)
    return tuple([sequence.request.id for sequence, chunk in chunks if chunk.samples and not sequence.replays])


def _cross_write(sequence: Sequence) -> CrossWrite:
    assert sequence.cross_item is not None, "who writes cross KV has an item for it"
    assert sequence.slot is not None, "who writes cross KV has a slot for it"
    return CrossWrite(key=sequence.cross_item.key, slot=sequence.slot)


def _one_more(error: RunnerCrashed) -> RunnerCrashed:
    """Returns a copy of ``error`` for each request: two tasks must not raise the same object."""
    return caused(RunnerCrashed(str(error)), error.__cause__)
