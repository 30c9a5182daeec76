"""^C and cancellation between any two steps of several models: they come out, alone, and everything is given back."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from triolet import Engines, TrioletError
from triolet.actors.worker import Job
from triolet.api import engines as engines_module
from triolet.api import residents
from triolet_testing.sim import SimWorker
from triolet_testing.trio_tools.schedules import Batches, Schedule, Uniform, run_scheduled

from ..actors.shared import ask
from ..tracer import Tracer, alone
from .fleet import Fleet

OURS = (*(str(module.__file__) for module in (engines_module, residents)), __file__)
SIZES = {"a": 2000, "b": 3000, "c": 2000}

# -- ^C --------------------------------------------------------------------------------------------------------------


async def body(engines: Engines) -> None:
    """Loads, has another one give way, unloads, waits for an idle model to go."""
    async with engines:
        async with engines.use("a"):
            engines.statistics()
        await engines.load("b")
        await engines.unload("b")
        await trio.sleep(3)


def run(tracer: Tracer) -> tuple[Fleet, BaseException | None]:
    fleet = Fleet(SIZES)
    program = partial(body, fleet.engines(memory_budget=4000, idle_seconds=2, specs={"c": {"preload": True}}))
    return fleet, tracer.follow(partial(run_scheduled, program, schedule=Batches()))


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="^C is not heard here")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3))])
def test_a_control_c_at_any_line_gives_everything_back(first: int) -> None:
    """At each fourth moment; a thorough run has the others."""
    plain, broken = Tracer(OURS), list[str]()
    assert run(plain)[-1] is None
    assert len(plain.seen) > 150, "the lines are not followed"
    for line, time in plain.moments(__file__)[first::4]:
        fleet, error = run(Tracer(OURS, line, time))
        told = alone(error)
        if type(told) is not KeyboardInterrupt or hasattr(told, "__notes__") or fleet.open:
            broken.append(f"{Path(line.file).name}:{line.number}, time {time}: {error!r}, held: {fleet.open!r}")
    assert not broken, "\n".join(broken[:20])


# -- faults that meet ------------------------------------------------------------------------------------------------


@define
class Chaos:
    """Clients and an operator of three models that do not fit together, on devices that fail by chance."""

    dice: random.Random
    fleet: Fleet = field(init=False)
    rates: dict[Job, float] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.rates = {job: self.dice.choice([0, 0, 0, 0.2]) for job in (Job.OPEN, Job.STEP, Job.CLOSE)}
        faults = dict.fromkeys(SIZES, self.fault)
        config = {"verify": False, "stage_seconds": 60.0, "drain_seconds": self.dice.choice([0.0, 1.0, 30.0])}
        self.fleet = Fleet(SIZES, settings=config, faults=faults, make_worker=SimWorker)

    def fault(self, job: Job, _: object) -> BaseException | None:
        if self.dice.random() >= self.rates.get(job, 0):
            return None
        crash = self.dice.choice([SystemExit, RuntimeError]) if job is Job.STEP else RuntimeError
        return crash("injected")

    async def client(self, engines: Engines) -> None:
        dice = self.dice
        await trio.sleep(dice.random() * 8)
        name = dice.choice("abc")
        with trio.move_on_after(dice.choice([0, 0.5, 1.5, 60])):
            try:
                async with engines.use(name) as engine:
                    await ask(engine, dice.randrange(9), max_tokens=3)
                    await trio.sleep(dice.random())
            except TrioletError:
                pass

    async def operator(self, engines: Engines) -> None:
        for _ in range(self.dice.randrange(4)):
            await trio.sleep(self.dice.random() * 4)
            order = self.dice.choice([engines.load, engines.unload])
            with trio.move_on_after(self.dice.choice([0, 0.5, 100])):
                with suppress(TrioletError):
                    await order(self.dice.choice("abc"))

    async def watch(self, budget: int) -> None:
        """The devices that are open fit together."""
        while True:
            assert sum(SIZES[name] for name in self.fleet.open) <= budget, f"{self.fleet.open} together"
            await trio.sleep(0.05)

    async def main(self) -> None:
        budget = self.dice.choice([3000, 4000, 5000])
        leave = self.dice.choice([2.0, 6.0, 500.0])
        engines = self.fleet.engines(memory_budget=budget, idle_seconds=self.dice.choice([None, 0.0, 0.5]))
        async with trio.open_nursery() as outside:
            outside.start_soon(self.watch, budget)
            async with trio.open_nursery() as nursery:
                with trio.move_on_after(self.dice.choice([3, 2000])):
                    try:
                        async with engines:
                            for _ in range(8):
                                nursery.start_soon(self.client, engines)
                            nursery.start_soon(self.operator, engines)
                            await trio.sleep(leave)
                            if self.dice.random() < 0.2:
                                await engines.aclose(self.dice.choice([0, 1, None]))
                    except TrioletError:
                        pass  # an engine that ended badly
            outside.cancel_scope.cancel()
        self.fleet.check()


@given(seed=st.integers(0, 2**32), pick=st.sampled_from([Batches, Uniform]))
@settings(max_examples=25)
def test_whatever_meets_the_budget_holds_and_everything_is_given_back(
    seed: int, pick: Callable[[int], Schedule]
) -> None:
    run_scheduled(Chaos(random.Random(seed)).main, schedule=pick(seed))
