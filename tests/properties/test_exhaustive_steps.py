"""Every order of events on small schedulers: our real planner and ledger, with pages, images and two steps in flight.

    python -m pytest tests/properties/test_exhaustive_steps.py -s

Two or three requests ask, and may leave at any time; steps are planned and run in every interleaving. In some worlds a
step fails, and those in flight behind it are skipped; the answers of the encoder cache come late there, as messages do.
The kit for schedulers judges each event. Sequences that lead to the same state are followed on from once, and every
request asks once, so the search ends and has all states. From each of them the liveness promises are checked: with a
device that works everybody is served, and everything comes back.
"""

from __future__ import annotations

import hashlib
import pickle
from itertools import chain, repeat

import pytest
from attrs import frozen
from hypothesis import settings
from triolet_scheduler import TrioletScheduler

from triolet.core.ledger_values import Decisions
from triolet.core.planning.pages import PageAllocator
from triolet_kit.scheduler_play import SchedulerPlay
from triolet_kit.schedulers import Item, Limits, NewRequest, SchedulerDeclaration, Step


@frozen
class World:
    """What there is, and who asks."""

    limits: Limits
    requests: tuple[NewRequest, ...]
    long: bool = False  # for ``make soak``
    failures: int = 0  # of steps


def limits(pages: int, tokens: int, *, running: int = 2, depth: int = 2, states: int = 0) -> Limits:
    sizes = {"pages": pages, "page_size": 2, "max_step_tokens": tokens, "max_running": running, "room": 1}
    return Limits(**sizes, steps_in_flight=depth, states=states)


def request(
    name: str, tokens: tuple[int, ...], max_tokens: int, *items: tuple[str, int], priority: int = 0
) -> NewRequest:
    placed = tuple(Item(key, 1, start, 1) for key, start in items)
    return NewRequest(id=name, tokens=tokens, max_tokens=max_tokens, items=placed, priority=priority)


WORLDS = {
    "two prompts that begin alike": World(limits(3, 3), (request("a", (1, 1, 2), 2), request("b", (1, 1, 1), 2))),
    "two that grow beyond the pages": World(limits(3, 2), (request("a", (1,), 3), request("b", (2,), 3))),
    "two prompts that begin alike, and one state to keep": World(
        limits(4, 3, states=2), (request("a", (1, 1, 2), 2), request("b", (1, 1, 1), 1))
    ),
    "two places, one state, and a failed step": World(
        limits(4, 3, depth=1, states=1), (request("a", (1, 1, 2), 1), request("b", (1,), 1, priority=1)), failures=1
    ),
    "an urgent one": World(limits(2, 3), (request("a", (1, 1, 2), 2, priority=1), request("b", (2, 1, 1), 2))),
    "one image for two": World(
        limits(3, 3), (request("a", (9, 1, 2), 1, ("i", 0)), request("b", (1, 9, 1), 1, ("i", 1)))
    ),
    "two images, room for one": World(
        limits(4, 3), (request("a", (9, 1, 9), 1, ("i", 0), ("j", 2)), request("b", (9, 2), 1, ("j", 0)))
    ),
    "one place, and its holder needs the room of the next": World(
        limits(4, 3, running=1), (request("a", (9, 1, 9), 1, ("i", 0), ("j", 2)), request("b", (1, 9), 1, ("i", 1)))
    ),
    **{
        f"an urgent image and a failed step, places: {running}, in flight: {depth}": World(
            limits(4, 4, running=running, depth=depth),
            (request("a", (9, 1), 1, ("i", 0)), request("b", (1, 2, 1)[: depth + 1], depth, priority=1)),
            long=depth > 1,
            failures=1,
        )
        for running, depth in ((1, 1), (1, 2), (2, 2))
    },
    "three in two places and a failed step": World(
        limits(3, 3),
        (request("a", (1, 1, 2), 2), request("b", (9, 1), 1, ("i", 0)), request("c", (2,), 2, priority=1)),
        long=True,
        failures=1,
    ),
    "three requests": World(
        limits(3, 3), (request("a", (1, 1, 2), 2), request("b", (1, 1, 1), 2), request("c", (2, 2), 2)), long=True
    ),
}


class LateScheduler(TrioletScheduler):
    """The planner hears of an encoder output some time after the ledger has said that it is ready."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.answers: list[str] = []

    def obey(self, decisions: Decisions) -> None:
        self.frees += decisions.free
        self.answers += [hold.holder for hold in decisions.ready]

    def hear(self) -> None:
        """The planner hears the oldest answer."""
        self.planner.encoder_ready(self.answers.pop(0))


class FailingPlay(SchedulerPlay):
    """A device that fails so many ``failures``, each at any step, and works from then on."""

    scheduler: TrioletScheduler

    def __init__(self, world: World) -> None:
        scheduler = (LateScheduler if world.failures else TrioletScheduler)(world.limits)
        super().__init__(scheduler, world.limits, SchedulerDeclaration(settled=True, states=bool(world.limits.states)))
        self.failures = world.failures
        self.broken_epoch = -1

    def may_fail(self) -> bool:
        """Whether the oldest step may fail now."""
        plan = self.flights[0].own if self.flights else None
        return bool(self.failures) and plan is not None and plan.epoch != self.broken_epoch

    def fail_step(self) -> None:
        """The oldest step fails."""
        self.failures -= 1
        self.broken_epoch = self.flights[0].own.epoch
        self.drop(skipped=False)

    @property
    def answers(self) -> list[str]:
        """The answers of the encoder cache that are on their way."""
        return self.scheduler.answers if isinstance(self.scheduler, LateScheduler) else []

    def hear(self) -> None:
        """One of them arrives."""
        assert isinstance(self.scheduler, LateScheduler)
        self.scheduler.hear()

    def turn(self) -> bool:
        """See `SchedulerPlay.turn`. Nothing is late any more."""
        while self.answers:
            self.hear()
        return super().turn()

    def run(self) -> bool:
        """See `SchedulerPlay.run`. A step behind one that failed is skipped."""
        if self.flights and self.flights[0].own is not None and self.flights[0].own.epoch == self.broken_epoch:
            self.drop(skipped=True)
            return True
        return super().run()

    def drop(self, *, skipped: bool) -> None:
        """What the oldest step feeds comes to nothing. What it encodes and frees are other calls of the device."""
        step = self.flights.pop(0)
        for chunk in step.chunks:
            if chunk.request in self.live:
                self.known[chunk.request] = len(self.device.records[chunk.request].tokens)
        others = Step(encodes=step.encodes, frees=step.frees)
        self.device.run(others)
        self.scheduler.update(others, {})
        self.scheduler.planner.step_failed(step.own.step_id, RuntimeError("boom"), skipped=skipped)
        assert not self.scheduler.act(), "nobody ends by a step that failed"


def events(play: FailingPlay, requests: tuple[NewRequest, ...]) -> list[tuple[str, int]]:
    """What can happen now."""
    asked = [one.id in play.device.records for one in requests]
    found = [("ask", number) for number, has in enumerate(asked) if not has]
    found += [("leave", number) for number, one in enumerate(requests) if one.id in play.live]
    found += [("plan", 0)] if len(play.flights) < play.limits.steps_in_flight else []
    found += [("hear", 0)] if play.answers else []
    found += [("fail", 0)] if play.may_fail() else []
    return found + ([("run", 0)] if play.flights else [])


def happen(play: FailingPlay, event: tuple[str, int], requests: tuple[NewRequest, ...]) -> None:
    what, number = event
    match what:
        case "ask":
            play.ask(requests[number])
        case "leave":
            play.finish(requests[number].id)
        case "plan":
            play.plan()
        case "run":
            play.run()
        case "fail":
            play.fail_step()
        case "hear":
            play.hear()
    play.stuck = 0  # how long it took is no part of a state


def explore(world: World) -> tuple[int, int]:
    """Follows every event from every state. How many states there are, and the most events to one of them."""
    start = pickle.dumps(FailingPlay(world))
    known, frontier, depth = {_name(start)}, {start: ()}, 0
    while frontier:
        new: dict[bytes, tuple[tuple[str, int], ...]] = {}
        for kept, path in frontier.items():
            first = pickle.loads(kept)
            plays = chain([first], map(pickle.loads, repeat(kept)))
            for event, play in zip(events(first, world.requests), plays, strict=False):
                _tell_of((*path, event), happen, play, event, world.requests)
                state = pickle.dumps(play)
                if _name(state) not in known:
                    known.add(_name(state))
                    new[state] = (*path, event)
                    _tell_of(new[state], _settle, play)
        frontier = new
        depth += bool(new)
    return len(known), depth


def _name(state: bytes) -> bytes:
    return hashlib.blake2b(state, digest_size=16).digest()


def _settle(play: SchedulerPlay) -> None:
    """Looks for leaks where nobody is left: the way there, from a state where somebody is, is of events too."""
    is_quiet = not play.live and not play.flights
    play.serve_everybody()
    if is_quiet:
        play.look_for_leaks()


def _tell_of(path, act, *arguments) -> None:  # type: ignore[no-untyped-def]
    try:
        act(*arguments)
    except AssertionError as error:
        raise AssertionError(f"{error}, after {path}") from error


@pytest.mark.parametrize("name", WORLDS)
def test_every_order_of_events_keeps_every_promise(name: str) -> None:
    world = WORLDS[name]
    if world.long and settings.get_current_profile_name() != "soak":
        pytest.skip("long: make soak runs it")
    states, depth = explore(world)
    print(f"\n{name}: all {states:,} states, {depth} events at most", end="")  # noqa: T201
    assert states > 400
    assert depth > 10


def test_the_exploration_finds_what_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence's first page never comes back."""
    give_back = PageAllocator.give_back
    monkeypatch.setattr(PageAllocator, "give_back", lambda self, pages: give_back(self, pages[1:]))
    with pytest.raises(AssertionError, match=r"always freed eventually: .*, after .*'ask', 0"):
        explore(WORLDS["two that grow beyond the pages"])
