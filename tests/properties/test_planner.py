"""The promises of the planner that one history shows; `test_planner_machines.py` has those of many histories."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attrs import evolve

from triolet.core.config import EngineConfig
from triolet.core.errors import PoisonRequest, RunnerCrashed
from triolet.core.order import order_of
from triolet.core.plan import StepPlan
from triolet.core.planning import sequence as sequences
from triolet.core.planning.actions import Acquire, Commit, Fail, Finish, Release
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.pages import PageAllocator
from triolet.core.planning.planner import Planner
from triolet.core.request import EncoderItem, Pooling, Request, SamplingParams
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel

from .machines import item


def opened(
    *,
    pages: int = 64,
    depth: int = 1,
    slots: int = 4,
    running: int = 4,
    budget: int = 100,
    whole: bool = False,
    headroom: int = 0,
    states: int = 0,
    **more: Any,
) -> tuple[Planner, SimExecutor]:
    """A planner and its device, open."""
    model = SimModel(pages=pages, cross_slots=slots, whole_prompts=whole, states=states)
    config = EngineConfig(max_running=running, max_step_tokens=budget, steps_in_flight=depth, prefix_caching=False)
    limits = evolve(PlannerLimits.of(model.describe(), config), headroom=headroom, **{"draft_running": 8} | more)
    executor = SimExecutor(model)
    executor.open()
    return Planner(limits), executor


def run(planner: Planner, executor: SimExecutor) -> list[StepPlan]:
    """Runs steps one by one until there is nothing to do."""
    plans = []
    while (plan := planner.next_step()) is not None:
        plans.append(plan)
        planner.step_done(executor.step(plan))
    return plans


def request(name: str, *, prompt: int = 3, max_tokens: int = 5, **more: object) -> Request:
    return Request(id=name, prompt_token_ids=(5,) * prompt, max_tokens=max_tokens, **more)


def test_requests_start_by_priority_and_then_in_the_order_they_came():
    planner, executor = opened(running=8)
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        planner.submit(request(name, priority=priority, prompt=2 + priority))
    (plan, *_) = run(planner, executor)
    assert [len(start.token_ids) for start in plan.started] == [2, 2, 3]


def test_a_runner_that_is_gone_leaves_nothing_taken():
    planner, _ = opened(depth=2)
    for name in ("r", "s"):
        planner.submit(request(name))
    planner.next_step()
    planner.next_step()
    planner.fail_all(RunnerCrashed("gone"))
    assert planner.idle, "requests are left though the runner is gone"
    assert planner.statistics().pages_free == planner.limits.pages, "pages are left though the runner is gone"


def test_the_youngest_request_gives_way_where_pages_are_short():
    planner, executor = opened(pages=4)
    for name in ("old", "young"):
        planner.submit(request(name, prompt=4, max_tokens=8))
    ends = []
    while (plan := planner.next_step()) is not None:
        planner.step_done(executor.step(plan))
        ends += [action.request_id for action in planner.take_actions() if isinstance(action, Finish)]
    assert planner.statistics().preemptions == 1
    assert ends == ["old", "young"], "the older request must not wait for the younger one"


def test_nobody_starts_in_a_step_that_had_to_preempt():
    """It would take the room of the one that had to give way, who came before it."""
    planner, executor = opened(pages=4)
    for name, prompt in (("old", 4), ("young", 8)):
        planner.submit(request(name, prompt=prompt, max_tokens=4))
    first = planner.next_step()
    planner.step_done(executor.step(first))
    planner.submit(request("newest", prompt=5, max_tokens=4))
    starts = [start.prompt_length for plan in (first, *run(planner, executor)) for start in plan.started]
    assert planner.statistics().preemptions == 1
    assert starts == [4, 8, 8, 5], "who was preempted starts again before those who came later"


def test_a_step_tells_who_gets_a_token_by_it():
    """Not who reads a part of its prompt, and not who reads it for a vector."""
    planner, executor = opened(budget=8)
    planner.submit(request("long", prompt=20, max_tokens=3))
    planner.submit(request("short", prompt=2, max_tokens=3))
    planner.submit(request("vector", prompt=2, max_tokens=1, pooling=Pooling(kind="mean")))
    told: Counter[str] = Counter()
    while (plan := planner.next_step()) is not None:
        told.update(planner.in_flight(plan.step_id).samples)
        planner.step_done(executor.step(plan))
    commits = [action for action in planner.take_actions() if isinstance(action, Commit)]
    assert {commit.request_id for commit in commits} == {"long", "short", "vector"}
    sampled = Counter(one.request_id for one in commits for token in one.sampled if token.token_id is not None)
    assert told == sampled
    assert set(told) == {"long", "short"}


def test_a_whole_prompt_that_is_too_large_for_the_memory_fails():
    """It cannot be divided: smaller steps do not help."""
    planner, executor = opened(whole=True)
    planner.submit(request("large", prompt=20, max_tokens=1, pooling=Pooling(kind="mean")))
    executor.fault = lambda *_: MemoryError("full")
    for _ in range(20):
        plan = planner.next_step()
        if plan is not None and plan.chunks:
            planner.step_failed(plan.step_id, MemoryError("full"))
    ends = [action for action in planner.take_actions() if isinstance(action, Fail)]
    assert len(ends) == 1, "it is tried again for ever"
    assert isinstance(ends[0].error, PoisonRequest)


def test_a_whole_prompt_that_crashes_is_found_as_soon_where_steps_had_to_shrink():
    """It is one step whatever a step may feed, so it need not crash more often to be to blame."""
    planner, executor = opened(whole=True)
    for name in ("one", "other"):
        planner.submit(request(name, prompt=1, max_tokens=1, pooling=Pooling(kind="mean")))
    planner.step_failed(planner.next_step().step_id, MemoryError("full"))
    run(planner, executor)
    assert planner.statistics().step_tokens == 1
    planner.submit(request("poison", prompt=60, max_tokens=1, pooling=Pooling(kind="mean")))
    crashes = 0
    while (plan := planner.next_step()) is not None and plan.chunks:
        planner.step_failed(plan.step_id, RuntimeError("boom"))
        crashes += 1
    assert isinstance(planner.take_actions()[-1].error, PoisonRequest)
    assert crashes <= 8, f"it crashed {crashes} times before it was found"


def asks(planner: Planner) -> list[Acquire | Release]:
    return [action for action in planner.take_actions() if isinstance(action, Acquire | Release)]


def test_who_finds_its_cross_kv_resident_gives_its_entry_back_at_once():
    """The bytes of an entry are for those who still have to read it."""
    planner, _ = opened()
    for name in ("writes", "joins"):
        planner.submit(request(name, items=(item("a"),)))
    for ask in asks(planner):
        planner.encoder_ready(ask.holder)
    planner.next_step()
    released = [ask.holder for ask in asks(planner)]
    assert released == ["joins/1"], "the one who writes holds it until its step is done, the other one no more"


def test_who_has_lost_its_cached_pages_starts_without_them_whatever_comes_back():
    """They held its first image, so that it had asked for the second one alone. If it changed its mind with every page
    that comes or goes it might never start. That is for one start alone: after a failed step it finds them again."""
    planner, executor = opened(pages=6, running=1, prefix_caching=True, encoder_cache_bytes=200)
    executor.outputs |= {"r": 200, "q": 100}
    spans = {"r": ((0, 5),), "q": ((6, 9),)}
    items = [
        EncoderItem(key=key, payload=key, embeddings=5, size=executor.outputs[key], spans=spans[key]) for key in "rq"
    ]

    def ask_with_images(name: str, priority: int) -> None:
        planner.submit(request(name, prompt=10, max_tokens=1, priority=priority, items=tuple(items)))

    def grant() -> list[str]:
        asked = [action for action in asks(planner) if isinstance(action, Acquire)]
        for ask in asked:
            planner.encoder_ready(ask.holder)
        return [ask.item.key for ask in asked]

    def serve() -> None:
        while (plan := planner.next_step()) is not None or grant():
            if plan is not None:
                planner.step_done(executor.step(plan))

    ask_with_images("first", 0)
    grant()
    serve()
    planner.submit(request("large", prompt=4, max_tokens=20))
    ask_with_images("waits", 1)
    assert grant() == ["q"], "the first image lies in cached pages"
    steps = run(planner, executor)
    assert max(len(part.page_table) for plan in steps for part in plan.chunks) == 6, "every page was taken"
    assert [ask.item.key for ask in asks(planner) if isinstance(ask, Acquire)] == ["r"], "it asks for what they held"
    ask_with_images("overtakes", 0)
    grant()
    while "overtakes" in planner._sequences:
        planner.step_done(executor.step(planner.next_step()))
        if "overtakes" in planner._sequences:
            grant()
    planner.encoder_ready("waits/1")
    starts, again = [], []
    while plan := planner.next_step() or (grant() and planner.next_step()):
        (again if again or starts[-1:] == [None] else starts).extend(part.start for part in plan.chunks)
        if starts[-1:] != [None] and any(part.samples for part in plan.chunks):
            starts.append(None)
            planner.step_failed(plan.step_id, RuntimeError("boom"))
        else:
            planner.step_done(executor.step(plan))
    assert starts[:1] == [0], "it starts without them"
    assert again[:1] == [8], "it starts without them once more"


def test_a_running_decoder_is_part_of_every_step_whatever_is_read():
    planner, executor = opened(budget=8)
    planner.submit(request("talks", prompt=2, max_tokens=20, sampling=SamplingParams(ignore_eos=True)))
    planner.step_done(executor.step(planner.next_step()))
    for name in ("long", "longer"):
        planner.submit(request(name, prompt=40, max_tokens=1))
    for _ in range(10):
        plan = planner.next_step()
        assert plan.tokens > 4, "the rest of the step is for prompts"
        assert "talks" in planner.in_flight(plan.step_id).request_ids, "a running decoder is part of every step"
        planner.step_done(executor.step(plan))


def test_a_short_prompt_behind_a_long_one_is_read_in_the_next_step():
    planner, executor = opened(budget=16)
    planner.submit(request("long", prompt=60, max_tokens=1))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("short", prompt=3, max_tokens=1))
    lengths = [part.length for part in planner.next_step().chunks]
    assert lengths[1:] == [3], "a short prompt behind a long one is read in the next step"
    assert sum(lengths) == 16, "and nothing of the step is left unused"


def test_draft_tokens_take_no_token_that_a_prompt_wants():
    planner, executor = opened(budget=8, draft_tokens=3)
    planner.submit(request("talks", prompt=2, max_tokens=30, sampling=SamplingParams(ignore_eos=True)))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("long", prompt=48, max_tokens=1))
    for fed in range(0, 42, 7):
        plan = planner.next_step()
        assert [(part.length, part.draft_tokens) for part in plan.chunks] == [(1, 0), (7, 0)], f"a guess at {fed}"
        planner.step_done(executor.step(plan))


def test_draft_tokens_are_proposed_while_few_run():
    planner, executor = opened(budget=16, draft_tokens=3, draft_running=1)

    def drafted():
        plan = planner.next_step()
        planner.step_done(executor.step(plan))
        return {len(plan.chunks): sum(part.draft_tokens for part in plan.chunks)}

    planner.submit(request("first", prompt=2, max_tokens=30, sampling=SamplingParams(ignore_eos=True)))
    assert drafted() == drafted() == {1: 3}
    planner.submit(request("second", prompt=2, max_tokens=1))
    assert drafted() == {2: 0}, "one is beside it"
    assert drafted() == {1: 3}, "and has gone"


@pytest.mark.parametrize("follow", [True, False])
def test_draft_tokens_of_a_head_begin_behind_the_step_that_samples_first(follow):
    """A head proposes from what the step before has left. So must a sequence that starts anew."""
    planner, executor = opened(budget=3, running=1, draft_tokens=2, drafts_follow=follow)
    talks = SamplingParams(ignore_eos=True)
    planner.submit(request("calm", prompt=7, priority=1, max_tokens=20, sampling=talks))
    plans = []
    for _ in range(5):
        plans.append(planner.next_step())
        planner.step_done(executor.step(plans[-1]))
    planner.submit(request("urgent", prompt=2, priority=0, max_tokens=1))
    plans += run(planner, executor)
    began = {start.sequence_id: len(start.token_ids) for plan in plans for start in plan.started}
    chunks = [part for plan in plans for part in plan.chunks]
    assert len(began) == 3, "one was preempted"
    drafted = [part for part in chunks if part.draft_tokens]
    early = {part.sequence_id for part in drafted if part.start < began[part.sequence_id]}
    assert early == (set() if follow else {0, 2}), "where a step that reads has room for them"
    assert {part.sequence_id for part in drafted if part.start >= began[part.sequence_id]} == {0, 2}


def test_an_urgent_request_has_the_place_of_a_less_urgent_one_which_keeps_its_tokens():
    planner, executor = opened(running=1)
    planner.submit(request("calm", priority=1, max_tokens=9))
    for _ in range(4):
        planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("urgent", prompt=2, priority=0, max_tokens=2))
    plans = run(planner, executor)
    assert [start.prompt_length for plan in plans for start in plan.started] == [2, 3], "the urgent one runs first"
    assert [len(start.token_ids) for plan in plans for start in plan.started] == [2, 3 + 4], "no token is lost"
    assert planner.statistics().preemptions == 1
    assert planner.idle


def test_nobody_gives_way_where_there_is_room():
    planner, executor = opened(running=2)
    planner.submit(request("calm", priority=1))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("urgent", priority=0))
    run(planner, executor)
    assert planner.statistics().preemptions == 0, "nobody gives way where there is room"


def test_nobody_gives_way_to_an_equal_that_came_before():
    planner, executor = opened(running=1)
    planner.submit(request("early", items=(item("a"),)))
    executor.outputs["a"] = 1
    planner.submit(request("late"))
    planner.step_done(executor.step(planner.next_step()))
    for ask in asks(planner):
        planner.encoder_ready(ask.holder)
    run(planner, executor)
    assert planner.idle
    assert planner.statistics().preemptions == 0, "nobody gives way to an equal"


def test_nobody_gives_way_in_vain():
    """The urgent one needs more pages than all have that are less urgent."""
    planner, executor = opened(pages=8)
    planner.submit(request("large", prompt=20, max_tokens=6))
    planner.submit(request("calm", priority=1, max_tokens=3))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("urgent", prompt=16, max_tokens=1))
    run(planner, executor)
    assert planner.idle
    assert planner.statistics().preemptions == 0, "somebody gave way in vain"


def test_nobody_is_overtaken_by_more_than_1024_later_ones_for_each_level_of_priority():
    planner, executor = opened(running=1)
    planner.submit(request("first", prompt=1, max_tokens=1))
    planner.submit(request("patient", prompt=2, max_tokens=4, priority=1, sampling=SamplingParams(ignore_eos=True)))
    overtakers = 0
    for number in range(2_000):
        planner.submit(request(f"urgent {number}", prompt=1, max_tokens=1))
        plan = planner.next_step()
        if planner.in_flight(plan.step_id).request_ids == ("patient",):
            break
        overtakers += 1
        planner.step_done(executor.step(plan))
    assert 1_000 < overtakers <= 1_024, f"{overtakers} have overtaken it"
    planner.step_done(executor.step(plan))
    for name in set(planner._sequences) - {"patient"}:
        planner.abort(name)
    planner.submit(request("too late", prompt=1, max_tokens=1))
    run(planner, executor)
    assert planner.statistics().preemptions == 0, "who has waited for so long does not give way again"


def test_only_the_head_of_the_queue_acquires():
    planner, _ = opened()
    for number in range(100):
        planner.submit(request(f"r{number}", items=(item(f"k{number}"),)))
        told = asks(planner)
        assert number >= planner.limits.acquire_ahead or told, "the head of the queue acquires"
    held = {name for name, sequence in planner._sequences.items() if sequence.holds}
    assert held == {f"r{number}" for number in range(planner.limits.acquire_ahead)}, "only the head acquires"


def test_a_newcomer_is_not_started_where_those_who_run_will_need_the_pages():
    """It would be read for nothing: those who came before it take the pages back."""
    model = SimModel(max_positions=400, pages=110, page_size=4)
    limits = PlannerLimits.of(
        model.describe(), EngineConfig(max_running=8, max_step_tokens=32, steps_in_flight=1, prefix_caching=False)
    )
    for before in (60, 70, 80):
        planner, executor = Planner(limits), SimExecutor(model)
        executor.open()
        planner.submit(request("old", max_tokens=300, sampling=SamplingParams(ignore_eos=True)))
        for _ in range(before):
            planner.step_done(executor.step(planner.next_step()))
        planner.submit(request("newcomer", prompt=340, max_tokens=10))
        run(planner, executor)
        assert planner.idle
        needed = 3 + 299 + 340 + 9
        assert planner.statistics().tokens_fed <= 1.3 * needed, f"after {before} steps it was read for nothing"


def test_a_start_that_found_no_room_is_not_tried_again_before_room_comes():
    planner, executor = opened(pages=8, prefix_caching=True)
    planner.submit(request("runs", prompt=3, max_tokens=20))
    planner.step_done(executor.step(planner.next_step()))
    planner.submit(request("waits", prompt=30, max_tokens=1))
    tries, find = [], PageAllocator.find
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageAllocator, "find", lambda *arguments: (tries.append(1), find(*arguments))[1])
        while "runs" in planner._sequences:
            planner.step_done(executor.step(planner.next_step()))
    assert len(tries) <= 2, f"it was tried {len(tries)} times"
    assert len(run(planner, executor)[0].started) == 1


class _Counted(int):
    """Counts how often a place in a queue is looked at."""

    looks = 0

    def __hash__(self) -> int:
        type(self).looks += 1
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        type(self).looks += 1
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        type(self).looks += 1
        return int.__lt__(self, other)


@pytest.mark.parametrize("key", ["", "a"])
def test_aborting_thousands_that_wait_takes_work_in_proportion(key: str):
    class Counted(_Counted):
        pass

    count = 10_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "order_of", lambda priority, arrival: Counted(order_of(priority, arrival)))
        planner, _ = opened(running=1)
        for number in range(count):
            planner.submit(request(f"r{number}", items=(item(key),) if key else ()))
            planner.take_actions()
        Counted.looks = 0
        for number in range(count):
            planner.abort(f"r{number}")
            planner.take_actions()
            assert Counted.looks <= 10_000 + 50 * number, f"{Counted.looks} looks at places to abort {number}"
    assert planner.idle
