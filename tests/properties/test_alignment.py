"""Alignments beside other requests: chunks, preemption, failed steps and cached pages change no time."""

from __future__ import annotations

from collections import defaultdict

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.core.config import EngineConfig
from triolet.core.planning.actions import Commit, Finish
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import Alignment, FinishReason, Request
from triolet_testing.sim import SimExecutor
from triolet_testing.sim_model import SimModel, expected_alignment, expected_tokens

TEXT = tuple(range(2, 22))


@st.composite
def histories(draw):
    """Requests that read beginnings of one text: most align it, some go on from it."""
    asked = []
    for index in range(draw(st.integers(1, 6))):
        length = draw(st.integers(2, 12))
        start = draw(st.sampled_from((None, 1, 2, length // 2 or 1, length - 1)))
        alignment = None if start is None else Alignment(start=start, frames=draw(st.integers(1, 9)))
        tokens = 3 if alignment is None else 1
        priority = draw(st.integers(-1, 1))
        asked.append(
            Request(
                id=f"r{index}",
                prompt_token_ids=TEXT[:length],
                alignment=alignment,
                max_tokens=tokens,
                priority=priority,
            )
        )
    return asked, draw(st.lists(st.integers(0, 4), min_size=len(asked), max_size=len(asked)))


@settings(max_examples=100)
@given(
    history=histories(),
    budget=st.integers(1, 9),
    pages=st.integers(8, 14),
    size=st.sampled_from((1, 2, 4)),
    caching=st.booleans(),
    depth=st.integers(1, 2),
    failing=st.sets(st.integers(0, 6), max_size=2),
    drafts=st.sampled_from((0, 2)),
)
def test_every_alignment_is_answered_once_and_truly(history, budget, pages, size, caching, depth, failing, drafts):
    """Over a device that notices every position that was not fed, or holds another sequence's KV."""
    asked, arrivals = history
    model = SimModel(max_positions=16, pages=pages * 2 // size, page_size=size)
    config = EngineConfig(max_running=3, max_step_tokens=budget, steps_in_flight=depth, prefix_caching=caching)
    limits = evolve(PlannerLimits.of(model.describe(), config), draft_tokens=drafts, draft_running=3, headroom=1)
    planner, executor = Planner(limits), SimExecutor(model)
    executor.open()
    told, ends, flights, waiting = defaultdict(list), {}, [], list(zip(arrivals, asked, strict=True))
    for step in range(400):
        for pair in [pair for pair in waiting if pair[0] <= step]:
            waiting.remove(pair)
            planner.submit(pair[1])
        while (plan := planner.next_step()) is not None:
            flights.append(plan)
        if flights:
            plan = flights.pop(0)
            try:
                executor.fault = lambda *_, broken=step in failing: RuntimeError("boom") if broken else None
                planner.step_done(executor.step(plan))
            except RuntimeError as error:
                planner.step_failed(plan.step_id, error)
                for doomed in flights:
                    planner.step_failed(doomed.step_id, error, skipped=True)
                flights.clear()
        for action in planner.take_actions():
            if isinstance(action, Commit):
                told[action.request_id] += action.sampled
            if isinstance(action, Finish):
                ends[action.request_id] = action.reason
    for request in asked:
        prompt, answers = request.prompt_token_ids, told[request.id]
        if request.alignment is None:
            true = expected_tokens(prompt, None, request.max_tokens, model)
            assert tuple(one.token_id for one in answers) == true, "others are disturbed"
            continue
        assert [one.aligned for one in answers] == [expected_alignment(prompt, None, request.alignment)], "the times"
        assert [one.token_id for one in answers] == [None], "an alignment samples nothing"
        assert ends[request.id] is FinishReason.ALIGNED, "a wrong reason for the end"
