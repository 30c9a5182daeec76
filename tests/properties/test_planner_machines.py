"""The promises of the planner in many histories, drawn one event at a time; `planner_machine.py` says which."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from triolet.core.request import Probe, SamplingParams

from .planner_machine import KEYS, PLACED, UNITS, PlannerMachine

SEARCHES = (SamplingParams(beam_size=2, patience=1.0), SamplingParams(beam_size=3, length_penalty=0.5))


class WholePromptsMachine(PlannerMachine):
    """Models that read a prompt at once: each is one chunk, and holds no pages."""

    @initialize(running=st.integers(1, 4), budget=st.integers(2, 12), depth=st.integers(1, 2))
    def open(self, running: int, budget: int, depth: int) -> None:
        super().open(pages=1, slots=1, running=running, budget=budget, capacity=1, depth=depth, whole=True)


class LateMachine(PlannerMachine):
    """The encoder cache's answers take their time, whatever else happens meanwhile."""

    @initialize(
        pages=st.integers(6, 14),
        slots=st.integers(1, 3),
        running=st.integers(1, 4),
        budget=st.integers(2, 12),
        capacity=st.integers(1, 3),
        depth=st.integers(1, 2),
        caching=st.booleans(),
    )
    def open(self, **sizes: int) -> None:
        super().open(**sizes, delays=True)

    @precondition(lambda self: self.answers)
    @rule(most=st.integers(1, 3))
    def an_answer_comes(self, most: int) -> None:
        self.cache_answers(most)


class SharingMachine(PlannerMachine):
    """Always with prefix caching and little room: more is shared, and evicted, in as many examples."""

    @initialize(
        pages=st.integers(6, 9),
        running=st.integers(1, 3),
        budget=st.integers(4, 10),
        capacity=st.integers(1, 2),
        depth=st.integers(1, 2),
        draft_tokens=st.sampled_from((0, 3)),
        headroom=st.sampled_from((0, 1)),
    )
    def open(
        self, pages: int, running: int, budget: int, capacity: int, depth: int, draft_tokens: int, headroom: int = 0
    ) -> None:
        sizes = {"pages": pages, "running": running, "budget": budget, "capacity": capacity, "depth": depth}
        super().open(**sizes, slots=1, caching=True, draft_tokens=draft_tokens, headroom=headroom)


class SearchMachine(PlannerMachine):
    """Beam searches among the other requests."""

    @rule(
        length=st.integers(1, 8),
        key=st.sampled_from((*KEYS, None)),
        image=st.sampled_from((None, None, "p", "q")),
        max_tokens=st.integers(1, 9),
        priority=st.integers(0, 1),
        poison=st.sampled_from((False, False, False, True)),
        sampling=st.sampled_from(SEARCHES),
        probe=st.none() | st.integers(0, 12),
    )
    def submit_search(
        self,
        length: int,
        key: str | None,
        image: str | None,
        max_tokens: int,
        priority: int,
        poison: bool,
        sampling: SamplingParams,
        probe: int | None,
    ) -> None:
        """Prompts that begin as others do, with audio, an image in front of the text, or neither."""
        text = tuple(1 + (len(self.requests) // 4 + i) % 60 for i in range(length))
        items = () if key is None else (self.item(key, self.model.encoder_embeddings, ()),)
        if image is not None:
            text = (*(61 for _ in range(PLACED[image])), *text)
            items = (self.item(image, PLACED[image], ((0, PLACED[image]),), units=UNITS[image]),)
        asked = None if probe is None else Probe(position=min(probe, len(text) - 1), token_ids=(3, 1))
        more = {"max_tokens": max_tokens, "priority": priority, "probe": asked, "sampling": sampling}
        self.ask(text, items, poison=poison, **more)


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(stateful_step_count=50, max_examples=settings.default.max_examples * 5 // 8)
TestWholePrompts = WholePromptsMachine.TestCase
TestWholePrompts.settings = settings(stateful_step_count=30, max_examples=settings.default.max_examples // 4)
TestLate = LateMachine.TestCase
TestLate.settings = settings(stateful_step_count=50, max_examples=settings.default.max_examples // 4)
TestSearch = SearchMachine.TestCase
TestSearch.settings = settings(stateful_step_count=40, max_examples=settings.default.max_examples // 10)


def test_what_is_shared_keeps_every_promise():
    """Examples that never came into the situations in which sharing goes wrong would prove nothing of it."""
    SharingMachine.seen.clear()
    examples = settings(stateful_step_count=50, max_examples=settings.default.max_examples // 2)
    run_state_machine_as_test(SharingMachine, settings=examples)
    for probed in (True, False):
        what = f"feeds a page that it finds, probe: {probed}"
        assert SharingMachine.seen[what], "no example shares a page that a probe, or an alignment or pooling, needs"
