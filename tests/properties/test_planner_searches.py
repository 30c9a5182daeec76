"""What the planner does with a beam search, as one history shows it; see `SearchMachine` for many histories."""

from __future__ import annotations

from collections.abc import Callable

from triolet.core.plan import StepPlan
from triolet.core.planning.actions import Fail, Finish
from triolet.core.planning.planner import Planner
from triolet.core.request import SamplingParams
from triolet_testing.sim import SimExecutor

from .test_planner import opened, request, run


def search(name: str = "search", beams: int = 3, **more: object) -> object:
    return request(name, sampling=SamplingParams(beam_size=beams), **more)


def ends_of(planner: Planner, executor: SimExecutor, steps: int) -> dict[str, Finish | Fail]:
    """How requests have ended after up to so many steps, some of which may fail."""
    ends: dict[str, Finish | Fail] = {}
    for _ in range(steps):
        plan = planner.next_step()
        if plan is None:
            break
        try:
            planner.step_done(executor.step(plan))
        except (RuntimeError, MemoryError) as error:
            planner.step_failed(plan.step_id, error)
        ends |= {action.request_id: action for action in planner.take_actions() if isinstance(action, Finish | Fail)}
    return ends


ENDLESS = SamplingParams(beam_size=2, ignore_eos=True)


def on_a_device_that_has_long_gone_well() -> tuple[Planner, SimExecutor]:
    planner, executor = opened(pages=200)
    for index in range(70):
        planner.submit(request(f"earlier {index}", prompt=1, max_tokens=2))
        run(planner, executor)
    planner.take_actions()
    return planner, executor


def fails_at(positions: list[int]) -> Callable[[object, StepPlan], Exception | None]:
    """A fault of the step that feeds the first of ``positions``, then of the one that feeds the next."""

    def fault(_: object, plan: StepPlan) -> Exception | None:
        if positions and any(part.start == positions[0] for part in plan.chunks):
            positions.pop(0)
            return RuntimeError("boom")
        return None

    return fault


def test_a_search_feeds_its_prompt_once_and_then_a_token_of_each_beam():
    """The prompt of 7 has one full page of 4; each block behind it has a page for each beam."""
    planner, executor = opened()
    planner.submit(search(prompt=7, max_tokens=4))
    first, *others = run(planner, executor)
    assert (first.tokens, [len(part.page_table) for part in first.chunks]) == (7, [1 + 3])
    fed = [(part.start, plan.tokens, len(part.page_table)) for plan in others for part in plan.chunks]
    assert fed[:2] == [(7, 3, 4), (8, 3, 7)]


def test_only_the_full_pages_of_a_searchs_prompt_can_be_found():
    planner, executor = opened(prefix_caching=True)
    planner.submit(search(prompt=9, max_tokens=10))
    run(planner, executor)
    assert planner.statistics().pages_cached == 2, "pages_cached: no page that a beam wrote is kept"
    planner.submit(search("again", prompt=9, max_tokens=10))
    run(planner, executor)
    assert planner.statistics().tokens_cached == 8


def test_a_search_that_crashes_one_late_step_does_not_run_all_the_others_again_and_again():
    """The others went well each time. To a crash of any of 150 steps, chance would do this dozens of times."""
    planner, executor = on_a_device_that_has_long_gone_well()
    planner.submit(request("search", prompt=3, max_tokens=160, sampling=ENDLESS))
    executor.fault = lambda _, plan: RuntimeError("boom") if any(part.start >= 150 for part in plan.chunks) else None
    ends = ends_of(planner, executor, 2 * 150)
    assert "search" in ends, "it starts anew more than once"
    assert "crashed its step 2 times, also when it ran alone" in str(ends["search"].error)


def test_a_search_whose_steps_fail_at_different_places_is_forgiven():
    """A step further than ever clears it."""
    planner, executor = opened()
    planner.submit(search(prompt=3, max_tokens=8))
    executor.fault = fails_at([3, 4, 5, 6])
    assert isinstance(ends_of(planner, executor, 80)["search"], Finish)


def test_a_search_that_fails_where_it_went_well_before_has_a_flaky_device_and_is_innocent():
    """Its first failure may be its own fault. The next twelve are in steps that it has had, so chance makes them."""
    planner, executor = on_a_device_that_has_long_gone_well()
    planner.submit(request("search", max_tokens=60, sampling=ENDLESS))
    failing = [40, *range(10, 22)]
    executor.fault = fails_at(failing)
    assert isinstance(ends_of(planner, executor, 400)["search"], Finish), "an innocent search is condemned"
    assert not failing


def test_draft_tokens_are_never_proposed_for_a_search():
    planner, executor = opened(draft_tokens=3)
    planner.submit(search(prompt=3, max_tokens=6))
    planner.submit(request("other", prompt=3, max_tokens=6))
    plans = run(planner, executor)
    assert any(part.draft_tokens for plan in plans for part in plan.chunks)
    assert not any(part.draft_tokens and part.beams > 1 for plan in plans for part in plan.chunks)
    assert not plans[0].chunks[0].draft_tokens, "nor behind its prompt"


def test_steps_share_their_tokens_among_searches_and_nobody_waits_for_ever():
    """Three rows each of a budget of five: one search at a time, in turns."""
    planner, executor = opened(budget=5)
    for name in ("one", "two", "three"):
        planner.submit(search(name, prompt=1, max_tokens=8))
    plans = run(planner, executor)
    assert planner.idle
    assert all(plan.tokens <= 5 for plan in plans)
    turns = [part.sequence_id for plan in plans for part in plan.chunks if part.beams > 1]
    while len(set(turns)) == 3:
        assert len(set(turns[:4])) >= 2, "one search keeps the others from their turns"
        turns.pop(0)
