"""Engines whose own loop calls the device: the loop runs in a thread, which ends with its workload."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from triolet_kit import SchedulerDeclaration, Step, StepLoop, examine_scheduler, replay_scheduler

from .mutants_of_schedulers import HashesWithoutParent
from .small_scheduler import SmallScheduler

ONE, TWO = (SchedulerDeclaration(refuses=True, steps_in_flight=n, overlaps=True) for n in (1, 2))


class LoopEngine:
    """An engine with a loop of its own. The loop receives, plans, launches, and waits for the step before if it is
    ``overlapped``, else for this one."""

    make_scheduler: Any = SmallScheduler

    def __init__(self, limits: Any, loop: StepLoop) -> None:
        self.scheduler, self.device, self.ended = self.make_scheduler(limits), loop, list[str]()
        self.overlapped = limits.steps_in_flight == 2

    def run_for_ever(self) -> None:
        flights: list[Step] = []
        while True:
            self.device.turn()
            step = self.scheduler.schedule()
            if step is not None:
                self.device.launch(step)
                flights.append(step)
            if flights and (step is None or len(flights) > self.overlapped):
                self.ended += self.scheduler.update(flights.pop(0), self.device.wait())


class Adapter:
    """It hands the calls on."""

    make_engine: Any = LoopEngine

    def __init__(self, limits: Any) -> None:
        self.loop = StepLoop(lambda loop: self.start(limits, loop))
        self.schedule, self.close = self.loop.plan, self.loop.close

    def start(self, limits: Any, loop: StepLoop) -> None:
        self.engine = self.make_engine(limits, loop)
        self.add_request = self.engine.scheduler.add_request
        self.finish = self.engine.scheduler.finish
        self.engine.run_for_ever()

    def update(self, _: Step, tokens: Any) -> list[str]:
        self.loop.take(tokens)
        ended, self.engine.ended = self.engine.ended, []
        return ended


@pytest.mark.parametrize("declared", [ONE, TWO])
def test_nothing_is_found_in_a_sound_engine_and_its_threads_end(declared: SchedulerDeclaration) -> None:
    before = threading.active_count()
    found = examine_scheduler(Adapter, declared, workloads=40, must_happen=["preemptions", "prefix hits"])
    found.raise_if_any()
    assert threading.active_count() == before


class Faulty(LoopEngine):
    make_scheduler = HashesWithoutParent


class Raises(LoopEngine):
    def run_for_ever(self) -> None:
        self.device.turn()
        raise ZeroDivisionError("in the loop")


class Returns(LoopEngine):
    def run_for_ever(self) -> None:
        self.device.turn()


class Forgets(LoopEngine):
    def run_for_ever(self) -> None:
        self.device.launch(Step(frees=["a"]))
        while True:
            self.device.turn()


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (Faulty, "prefix hits are what was computed"),
        (Raises, "raises nothing: ZeroDivisionError in run_for_ever"),
        (Returns, "speaks the protocol: returns"),
        (Forgets, "speaks the protocol: never waits"),
    ],
)
def test_what_the_loop_does_wrong_is_a_finding_and_its_threads_end(engine: type[LoopEngine], told: str) -> None:
    before = threading.active_count()
    harmless = SchedulerDeclaration(refuses=True, missed_free="harmless", overlaps=True)
    make = type("Wrong", (Adapter,), {"make_engine": engine})
    replays = (replay_scheduler(make, harmless, number=number) for number in range(1, 9))
    assert told in next(replay.broken.name for replay in replays if replay.broken)
    assert threading.active_count() == before
