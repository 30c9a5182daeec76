"""The promises of the planner, over a simulated device that refuses every misuse and draws wrong tokens for the rest.

The machine plays client, encoder cache and device: it submits, aborts, encodes, runs steps, lets them fail, and checks
that every request that ends well has exactly the tokens it would have had alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import ClassVar

import hypothesis.strategies as st
from attrs import evolve
from hypothesis.stateful import initialize, invariant, precondition, rule

from triolet.core.config import EngineConfig, Speculation
from triolet.core.errors import RequestTooLarge
from triolet.core.events import OfRequest, RequestEnded, RequestQueued, StepBegun, StepEnded, StepsLost
from triolet.core.ledger import EncoderLedger
from triolet.core.ledger_table import State
from triolet.core.ledger_values import Decisions
from triolet.core.plan import AlignedTokens, Chunk, Hypothesis, SampledToken, StepPlan
from triolet.core.planning import actions as a
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.planning.sequence import STAND_IN, Phase, Sequence
from triolet.core.request import Alignment, EncoderItem, Pooling, Probe, Request
from triolet.core.trace import TraceChecker
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_beams import expected_hypotheses
from triolet_testing.sim_model import EOS, SimModel, expected_alignment, expected_tokens, expected_vector

from .machines import Machine

KEYS = ("a", "b", "c")
PLACED = {"p": 1, "q": 3, "r": 5}  # embeddings of each
UNITS = {"p": 1, "q": 1, "r": 2}  # and its bytes, in those of a cross-attention item
POOLINGS = tuple(Pooling(kind=kind) for kind in ("last", "mean", "cls"))


class PlannerMachine(Machine):
    """A planner and a ledger as the actors drive them, one message at a time, in any order.

    Liveness is checked in `teardown`. It assumes fairness, and only this: from then on the device works, but for steps
    that a poison request is in, and answers every call it was given, in order.
    """

    seen: ClassVar[Counter[str]] = Counter()  # situations, in all examples

    @initialize(
        pages=st.integers(6, 14),
        slots=st.integers(1, 3),
        running=st.integers(1, 4),
        budget=st.integers(2, 12),
        capacity=st.integers(1, 3),
        depth=st.integers(1, 2),
        caching=st.booleans(),
        draft_tokens=st.sampled_from((0, 0, 1, 3)),
        draft_running=st.sampled_from((1, 2, 2**31 - 1)),
        headroom=st.sampled_from((0, 1, 4)),
    )
    def open(
        self,
        pages: int,
        slots: int,
        running: int,
        budget: int,
        capacity: int,
        depth: int,
        caching: bool = False,
        draft_tokens: int = 0,
        draft_running: int = 2**31 - 1,
        whole: bool = False,
        headroom: int = 0,
        delays: bool = False,
        states: int = 0,
    ) -> None:
        self.delays = delays
        self.model = SimModel(max_positions=24, pages=pages, cross_slots=slots, whole_prompts=whole, states=states)
        config = EngineConfig(
            max_running=running,
            max_step_tokens=budget,
            steps_in_flight=depth,
            encoder_cache_bytes=capacity * self.model.encoder_bytes,
            prefix_caching=caching,
            speculation=Speculation(tokens=draft_tokens, most_running=draft_running) if draft_tokens else None,
        )
        limits = PlannerLimits.of(self.model.describe(), config)
        self.limits = evolve(limits, headroom=headroom)
        self.planner = Planner(self.limits)
        self.checker = TraceChecker(steps_in_flight=depth)
        self.ledger = EncoderLedger(capacity * self.model.encoder_bytes)
        self.executor = SimExecutor(self.model)
        self.executor.open()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.readings: dict[str, list[tuple[float, ...] | AlignedTokens]] = {}  # what was read from prompts
        self.searches: dict[str, tuple[Hypothesis, ...]] = {}
        self.probed: dict[str, list[tuple[float, ...]]] = {}
        self.ends: dict[str, object] = {}
        self.flights: deque[StepPlan] = deque()
        self.answers: deque[Callable[[], None]] = deque()  # of the encoder cache, which the planner has not heard yet
        self.refused: set[str] = set()  # holders
        self.broken_epoch = -1
        self.crashing: set[int] = set()  # ids of steps that a poison request is in
        self.reached: dict[int, int] = {}  # the position that each sequence has been fed up to, by its id
        self.answered: dict[int, int] = {}  # and the one that steps have been answered up to
        self.cached = 0  # tokens that need not be fed
        self.lost: set[str] = set()  # requests that have lost what made them ready, since their last start

    # -- the actors' part --------------------------------------------------------------------------------------------

    def publish(self) -> None:
        while actions := self.planner.take_actions():  # a refusal makes new ones
            self.act(actions)

    def act(self, actions: list[a.Action]) -> None:
        for action in actions:
            match action:
                case a.Acquire(holder, item):
                    assert holder.partition("/")[0] not in self.ends, "nothing is acquired after the end"
                    self.obey(self.ledger.acquire(holder, item))
                case a.Release(holder, key):
                    if holder not in self.refused:  # else the refusal and this have crossed, and the actor lets it pass
                        self.obey(self.ledger.release(holder, key, now=0.0))
                case a.Commit(request_id, sampled):
                    assert request_id not in self.ends, "terminal once: nothing is committed after the end"
                    self.found(request_id, [one for one in sampled if one.hypotheses])
                    read = [found for one in sampled for found in (one.vector, one.aligned) if found is not None]
                    self.readings[request_id] += read
                    self.probed[request_id] += [one.probe for one in sampled if one.probe is not None]
                    self.tokens[request_id] += [one.token_id for one in sampled if one.token_id is not None]
                case OfRequest():
                    self.checker(action)
                case a.Finish(request_id, _) | a.Fail(request_id, _) | a.Abort(request_id):
                    self.checker(RequestEnded(request_id, type(action).__name__))
                    self.ends[request_id] = action

    def found(self, name: str, ends: list[SampledToken]) -> None:
        """A beam search commits nothing before its end, and then all at once."""
        request = self.requests[name]
        if request.sampling.beam_size > 1 and ends:
            assert not self.tokens[name], "a search ends once"
            assert ends[0].hypotheses == self.true_hypotheses(request), "a search finds what it finds alone"
            self.tokens[name] += ends[0].hypotheses[0].token_ids
        assert request.sampling.beam_size > 1 or not ends, "a hypothesis of a request without beams"

    def obey(self, decisions: Decisions) -> None:
        for hold in decisions.ready:
            self.answers.append(partial(self.planner.encoder_ready, hold.holder))
        for refusal in decisions.refused:
            self.refused.add(refusal.holder)
            self.answers.append(partial(self.planner.encoder_refused, refusal.holder, refusal.error))
        if not self.delays:
            self.hear(len(self.answers))
        if decisions.free:
            self.executor.free(tuple(decisions.free))
            self.obey(self.ledger.freed(decisions.free))

    def hear(self, most: int) -> None:
        """The planner hears the first answers of the encoder cache."""
        for _ in range(min(most, len(self.answers))):
            self.answers.popleft()()

    def cache_answers(self, most: int) -> None:
        """An answer is a message: even what is cached is ready only a while after it was acquired."""
        self.hear(most)
        self.publish()

    # -- rules -------------------------------------------------------------------------------------------------------

    @rule(
        length=st.integers(1, 8),
        key=st.sampled_from((*KEYS, None)),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        poison=st.sampled_from((False, False, False, False, False, True)),
        begins=st.sampled_from((0, 0, 1)),
        probe=st.sampled_from((None, None, 0, 2, 3, 3, 5, 7)),  # pages have 4 positions
        pooling=st.sampled_from(POOLINGS),
        align=st.sampled_from((None, 1, 4, 6)),
    )
    def submit(
        self,
        length: int,
        key: str | None,
        max_tokens: int,
        priority: int,
        poison: bool,
        begins: int = 0,
        probe: int | None = None,
        pooling: Pooling = POOLINGS[0],
        align: int | None = None,
    ) -> None:
        """A prompt that begins as others do, from which some are aligned. A model with whole prompts pools them, and
        reads nothing beside them."""
        text = tuple(1 + (len(self.requests) // 4 + begins + i) % 60 for i in range(length))
        if self.limits.whole_prompts:
            self.ask(text, (), priority=priority, poison=poison, pooling=pooling)
            return
        items = () if key is None else (self.item(key, self.model.encoder_embeddings, ()),)
        if align is not None and align < length and probe is None:
            alignment = Alignment(start=align, frames=max_tokens)
            self.ask(text, items, alignment=alignment, priority=priority, poison=poison)
            return
        asked = None if probe is None else Probe(position=min(probe, length - 1), token_ids=(3, 1))
        self.ask(text, items, max_tokens=max_tokens, priority=priority, poison=poison, probe=asked)

    @precondition(lambda self: not self.limits.whole_prompts)
    @rule(
        before=st.integers(0, 4),
        keys=st.lists(st.sampled_from(sorted(PLACED)), min_size=1, max_size=3),
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 1),
        poison=st.sampled_from((False, False, False, False, False, True)),
        pooling=st.sampled_from((None, None, None, *POOLINGS)),
        beyond=st.sampled_from((0, 0, 1, 4)),
    )
    def submit_placed(
        self,
        before: int,
        keys: list[str],
        max_tokens: int,
        priority: int = 0,
        poison: bool = False,
        pooling: Pooling | None = None,
        beyond: int = 0,
    ) -> None:
        """Images among the tokens: also one that comes twice, one that is larger than the encoder cache, and more than
        fit it together. The last one may go on beyond the prompt."""
        prompt = [7] * before
        items = []
        for key in keys:
            stop = len(prompt) + PLACED[key]
            if stop > 15:
                break
            items.append(self.item(key, PLACED[key], ((len(prompt), stop),), units=UNITS[key]))
            prompt += [61] * PLACED[key] + [8]
        if beyond and items:
            del prompt[max(items[-1].spans[0][0], 1, len(prompt) - 1 - beyond) :]
        tokens = max_tokens if pooling is None else 1
        self.ask(tuple(prompt), tuple(items), max_tokens=tokens, priority=priority, poison=poison, pooling=pooling)

    @precondition(lambda self: self.requests and not self.limits.whole_prompts)
    @rule(data=st.data(), more=st.integers(0, 2), pooling=st.sampled_from((None, None, *POOLINGS)))
    def go_on(self, data: st.DataObject, more: int, pooling: Pooling | None) -> None:
        """Another turn of a conversation: a prompt that goes on from where another request has come."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        request = self.requests[name]
        prompt = (*request.prompt_token_ids, *self.tokens[name], *range(2, 2 + more))
        placed = all(item.spans for item in request.items)
        if len(prompt) <= 16:
            tokens, pooled = (1, pooling) if pooling is not None and placed else (3, None)
            self.ask(prompt, request.items, max_tokens=tokens, poison=False, pooling=pooled)

    def item(self, key: str, embeddings: int, spans: tuple[tuple[int, int], ...], *, units: int = 1) -> EncoderItem:
        size = units * self.model.encoder_bytes
        return EncoderItem(key=key, payload=key, embeddings=embeddings, size=size, spans=spans)

    def ask(self, prompt: tuple[int, ...], items: tuple[EncoderItem, ...], *, poison: bool, **more: object) -> None:
        name = f"poison{len(self.requests)}" if poison else f"r{len(self.requests)}"
        request = Request(id=name, prompt_token_ids=prompt, items=items, **more)
        self.requests[name] = request
        self.tokens[name] = []
        self.readings[name], self.probed[name] = [], []
        self.checker(RequestQueued(name))
        self.planner.submit(request)
        self.publish()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.planner.abort(data.draw(st.sampled_from(sorted(self.requests))))
        self.publish()

    @rule()
    def plan(self) -> None:
        ready = [s for s in self.planner._waiting if self.needs_only_room(s)]
        found = {s.request.id: self.found_pages(s) for s in ready}
        queue = self.planner._acquirer.ready
        queued = list(queue)
        plan = self.planner.next_step()
        self.lost |= {s.request.id for s in queued if s.phase is Phase.WAITING and s not in queue}
        if plan is None and not self.flights:
            self.nothing_happens_without_news()
            self.nobody_stands_still()
        self.first_come_first_served(plan, ready)
        self.publish()
        if plan is None:
            return
        step = self.planner.in_flight(plan.step_id)
        names = step.request_ids
        states = tuple(state for part in plan.chunks for state in part.states)
        owners = tuple(name for name, part in zip(names, plan.chunks, strict=True) for _ in part.states)
        kept = tuple(keep.state for part in plan.chunks for keep in part.keeps)
        sources = tuple(start.state for start in plan.started if start.state is not None)
        begun = StepBegun(plan.step_id, names, (), (), plan.tokens, step.samples, 0, states, owners, kept, sources)
        self.checker(begun)
        if any(self.crashes(name, part) for name, part in zip(names, plan.chunks, strict=True)):
            self.crashing.add(plan.step_id)
        started = {start.sequence_id for start in plan.started}
        alone = self.limits.whole_prompts and len(plan.chunks) == 1  # cannot be divided
        assert alone or plan.tokens <= self.limits.max_step_tokens, "the token budget is kept, guesses included"
        for name, part in zip(names, plan.chunks, strict=True):
            self.everything_is_fed_once(part)
            if part.sequence_id in started and name in found:
                self.begins_behind_what_is_found(name, part, found[name])
            assert not self.limits.whole_prompts or (part.start == 0 and part.samples), "a whole prompt is one chunk"
            sampled = len(self.tokens[name]) + 1 + part.draft_tokens
            assert not part.samples or sampled <= self.requests[name].max_tokens, (
                "no guess beyond the last token wanted"
            )
        assert self.planner.statistics().tokens_cached == self.cached, "every position is fed once, or cached"
        few = len(plan.chunks) <= self.limits.draft_running
        assert few or not any(part.draft_tokens for part in plan.chunks), "no draft tokens where many run"
        for hold in step.reads:
            state, holders, _ = self.ledger.entries().get(hold.key, (State.ABSENT, (), 0))
            assert state is State.READY, "no use before ready"
            assert hold.holder in holders, "no use before ready: it is not held"
        assert len(plan.chunks) <= self.limits.max_running, "no more sequences than places"
        assert len({part.sequence_id for part in plan.chunks}) == len(plan.chunks)
        self.flights.append(plan)

    def everything_is_fed_once(self, part: Chunk) -> None:
        """A sequence's chunks lie end to end, the first one behind the pages that it has found."""
        if part.sequence_id not in self.reached:
            self.cached += part.start
            self.answered[part.sequence_id] = part.start
        assert part.start == self.reached.get(part.sequence_id, part.start), "every position is fed once"
        self.reached[part.sequence_id] = part.start + part.length

    def begins_behind_what_is_found(self, name: str, part: Chunk, found: tuple[int, int]) -> None:
        """Nothing is fed that could be found; but once by a request that has counted in vain on what it had found."""
        start, probe = found[0] * self.limits.page_size, self.requests[name].probe
        assert part.start == start or name in self.lost, "what is found is fed again"
        assert probe is None or part.start <= probe.position, "a probe's position is always fed"
        self.lost.discard(name)
        self.seen[f"feeds a page that it finds, probe: {probe is not None}"] += found[0] < found[1]

    def found_pages(self, sequence: Sequence) -> tuple[int, int]:
        """Returns the number of pages that the sequence would find if it started now, and that without a probe."""
        if not self.limits.prefix_caching:
            return 0, 0
        all_pages = (len(sequence.tokens) - 1) // self.limits.page_size
        keys = (sequence.page_keys.upto(sequence.tokens, most) for most in (sequence.most_cached(), all_pages))
        of_pages, without_probe = (len(self.planner._room.pages.find(pages)) for pages in keys)
        return of_pages, without_probe

    def first_come_first_served(self, plan: StepPlan | None, ready: list[Sequence]) -> None:
        """FIFO within a priority: nobody starts before an earlier one that needs nothing but room. (Suspects run in
        turns: one may start before an earlier request, but nobody who is none starts before a suspect that waits.)"""
        if plan is None:
            return
        started = {start.sequence_id for start in plan.started}
        sequences = [s for s in self.planner._sequences.values() if s.id in started]
        innocent = [s for s in sequences if s.request.id not in self.planner._quarantine]
        latest = max((sequence.key for sequence in innocent), default=(0, -1))
        for sequence in ready:
            waits = sequence.phase is Phase.WAITING and self.needs_only_room(sequence)
            overtaken = waits and sequence.key < latest
            assert not overtaken, f"FIFO within a priority: {sequence.request.id} was overtaken"

    def nothing_happens_without_news(self) -> None:
        """Nobody will ask again before something happens: what can be planned must be planned now, and what is told now
        must not be told once more, since the answer would be the only thing that happens, for ever."""
        told = len(self.planner._actions)
        assert self.planner.next_step() is None, "what can be planned is planned at once"
        assert len(self.planner._actions) == told, "without news there is nothing to tell"

    def nobody_stands_still(self) -> None:
        """No step is in flight and none is planned, so room comes back from nobody, and only the encoder cache has
        news: whoever runs waits for an output, and where nobody runs nobody is ready."""
        room = self.planner._room
        assert not room.leaving, "a request never ended: it leaves, and waits for no step"
        for sequence in room.running:
            waits = sequence.dispatched < sequence.placeholders.stop and not sequence.holds_all
            assert waits, f"a request never ended: {sequence.request.id} runs, has all that it needs, and is not fed"
        ready = [s for s in self.planner._waiting if self.needs_only_room(s)]
        assert room.running or not ready, f"a request never ended: {ready[0].request.id} waits, and lacks nothing"

    def needs_only_room(self, sequence: Sequence) -> bool:
        """It is ready, has not lost what made it so, and lets nobody pass."""
        ready = sequence in self.planner._acquirer.ready and not sequence.lets_pass
        return ready and self.planner._acquirer.has_what_it_needs(sequence)

    def crashes(self, name: str, part: Chunk) -> bool:
        """A poison request crashes the step that feeds a certain position of it: the first, or a later chunk's; of a
        search, the second of its beams."""
        prompt = len(self.requests[name].prompt_token_ids)
        position = prompt + 1 if self.requests[name].sampling.beam_size > 1 else prompt // 2
        return name.startswith("poison") and part.start + part.length > position

    @rule(broken=st.sampled_from((False, False, False, True)), full=st.sampled_from((False, False, False, True)))
    def device_steps(self, broken: bool, full: bool = False) -> None:
        """The oldest step ends; ``broken``: it fails by chance, or with ``full`` for want of memory."""
        if not self.flights:
            return
        plan = self.flights.popleft()
        skipped = plan.epoch == self.broken_epoch
        self.checker(StepEnded(plan.step_id, ok=not (skipped or broken or plan.step_id in self.crashing)))
        if skipped:
            self.planner.step_failed(plan.step_id, RuntimeError("skipped"), skipped=True)
        elif broken or plan.step_id in self.crashing:
            self.broken_epoch = plan.epoch
            self.executor.fault = lambda *_: MemoryError("full") if full and broken else RuntimeError("boom")
            try:
                self.executor.step(plan)
            except (RuntimeError, MemoryError) as error:
                self.planner.step_failed(plan.step_id, error)
            self.executor.fault = None
        else:
            result = self.executor.step(plan)
            for part, sampled in zip(plan.chunks, result.sampled, strict=True):
                self.reached[part.sequence_id] += len(sampled.accepted)
                self.answered[part.sequence_id] = part.start + part.length + len(sampled.accepted)
            self.planner.step_done(result)
        self.publish()

    @rule(really=st.sampled_from((False, False, False, True)))
    def runner_restarts(self, really: bool) -> None:
        """A new generation: nothing is in flight, nothing computed; whoever waits or runs loses no token by it."""
        if not really:
            return
        self.hear(len(self.answers))
        self.flights.clear()
        self.checker(StepsLost(1))
        self.executor.reset()
        self.planner.generation_lost()
        self.obey(self.ledger.generation_lost())
        self.publish()

    @rule(broken=st.sampled_from((False, False, False, True)))
    def device_encodes(self, broken: bool) -> None:
        jobs = self.ledger.take_encode_batch(2 * self.model.encoder_embeddings)
        if not jobs:
            return
        keys = tuple(job.key for job in jobs)
        if broken:
            self.obey(self.ledger.encode_failed(keys, RuntimeError("boom")))
        else:
            self.executor.encode(jobs)
            self.obey(self.ledger.encoded(keys, now=0.0))
        self.publish()

    # -- promises ----------------------------------------------------------------------------------------------------

    @invariant()
    def pages_balance(self) -> None:
        """Every page is free or used, and only what is full and written is used by several."""
        uses = Counter(page for sequence in self.planner._sequences.values() for page in sequence.pages)
        assert uses == self.planner._room.pages._users, "books balance: a page has as many users as sequences have it"
        assert not (uses and self.limits.whole_prompts), "a whole prompt holds no pages"
        free = self.planner.statistics().pages_free
        assert len(uses) + free == self.limits.pages, "books balance: a page is free or taken"
        for sequence in self.planner._sequences.values():
            own = sequence.pages[min(sequence.fed, sequence.prompt_length) // self.limits.page_size :]
            own = own if sequence.beams > 1 else sequence.pages[sequence.fed // self.limits.page_size :]
            assert all(uses[page] == 1 for page in own), "a page that is still written belongs to one sequence"

    @invariant()
    def beams_have_a_page_each_behind_the_prompt(self) -> None:
        """And only the prompt's full pages can be found by others."""
        for sequence in self.planner._sequences.values():
            if sequence.beams == 1 or sequence.phase is Phase.WAITING:
                continue
            shared = sequence.prompt_length // self.limits.page_size
            assert sequence.listed <= shared, "a page of one beam can be found"
            blocks, left = divmod(max(0, len(sequence.pages) - shared), sequence.beams)
            assert left == 0, "each block behind the prompt has a page for each beam"
            if sequence.dispatched > shared * self.limits.page_size:
                positions = (shared + blocks) * self.limits.page_size
                assert sequence.dispatched <= positions < sequence.dispatched + self.limits.page_size + 1, (
                    "no more pages than positions need"
                )

    @invariant()
    def nobody_holds_what_another_one_waits_for(self) -> None:
        """No hold-and-wait (E4): of all who wait for room in the encoder cache, only the first may hold anything."""
        waiting = [hold.holder.partition("/")[0] for hold in self.ledger.waiting()]
        held = {holder.partition("/")[0] for _, holders, _ in self.ledger.entries().values() for holder in holders}
        assert not held & {name for name in waiting if name != waiting[0]}, (
            "a request holds one item and waits for another"
        )

    @invariant()
    def what_is_acquired_fits_the_encoder_cache(self) -> None:
        """So no acquire waits for another one's release."""
        sizes = {hold.item.key: hold.item.size for _, hold in self.planner._acquirer._holds.values()}
        assert sum(sizes.values()) <= self.limits.encoder_cache_bytes, "all that is acquired fits the encoder cache"

    @invariant()
    def nobody_waits_for_room_that_is_there(self) -> None:
        """Whoever may acquire next has acquired at once: looking again changes nothing."""
        self.planner._acquirer._stale = True
        assert not self.planner.take_actions(), "what can be acquired is acquired at once"

    @invariant()
    def what_is_found_was_fed(self) -> None:
        """Nobody finds a page before a step that was answered has filled it."""
        for sequence in self.planner._sequences.values():
            if sequence.id is not None:
                assert sequence.id in self.answered, "who starts has a chunk in that very step"
                filled = self.answered[sequence.id] // self.limits.page_size
                assert sequence.listed <= filled, "a page can be found once answered steps have filled it"

    @invariant()
    def what_has_been_read_is_given_back(self) -> None:
        for sequence in self.planner._sequences.values():
            if sequence.phase is Phase.RUNNING and sequence.placeholders:
                needed = {
                    placeholder.key for placeholder in sequence.placeholders.all if placeholder.stop > sequence.fed
                }
                assert sequence.holds.keys() <= needed, "an image that has been read is given back"

    @invariant()
    def a_waiting_request_holds_no_pages(self) -> None:
        """No hold-and-wait: whoever waits for a place has given back what it had."""
        for sequence in self.planner._sequences.values():
            if sequence.phase is Phase.WAITING:
                assert not sequence.pages, "a waiting request holds no pages"
                assert STAND_IN not in sequence.tokens, "a search starts anew from its prompt"
                assert sequence.slot is None, "a waiting request holds no cross slot"
                taken = (sequence.dispatched, sequence.fed, sequence.listed, sequence.sampling, sequence.drafting)
                assert (sequence.id, sequence.in_flight, *taken) == (None, 0, 0, 0, 0, 0, 0), (
                    "preemption rolls back all that the sequence had taken"
                )

    @invariant()
    def committed_tokens_are_a_prefix_of_the_true_ones(self) -> None:
        """Whatever failed, was preempted or replayed: a client sees a prefix, never a gap or a duplicate."""
        for name, request in self.requests.items():
            assert tuple(self.tokens[name]) == self.true_tokens(request)[: len(self.tokens[name])]

    def true_tokens(self, request: Request) -> tuple[int, ...]:
        if request.reads is not None:
            return ()
        if request.sampling.beam_size > 1:
            return self.true_hypotheses(request)[0].token_ids
        placeholders = [item.placeholder for item in request.items if item.placeholder is not None]
        key = request.items[0].key if request.items and not placeholders else None
        return expected_tokens(request.prompt_token_ids, key, request.max_tokens, self.model, placeholders)

    def true_hypotheses(self, request: Request) -> tuple[Hypothesis, ...]:
        if request.id not in self.searches:
            placeholders = [item.placeholder for item in request.items if item.placeholder is not None]
            key = request.items[0].key if request.items and not placeholders else None
            self.searches[request.id] = expected_hypotheses(
                request.prompt_token_ids, key, request.max_tokens, request.sampling, self.model, placeholders
            )
        return self.searches[request.id]

    def true_reading(self, request: Request) -> tuple[float, ...] | AlignedTokens:
        placeholders = [item.placeholder for item in request.items if item.placeholder is not None]
        if request.alignment is None:
            return expected_vector(request.prompt_token_ids, None, placeholders)
        key = request.items[0].key if request.items else None
        return expected_alignment(request.prompt_token_ids, key, request.alignment)

    def teardown(self) -> None:
        """Nobody starves: once the device works again, every request ends, and everything is given back."""
        if self.failed:
            return
        bound = self.most_turns()
        for turn in count():
            if self.planner.idle:
                break
            assert turn < bound, f"terminal once: a request never ended, in {turn} turns of a device that works"
            for _ in range(self.limits.steps_in_flight):
                self.plan()
            self.device_encodes(broken=False)
            self.device_steps(broken=False)
            self.cache_answers(most=len(self.answers))
            self.what_is_found_was_fed()
            self.what_has_been_read_is_given_back()
        assert set(self.ends) == set(self.requests), "terminal once: a request was forgotten"
        for name, end in self.ends.items():
            if isinstance(end, a.Finish):
                self.ended_well(name, self.requests[name], end)
            if isinstance(end, a.Fail) and isinstance(end.error, RequestTooLarge):
                self.was_too_large(self.requests[name])
        self.everything_is_given_back()

    def most_turns(self) -> int:
        """A turn feeds a token at least. Some are fed again behind a preemption, and those of a poison request behind
        each of the crashes that condemn it: up to eight for each of its steps."""
        most = 40
        for sequence in self.planner._sequences.values():
            crashes = 8 * sequence.limit if sequence.request.id.startswith("poison") else 0
            most += (3 + crashes) * sequence.limit
        return min(most, 3000)

    def ended_well(self, name: str, request: Request, end: a.Finish) -> None:
        short = request.sampling.beam_size > 1 and len(self.true_tokens(request)) <= 2  # over before the crash
        assert short or not name.startswith("poison"), "a crash counted as a success"
        if request.reads is not None:
            assert self.readings[name] == [self.true_reading(request)], "one answer for a prompt, and the true one"
            assert end.reason is request.reads, "a wrong reason for the end"
            return
        assert tuple(self.tokens[name]) == self.true_tokens(request), "tokens are missing"
        assert (self.tokens[name][-1] == EOS) == (end.reason.value == "stop"), "a wrong reason for the end"
        if request.probe is not None:  # again, where it was replayed
            assert set(self.probed[name]) == {(-4.0, -2.0)}, "what a request asks about its prompt is answered"

    def was_too_large(self, request: Request) -> None:
        """An item beyond the encoder cache, or a search whose beams the steps or the pages cannot hold."""
        beams, size = request.sampling.beam_size, self.limits.page_size
        shared = len(request.prompt_token_ids) // size
        blocks = -(-(len(request.prompt_token_ids) + request.max_tokens - 1) // size)
        pages = shared + beams * (blocks - shared)
        item = max((item.size for item in request.items), default=0)
        assert (
            item > self.limits.encoder_cache_bytes
            or beams > self.limits.max_step_tokens
            or (beams > 1 and pages > self.limits.pages)
        ), "a request is refused that would run"

    def everything_is_given_back(self) -> None:
        statistics = self.planner.statistics()
        assert statistics.pages_free == self.limits.pages, "always freed eventually: pages are left"
        assert statistics.cross_slots_used == 0, "always freed eventually: cross slots are left"
        assert self.ledger.statistics().held == 0, "always freed eventually: encoder entries are left"
        assert not self.ledger.waiting(), "every acquire is answered: somebody waits for nobody"
        for _ in range(4):  # the news of ended sequences travels with a step of its own
            self.plan()
            self.device_steps(broken=False)
        assert not self.executor._records, "the executor remembers a sequence that has ended"
        assert not self.planner._acquirer._holds, "the planner remembers a holder that has released"
        assert self.planner.next_step() is None, "steps without end for nobody"
