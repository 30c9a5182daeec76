"""A sequence whose draft tokens are wrong goes without them, for longer each time; once they are right, it has them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from triolet.core.config import EngineConfig, Speculation
from triolet.core.plan import SampledToken, StepResult
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import Request, SamplingParams
from triolet_testing.sim_model import SimModel

LONGEST = 15  # tokens without drafts


def drafts(most: int, right: Callable[[int], int], **speculation: Any) -> list[tuple[int, int, int]]:
    """Has ``most`` tokens sampled, where ``right(n)`` of the draft tokens after the n-th token are right. Returns
    after which tokens there were draft tokens, how many, and how many of them were right."""
    model = SimModel(pages=200).describe()
    config = EngineConfig(steps_in_flight=1, speculation=Speculation(**{"tokens": 4, **speculation}))
    planner = Planner(PlannerLimits.of(model, config))
    planner.submit(Request(id="r", prompt_token_ids=(5,), max_tokens=most, sampling=SamplingParams(ignore_eos=True)))
    found = []
    sampled = 0
    while (plan := planner.next_step()) is not None and plan.chunks:
        [part] = plan.chunks
        accepted = min(right(sampled), part.draft_tokens)
        if part.draft_tokens:
            found.append((sampled, part.draft_tokens, accepted))
        one = SampledToken(token_id=7, logprob=-1.0)
        answer = SampledToken(token_id=7, logprob=-1.0, accepted=(one,) * accepted)
        sampled += 1 + accepted
        planner.step_done(StepResult(step_id=plan.step_id, sampled=(answer,)))
    assert sampled == most
    return found


def lengths(most: int, right: Callable[[int], int], **speculation: Any) -> list[int]:
    return [length for length, _, _ in drafts(most, right, **speculation)]


def test_without_a_right_one_pauses_double_up_to_15_tokens():
    assert lengths(100, lambda _: 0) == [0, 2, 6, 14, 30, 46, 62, 78, 94]


def test_draft_tokens_that_are_right_never_pause():
    assert lengths(60, lambda _: 2) == list(range(0, 60 - 1, 3))
    assert lengths(60, lambda _: 1, tokens=1) == list(range(0, 60 - 1, 2)), "all that there was"


@given(st.integers(0, 200))
def test_a_text_that_begins_to_repeat_itself_has_draft_tokens_soon(begins):
    found = lengths(begins + 60, lambda sampled: 4 if sampled >= begins else 0)
    resumed = next(length for length in found if length >= begins)
    assert resumed <= begins + LONGEST
    after = [length for length in found if length >= resumed]
    assert all(later - earlier == 5 for earlier, later in pairwise(after)), "no pause since"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80))
@example([*[0] * 6, 1, *[0] * 73])  # two were wrong, then one is right
def test_one_right_token_halves_the_pause_and_two_or_all_end_it(right):
    doubts = 0
    for (length, proposed, accepted), (later, _, _) in pairwise(drafts(80, lambda n: right[n % len(right)])):
        doubts = max(doubts - 1, 0) if accepted else min(doubts + 1, 4)
        doubts *= not (accepted > 1 or accepted == proposed)
        assert later - length == accepted + 2**doubts
