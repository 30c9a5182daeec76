"""Adapters in the planner, over a device that knows what lies in each slot.

The machine loads and unloads adapters, submits and aborts requests, answers steps or lets them fail, and loses the
device's generation, in any order. No request reads a slot with another adapter than its own, no adapter is dropped
while it is needed, each is dropped at last, and each request ends.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import count

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from triolet.core.errors import UnknownModel
from triolet.core.plan import SampledToken, StepPlan, StepResult
from triolet.core.planning import actions as a
from triolet.core.planning.limits import PlannerLimits
from triolet.core.planning.planner import Planner
from triolet.core.request import Request, SamplingParams

from .machines import Machine

KEYS = ("a", "b", "c", "d")


class AdapterMachine(Machine):
    @initialize(slots=st.integers(1, 3), running=st.integers(1, 4), depth=st.integers(1, 2), pages=st.integers(8, 20))
    def open(self, slots: int, running: int, depth: int, pages: int) -> None:
        self.planner = Planner(
            PlannerLimits(
                max_running=running,
                max_step_tokens=6,
                page_size=2,
                pages=pages,
                cross_slots=0,
                adapters=slots,
                eos_token_ids=frozenset(),
                steps_in_flight=depth,
                prefix_caching=True,
            )
        )
        self.numbers = count()
        self.requests: dict[str, Request] = {}
        self.accepted: set[str] = set()  # requests whose adapter was loaded when they came
        self.ended: dict[str, a.Action] = {}
        self.loaded = Counter[str]()  # as callers know it
        self.held = Counter[str]()  # as the device knows it, when all that was sent is done
        self.sent: deque[StepPlan] = deque()
        self.slots: dict[int, str] = {}
        self.started: dict[int, tuple[str, int | None]] = {}  # sequences, with their requests' adapters and their slots
        self.broken: int = -1  # the epoch of a step that failed
        for key in KEYS:
            self.load(key)

    # -- what callers do ---------------------------------------------------------------------------------------------

    @rule(key=st.sampled_from(KEYS))
    def load(self, key: str) -> None:
        self.held[key] += 1
        self.loaded[key] += 1
        self.planner.adapters.loaded(key)

    @precondition(lambda self: self.loaded.total())
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.loaded.elements())))
        self.loaded[key] -= 1
        self.planner.adapters.unload(key)

    @rule(keys=st.lists(st.sampled_from(("", *KEYS)), min_size=1, max_size=4), length=st.integers(1, 6))
    def submit(self, keys: list[str], length: int) -> None:
        for priority, key in enumerate(keys):
            name = f"r{next(self.numbers)}"
            told = {"max_tokens": 3, "sampling": SamplingParams(ignore_eos=True), "priority": priority % 2}
            self.requests[name] = Request(id=name, prompt_token_ids=tuple(range(1, 1 + length)), adapter=key, **told)
            if not key or self.loaded[key]:
                self.accepted.add(name)
            self.planner.submit(self.requests[name])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.planner.abort(data.draw(st.sampled_from(sorted(self.requests))))

    # -- what the scheduler and the device do ------------------------------------------------------------------------

    @rule()
    def plan(self) -> None:
        while (plan := self.planner.next_step()) is not None:
            self.sent.append(plan)
            step = self.planner.in_flight(plan.step_id)
            fed = {part.sequence_id: name for part, name in zip(plan.chunks, step.request_ids, strict=True)}
            for start in plan.started:
                self.started[start.sequence_id] = self.requests[fed[start.sequence_id]].adapter, start.adapter

    @rule(fails=st.booleans())
    def answer(self, fails: bool = False) -> None:
        self.plan()
        if not self.sent:
            return
        plan = self.sent.popleft()
        if plan.epoch == self.broken:
            self.planner.step_failed(plan.step_id, RuntimeError("skipped"), skipped=True)
            return
        for write in plan.adapter_writes:
            assert self.held[write.key] > 0, f"{write} of an adapter that was dropped"
            self.slots[write.slot] = write.key
        if fails:
            self.broken = plan.epoch
            for write in plan.adapter_writes:
                self.slots[write.slot] = "broken"
            self.planner.step_failed(plan.step_id, RuntimeError("a fault"))
            return
        for part in plan.chunks:
            key, slot = self.started[part.sequence_id]
            assert (slot is None) == (not key), f"{key!r} reads slot {slot}"
            assert slot is None or self.slots[slot] == key, f"{key!r} reads {self.slots[slot]!r}"
        sampled = tuple(SampledToken(token_id=7 if part.samples else None) for part in plan.chunks)
        self.planner.step_done(StepResult(step_id=plan.step_id, sampled=sampled))

    @rule()
    def lose(self) -> None:
        self.sent.clear()
        self.slots.clear()
        self.planner.generation_lost()

    @invariant()
    def act(self) -> None:
        if not hasattr(self, "planner"):
            return
        for action in self.planner.take_actions():
            if isinstance(action, a.DropAdapter):
                self.held[action.key] -= 1
            if isinstance(action, a.Finish | a.Fail | a.Abort):
                assert action.request_id not in self.ended, f"{action} is a second end"
                self.ended[action.request_id] = action
                if isinstance(action, a.Fail) and isinstance(action.error, UnknownModel):
                    assert action.request_id not in self.accepted, f"{action}, but its adapter was there"
        for key in KEYS:
            assert self.held[key] >= self.loaded[key], f"{key} is dropped too often"
            left = any(one.adapter == key and name in self.accepted for name, one in self.running())
            assert not left or self.held[key] > 0, f"{key} is dropped, but needed"

    def running(self) -> list[tuple[str, Request]]:
        return [(name, one) for name, one in self.requests.items() if name not in self.ended]

    def teardown(self) -> None:
        if self.failed or not hasattr(self, "planner"):
            return
        for _ in range(2_000):
            self.plan()
            self.act()
            if not self.sent:
                break
            self.answer()
        self.act()
        assert self.planner.idle, f"{[name for name, _ in self.running()]} wait for ever"
        for key in KEYS:
            while self.loaded[key]:
                self.loaded[key] -= 1
                self.planner.adapters.unload(key)
        self.act()
        assert not self.held.total(), f"{self.held} are never dropped"
        slots = self.planner._room.adapters
        assert (slots.free, slots.cached) == (slots.total, 0)


def test_each_request_has_its_adapter_and_each_adapter_is_dropped_at_last() -> None:
    run_state_machine_as_test(AdapterMachine, settings=settings(stateful_step_count=40))
