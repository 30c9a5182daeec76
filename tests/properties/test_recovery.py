"""What a failed call costs: nothing but the item or the request that crashes it."""

from __future__ import annotations

import itertools
from collections import deque

import hypothesis.strategies as st
from attrs import evolve
from hypothesis import given, settings

from triolet.core.config import EngineConfig
from triolet.core.events import RequestStarted
from triolet.core.ledger import EncoderLedger
from triolet.core.plan import SampledToken, StepPlan, StepResult
from triolet.core.planning.actions import Commit, Finish
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import Request
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel, expected_tokens

from .machines import item

CONFIG = EngineConfig(max_running=8, max_step_tokens=64, steps_in_flight=1, prefix_caching=False)


@given(keys=st.integers(1, 12), bad=st.sets(st.integers(0, 11), max_size=3), budget=st.integers(1, 12))
def test_an_encode_failure_fails_only_its_items(keys: int, bad: set[int], budget: int):
    """S5, and bounded: a batch is halved, so that n items with b bad ones take no more than about 2 b log n calls."""
    ledger = EncoderLedger(100)
    for number in range(keys):
        ledger.acquire(f"r{number}", item(f"k{number}", payload=number))
    ready, refused, calls, failures = set(), set(), 0, 0
    while jobs := ledger.take_encode_batch(budget):
        calls += 1
        taken = tuple(job.key for job in jobs)
        if any(job.payload in bad for job in jobs):
            failures += 1
            decisions = ledger.encode_failed(taken, RuntimeError("boom"))
        else:
            decisions = ledger.encoded(taken, now=0.0)
        ready |= {hold.key for hold in decisions.ready}
        refused |= {refusal.key for refusal in decisions.refused}
    assert refused == {f"k{number}" for number in bad if number < keys}
    assert ready == {f"k{number}" for number in range(keys)} - refused
    assert failures <= len(refused) * (min(budget, keys).bit_length() + 2)  # an item alone fails twice
    assert calls <= -(-keys // budget) + 2 * failures


def run(planner: Planner, executor: SimExecutor) -> tuple[dict[str, list[int]], int]:
    """Every request's tokens, and how many steps failed."""
    tokens: dict[str, list[int]] = {}
    ended = failed = 0
    while (plan := planner.next_step()) is not None:
        try:
            planner.step_done(executor.step(plan))
        except MemoryError as error:
            failed += 1
            planner.step_failed(plan.step_id, error)
        for action in planner.take_actions():
            if isinstance(action, Commit):
                found = [one.token_id for one in action.sampled if one.token_id is not None]
                tokens.setdefault(action.request_id, []).extend(found)
            ended += isinstance(action, Finish)
    assert ended == len(tokens), "every request finishes"
    return tokens, failed


@settings(max_examples=100)
@given(prompts=st.lists(st.integers(1, 9), min_size=1, max_size=6), room=st.integers(1, 20))
def test_a_step_too_large_for_the_memory_makes_steps_smaller_and_fails_nobody(prompts: list[int], room: int):
    """Out of memory is answered by smaller steps before anything fails: even one token at a time will do."""
    model = SimModel()
    limits = PlannerLimits.of(model.describe(), CONFIG)
    planner, executor = Planner(limits), SimExecutor(model)
    executor.open()
    executor.fault = lambda _, plan: MemoryError("full") if plan.tokens > room else None
    for number, length in enumerate(prompts):
        planner.submit(Request(id=f"r{number}", prompt_token_ids=(5 + number,) * length, max_tokens=6))
    tokens, failed = run(planner, executor)
    for number, length in enumerate(prompts):
        assert tuple(tokens[f"r{number}"]) == expected_tokens((5 + number,) * length, None, 6, model)
    assert failed <= 7, "each failure halves what a step may feed"


def test_two_poisonous_requests_in_turn_are_both_found_soon():
    """What the first one did is explained, and does not make the planner more patient with the second."""
    limits = PlannerLimits.of(SimModel().describe(), CONFIG)
    planner = Planner(limits)
    executor = SimExecutor()
    executor.open()
    crashes: dict[str, int] = {}

    def feed(request: Request) -> None:
        planner.submit(request)
        while (plan := planner.next_step()) is not None:
            if any(name.startswith("poison") for name in planner.in_flight(plan.step_id).request_ids):
                crashes[request.id] = crashes.get(request.id, 0) + 1
                planner.step_failed(plan.step_id, RuntimeError("boom"))
            else:
                planner.step_done(executor.step(plan))
            planner.take_actions()

    for number in range(70):
        feed(Request(id=f"r{number}", prompt_token_ids=(5,), max_tokens=1))
    feed(Request(id="poison a", prompt_token_ids=(5,), max_tokens=1))
    feed(Request(id="poison b", prompt_token_ids=(5,), max_tokens=1))
    assert crashes == {"poison a": 2, "poison b": 2}, f"crashes: {crashes}"


def test_steps_are_whole_again_after_every_episode_of_too_little_memory():
    """Halving several times in a row costs no more patience than once, and after a good while all is forgiven."""
    limits = evolve(PlannerLimits.of(SimModel().describe(), CONFIG), max_step_tokens=512)
    planner = Planner(limits)
    executor = SimExecutor()
    executor.open()
    number = itertools.count()

    def step(room: int) -> None:
        while (plan := planner.next_step()) is None:
            for _ in range(8):
                planner.submit(Request(id=f"r{next(number)}", prompt_token_ids=(5,) * 40, max_tokens=4))
        if plan.tokens > room:
            planner.step_failed(plan.step_id, MemoryError("full"))
        else:
            planner.step_done(executor.step(plan))
        planner.take_actions()

    for _ in range(3):
        for _ in range(200):
            step(room=16)
        assert planner.statistics().step_tokens <= 16
        for _ in range(2_000):
            step(room=1_000)
        assert planner.statistics().step_tokens == 512


def test_nobody_takes_the_room_that_a_suspect_waits_for():
    """A large request is suspected of what a small one beside it survived; it waits until that one has ended, and small
    ones that come later wait behind it, though a page is left for them."""
    limits = PlannerLimits(
        max_running=4, max_step_tokens=64, page_size=1, pages=20, cross_slots=0, eos_token_ids=frozenset(), headroom=0
    )
    planner, started = Planner(limits), []

    def submit(name: str, prompt: int, max_tokens: int) -> None:
        planner.submit(Request(id=name, prompt_token_ids=(1,) * prompt, max_tokens=max_tokens))

    def plan() -> StepPlan:
        step = planner.next_step()
        assert step is not None, "nothing is run"
        started.extend(action.request_id for action in planner.take_actions() if isinstance(action, RequestStarted))
        return step

    def run_well(step: StepPlan) -> None:
        sampled = tuple(SampledToken(token_id=7 if chunk.samples else None) for chunk in step.chunks)
        planner.step_done(StepResult(step_id=step.step_id, sampled=sampled))

    submit("small", 5, 6)
    submit("large", 15, 3)
    planner.step_failed(plan().step_id, RuntimeError("a cosmic ray"))
    in_flight = deque([plan(), plan()])  # the small one alone, which takes a page of those that the large one needs
    submit("late", 1, 3)
    while not planner.idle:
        run_well(in_flight.popleft())
        while (step := planner.next_step()) is not None:
            in_flight.append(step)
        started.extend(action.request_id for action in planner.take_actions() if isinstance(action, RequestStarted))
    assert started == ["small", "large", "small", "large", "late"]
