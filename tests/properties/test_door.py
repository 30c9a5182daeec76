"""The door: no place is lost or given twice, the order holds, and nobody is overtaken for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet.api.hosts.door import Door
from triolet.core.errors import InvalidRequest, Overloaded
from triolet.core.order import ARRIVALS_PER_PRIORITY, MOST_PRIORITY, order_of, read_priority

PRIORITIES = st.integers(-2, 2)


@define(eq=False)
class Visit:
    """One caller: it enters, stays until it is told to go, and leaves."""

    priority: int
    arrival: int
    scope: trio.CancelScope = field(factory=trio.CancelScope)
    go: trio.Event = field(factory=trio.Event)
    inside: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        return (order_of(self.priority, self.arrival), self.arrival)

    async def run(self, door: Door) -> None:
        with self.scope:
            await door.enter(self.priority)
            self.inside = True
            try:
                await self.go.wait()
            finally:
                self.inside = False
                door.leave()


@define(eq=False)
class Hall:
    """A door with its callers, beside what should be: who is inside and who waits."""

    door: Door
    nursery: trio.Nursery
    inside: list[Visit] = field(factory=list)
    waiting: list[Visit] = field(factory=list)
    arrivals: int = 0

    async def arrive(self, priority: int) -> None:
        visit = Visit(priority, self.arrivals)
        self.arrivals += 1
        self.nursery.start_soon(visit.run, self.door)
        (self.inside if len(self.inside) < self.door.places else self.waiting).append(visit)
        await trio.testing.wait_all_tasks_blocked()

    def leave(self, index: int) -> None:
        if self.inside:
            self.inside.pop(index % len(self.inside)).go.set()
            self._next()

    def cancel_waiting(self, index: int) -> None:
        if self.waiting:
            self.waiting.pop(index % len(self.waiting)).scope.cancel()

    def cancel_inside(self, index: int) -> None:
        if self.inside:
            self.inside.pop(index % len(self.inside)).scope.cancel()
            self._next()

    async def pass_by(self) -> None:
        """One who does not wait."""
        self.arrivals += len(self.inside) < self.door.places
        if len(self.inside) == self.door.places:
            with pytest.raises(Overloaded, match="wait=True"):
                self.door.enter_nowait()
        else:
            self.door.enter_nowait()
            self.door.leave()

    def _next(self) -> None:
        if self.waiting:
            first = min(self.waiting, key=lambda visit: visit.rank)
            self.waiting.remove(first)
            self.inside.append(first)

    async def check(self) -> None:
        await trio.testing.wait_all_tasks_blocked()
        assert self.door.free == self.door.places - len(self.inside), "a place is lost or doubled"
        assert self.door.waiting == len(self.waiting), "a caller that waits is forgotten, or one that left is not"
        assert all(visit.inside for visit in self.inside), "another one came in"
        assert not any(visit.inside for visit in self.waiting), "somebody came in too soon"


OPERATIONS = st.one_of(
    st.tuples(st.just("arrive"), PRIORITIES),
    st.tuples(st.sampled_from(["leave", "cancel_waiting", "cancel_inside"]), st.integers(0, 9)),
    st.tuples(st.just("pass_by"), st.none()),
)


def play(places: int, operations: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            hall = Hall(Door(places), nursery)
            for name, argument in operations:
                if name == "arrive":
                    await hall.arrive(argument)
                elif name == "pass_by":
                    await hall.pass_by()
                else:
                    getattr(hall, name)(argument)
                await hall.check()
            nursery.cancel_scope.cancel()
        assert (hall.door.free, hall.door.waiting) == (places, 0)

    trio.run(main, clock=trio.testing.MockClock())


@settings(max_examples=150)
@given(st.integers(1, 3), st.lists(OPERATIONS, max_size=30))
def test_places_go_by_priority_and_arrival_and_none_is_lost(places: int, operations: list[tuple[str, Any]]) -> None:
    play(places, operations)


@pytest.mark.parametrize("cancel_first", [True, False])
async def test_a_place_handed_to_a_caller_that_is_cancelled_in_the_same_tick_is_not_lost(
    cancel_first: bool, nursery: trio.Nursery
) -> None:
    door = Door(1)
    await door.enter(0)
    first, second = Visit(0, 1), Visit(0, 2)
    for visit in (first, second):
        nursery.start_soon(visit.run, door)
        await trio.testing.wait_all_tasks_blocked()
    steps: list[Callable[[], object]] = [first.scope.cancel, door.leave]
    for step in steps if cancel_first else reversed(steps):
        step()
    await trio.testing.wait_all_tasks_blocked()
    assert (first.inside, second.inside, door.waiting) == (False, True, 0)
    second.go.set()
    await trio.testing.wait_all_tasks_blocked()
    assert door.free == 1


@given(st.integers(-MOST_PRIORITY, MOST_PRIORITY), st.integers(0, 10**9), st.integers(-MOST_PRIORITY, MOST_PRIORITY))
def test_nobody_is_overtaken_by_more_later_ones_than_the_rule_says(mine: int, arrival: int, theirs: int) -> None:
    most = max(0, mine - theirs) * ARRIVALS_PER_PRIORITY
    assert order_of(mine, arrival) <= order_of(theirs, arrival + most)
    assert most == 0 or order_of(theirs, arrival + most - 1) < order_of(mine, arrival)


@pytest.mark.parametrize("priority", [-101, 101, 10**9, 1.0, "0", None, True])
def test_a_priority_that_is_none_is_refused_with_what_is_allowed(priority: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"priority=.*allowed: an integer, -100 to 100"):
        read_priority(priority)
