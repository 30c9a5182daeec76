"""The planner always gets on: scarce pages, chunks, poison, chance failures, little memory, restarts and aborts all
together, and every request ends within a bound of steps. The trace checker reads along: no preemption and no step is in
vain."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable

import pytest
from attrs import define, field
from hypothesis import settings

from triolet.core.events import Event, RequestEnded, RequestQueued, StepBegun, StepEnded, StepsLost
from triolet.core.plan import Chunk, Hypothesis, SampledToken, StepPlan, StepResult
from triolet.core.planning.actions import Abort, Acquire, Fail, Finish, Release
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.planning.sequence import Sequence
from triolet.core.request import EncoderItem, Request, SamplingParams
from triolet.core.trace import TraceChecker

TURNS = 5_000
FOUND = (
    12_578,
    29_248,
    35_167,
)  # seeds under which a suspect and an older request once gave way to each other for ever


@define
class Play:
    """One planner with its clients, its encoder cache of a few places and its device, all sampled from one seed. With
    ``more`` dice there are images among the tokens in every second play, prefix caching, beam searches, draft tokens,
    restarts, three priorities, suspects from elsewhere, and a single place more often; the other draws are the same
    with these and without."""

    dice: random.Random
    more: random.Random | None = None
    planner: Planner = field(init=False)
    arriving: deque[Request] = field(factory=deque)
    poisonous: set[str] = field(factory=set)
    flaky: float = 0.0
    too_large: float = 0.0
    aborted: float = 0.0
    places: int = 1
    reading: float = 0.7  # how many read something
    has_images: bool = False  # among the tokens; else audio, which is read through cross-attention
    caching: bool = False
    asks: dict[str, str] = field(factory=dict)  # holder -> key
    waiting: deque[str] = field(factory=deque)
    held: dict[str, set[str]] = field(factory=dict)  # key -> holders
    flights: deque[StepPlan] = field(factory=deque)
    ended: set[str] = field(factory=set)
    broken: int = -1
    count: int = 0
    restarts: float = 0.0
    slow: bool = False  # the encoder answers only when nothing else moves
    checker: TraceChecker = field(init=False)

    def __attrs_post_init__(self) -> None:
        pick = self.dice.choice
        page, positions = pick([1, 2, 4]), pick([8, 16, 24])
        full = -(-positions // page)
        pages = full + pick([0, 0, 1, 2, full])
        running, tokens = pick([1, 2, 3, 6]), pick([2, 4, 8, 32])
        slots, depth = pick([1, 2, 3]), pick([1, 2, 2, 3])
        self.places = pick([1, 2, 99])
        if self.more is not None:
            running = self.more.choice([1, running])
            self.reading, self.has_images = self.more.choice([0.3, 0.7]), self.more.choice([False, True])
            self.caching, self.slow = self.more.choice([False, True]), self.more.choice([False, True])
            self.restarts = self.more.choice([0, 0, 0.01])
            depth = self.more.choice([1, depth])
        self.checker = TraceChecker(steps_in_flight=depth)
        self.planner = Planner(
            PlannerLimits(
                max_running=running,
                max_step_tokens=tokens,
                page_size=page,
                pages=pages,
                cross_slots=slots,
                eos_token_ids=frozenset({0}),
                steps_in_flight=depth,
                encoder_cache_bytes=self.places,
                headroom=pick([0, 0, 4]),
                prefix_caching=self.caching,
                draft_tokens=self.more.choice([0, 0, 3]) if self.more is not None else 0,
            )
        )
        self.count = pick([3, 6, 12])
        self.arriving.extend(self.request(f"r{number}", positions) for number in range(self.count))
        self.flaky, self.too_large, self.aborted = pick([0, 0, 0.05, 0.3]), pick([0, 0, 0.1]), pick([0, 0, 0.02])

    def request(self, name: str, positions: int) -> Request:
        prompt = self.dice.randint(1, positions - 1)
        most = self.dice.randint(1, positions - prompt)
        items: tuple[EncoderItem, ...] = ()
        if self.dice.random() >= 1 - self.reading:
            items = self.images(prompt) if self.has_images else (self.item(self.dice),)
        if self.dice.random() < 0.2:
            self.poisonous.add(name)
        ids = tuple(range(1, prompt + 1))
        priority, sampling, suspect = self.dice.randint(0, 1), SamplingParams(), False
        if self.more is not None:
            priority += self.more.choice([0, 0, 1])
            sampling = SamplingParams(beam_size=self.more.choice([1, 1, 1, 2]))
            suspect = self.more.random() < 0.1
        return Request(
            id=name,
            prompt_token_ids=ids,
            items=items,
            max_tokens=most,
            priority=priority,
            sampling=sampling,
            suspect=suspect,
        )

    def item(self, dice: random.Random, spans: tuple[tuple[int, int], ...] = ()) -> EncoderItem:
        return EncoderItem(key=f"k{dice.randint(0, 3)}", payload=None, embeddings=1, size=1, spans=spans)

    def images(self, prompt: int) -> tuple[EncoderItem, ...]:
        """One to three among the tokens."""
        assert self.more is not None
        places = sorted(self.more.sample(range(prompt), min(prompt, self.more.randint(1, 3))))
        return tuple(self.item(self.more, ((place, place + 1),)) for place in places)

    def act(self) -> None:
        for action in self.planner.take_actions():
            if isinstance(action, Acquire):
                self.asks[action.holder] = action.item.key
                self.waiting.append(action.holder)
            elif isinstance(action, Release):
                self.release(action.holder, self.asks.pop(action.holder))
            elif isinstance(action, Finish | Fail | Abort):
                self.ended.add(action.request_id)
                self.checker(RequestEnded(action.request_id, type(action).__name__))
            elif isinstance(action, Event):
                self.checker(action)

    def release(self, holder: str, key: str) -> None:
        if holder in self.waiting:
            self.waiting.remove(holder)
            return
        self.held[key].discard(holder)
        if not self.held[key]:
            del self.held[key]

    def grant(self) -> bool:
        """First come, first served, and who wants what is there."""
        granted = False
        for holder in list(self.waiting):
            key = self.asks[holder]
            if key in self.held or len(self.held) < self.places:
                self.waiting.remove(holder)
                self.held.setdefault(key, set()).add(holder)
                self.planner.encoder_ready(holder)
                granted = True
        return granted

    def answer(self, plan: StepPlan) -> None:
        """The device runs the oldest step in flight."""
        sequences = self.planner.in_flight(plan.step_id).sequences
        names = {one.request.id for one in sequences}
        if plan.epoch == self.broken:
            self.checker(StepEnded(plan.step_id, ok=False, skipped=True))
            self.planner.step_failed(plan.step_id, RuntimeError("skipped"), skipped=True)
        elif self.too_large and plan.tokens > 1 and self.dice.random() < self.too_large:
            self.fail(plan, MemoryError("full"))
        elif self.poisonous & names or self.dice.random() < self.flaky:
            self.fail(plan, RuntimeError("boom"))
        else:
            sampled = tuple(self.sampled(*pair) for pair in zip(sequences, plan.chunks, strict=True))
            self.checker(StepEnded(plan.step_id, ok=True))
            self.planner.step_done(StepResult(step_id=plan.step_id, sampled=sampled))

    def sampled(self, sequence: Sequence, chunk: Chunk) -> SampledToken:
        """Some draft tokens are right. A search ends with its last token."""
        if sequence.beams > 1:
            last = chunk.samples and chunk.start + chunk.length + 1 >= sequence.limit
            found = (Hypothesis(token_ids=(5,), logprobs=(0.0,), score=0.0),)
            return SampledToken(token_id=None, hypotheses=found if last else ())
        right = self.dice.randint(0, chunk.draft_tokens) if chunk.draft_tokens else 0
        return SampledToken(token_id=5 if chunk.samples else None, accepted=(SampledToken(token_id=5),) * right)

    def fail(self, plan: StepPlan, error: Exception) -> None:
        self.broken = plan.epoch
        self.checker(StepEnded(plan.step_id, ok=False))
        self.planner.step_failed(plan.step_id, error)

    def turn(self) -> bool:
        """Whether anything moved, or may still."""
        moved = False
        if self.arriving and self.dice.random() < 0.3:
            self.checker(RequestQueued(self.arriving[0].id))
            self.planner.submit(self.arriving.popleft())
            moved = True
        if self.more is not None and self.more.random() < self.restarts:
            self.restart()
        if self.aborted and self.dice.random() < self.aborted:
            self.planner.abort(f"r{self.dice.randrange(self.count)}")
        self.act()
        if self.dice.random() < 0.6 and not self.slow:
            moved |= self.grant()
        self.act()
        while self.plan():
            moved = True
        self.act()
        if self.flights and self.dice.random() < 0.8:
            self.answer(self.flights.popleft())
            self.act()
            moved = True
        return moved or bool(self.arriving or self.flights) or self.last_chance()

    def plan(self) -> bool:
        """Whether another step is sent to the device."""
        plan = self.planner.next_step()
        self.act()
        if plan is not None:
            step = self.planner.in_flight(plan.step_id)
            self.checker(StepBegun(plan.step_id, step.request_ids, (), (), plan.tokens, step.samples))
            self.flights.append(plan)
        return plan is not None

    def restart(self) -> None:
        """The runner starts anew: what was in flight and what was encoded is lost, and is encoded once more."""
        self.flights.clear()
        self.checker(StepsLost(1))
        self.planner.generation_lost()
        self.waiting.extend(holder for holders in self.held.values() for holder in sorted(holders))
        self.held.clear()
        self.act()

    def last_chance(self) -> bool:
        granted = self.grant()
        self.act()
        return self.plan() or granted or self.planner.idle

    def play(self) -> None:
        for _ in range(TURNS):
            assert self.turn(), f"nobody moves: {self.planner.statistics()}"
            if not self.arriving and self.planner.idle:
                break
        assert self.planner.idle, f"no end after {TURNS} turns: {self.planner.statistics()}"
        books = self.planner.statistics()
        assert (books.pages_free, books.cross_slots_used, self.asks) == (books.pages, 0, {})
        assert len(self.ended) == self.count


def play_all(seeds: Iterable[int]) -> None:
    """One play for each seed, with images in half of them."""
    for seed in seeds:
        Play(random.Random(seed), random.Random(seed)).play()


def test_every_request_ends():
    play_all(range(settings.default.max_examples * 5 // 2))


def test_every_request_ends_without_images():
    for seed in range(settings.default.max_examples):
        Play(random.Random(seed)).play()


@pytest.mark.parametrize("seed", FOUND)
def test_a_suspect_and_an_older_request_do_not_give_way_to_each_other_for_ever(seed: int):
    """The suspect is planned first, takes pages for its first chunk, runs out of them on the way, and gives way; the
    older one waits until it has; then the suspect is first again."""
    Play(random.Random(seed)).play()
