"""Real workers: the interpreter switches quickly while a call runs, and as before when it has ended or is abandoned.

The simulation has the same for every way out, with every fault: `triolet_testing.judge`.
"""

from __future__ import annotations

import threading

import pytest
import trio

from triolet import Engine, EngineConfig
from triolet.actors.switch_interval import SHORT, SWITCH_INTERVAL, SwitchInterval
from triolet.actors.worker import Job, ThreadWorker
from triolet.core.errors import EngineTeardownError
from triolet_testing.sim import SimExecutor, SimInterpreter

from .shared import ask

pytestmark = pytest.mark.real_time

OURS = round(SHORT * 1e6)  # microseconds
LONG = 60.0
"""Seconds after which a test that hangs fails."""


class Interpreter(SimInterpreter):
    """Tells when its interval becomes the user's again."""

    def __init__(self) -> None:
        super().__init__()
        self.back = threading.Event()

    def write(self, seconds: float) -> None:
        super().write(seconds)
        self.back.set() if self.microseconds == 5000 else self.back.clear()


class Held:
    """An engine over a real worker, whose calls of ``job`` run until they are let go."""

    def __init__(self, job: Job, **config: object) -> None:
        self.interpreter = Interpreter()
        self.interval = SwitchInterval(self.interpreter.read, self.interpreter.write)
        self.seen: list[int] = []
        self.entered, self.let_go, self.closed = threading.Event(), threading.Event(), threading.Event()

        def fault(called: Job, _: object) -> None:
            self.seen.append(self.interpreter.microseconds)
            if called is job:
                self.entered.set()
                assert self.let_go.wait(LONG)
            if called is Job.CLOSE:
                self.closed.set()

        executor = SimExecutor(fault=fault)
        self.engine = Engine.from_parts(lambda: executor, self._worker, config=EngineConfig(**config))

    def _worker(self) -> ThreadWorker:
        worker = ThreadWorker()
        worker.switch_interval = self.interval
        return worker


def test_real_workers_share_the_processs_own():
    assert ThreadWorker().switch_interval is ThreadWorker().switch_interval is SWITCH_INTERVAL


@pytest.mark.parametrize(("setting", "within"), [("short", OURS), ("kept", 5000)])
def test_it_is_short_in_every_call_unless_it_is_kept_and_the_users_when_the_block_has_ended(setting, within):
    held = Held(Job.STEP, switch_interval=setting)
    held.let_go.set()

    async def main() -> None:
        async with held.engine:
            await ask(held.engine, 1)
            back = setting == "kept" or await trio.to_thread.run_sync(held.interpreter.back.wait, LONG)
            assert back, "no call runs, and it is short"

    trio.run(main)
    assert set(held.seen) == {within}
    assert held.interpreter.microseconds == 5000


def test_it_is_short_within_a_block_and_in_calls_beside_it():
    interpreter = SimInterpreter()
    interval = SwitchInterval(interpreter.read, interpreter.write)
    with pytest.raises(ValueError, match="planted"), interval.shortened():
        interval.begin("a call")
        with interval.shortened():
            assert interpreter.microseconds == OURS
        raise ValueError("planted")
    assert interpreter.microseconds == OURS
    interval.end("a call")
    assert interpreter.microseconds == 5000


def test_a_call_that_is_abandoned_does_not_keep_it():
    held = Held(Job.STEP, stage_seconds=0.05, drain_seconds=0.0)

    async def main() -> None:
        with pytest.raises(EngineTeardownError, match="abandoned"):
            async with held.engine, trio.open_nursery() as nursery:
                nursery.start_soon(ask, held.engine, 1)
                assert await trio.to_thread.run_sync(held.entered.wait, LONG)
                assert held.interpreter.microseconds == OURS
                nursery.cancel_scope.cancel()
        assert held.interpreter.microseconds == 5000
        held.let_go.set()  # it returns late, and is nobody's any more
        assert await trio.to_thread.run_sync(held.closed.wait, LONG)

    trio.run(main)
    assert held.interpreter.microseconds == 5000


def test_an_engine_whose_loop_stands_still_does_not_keep_it():
    """As that of an engine that nobody closes, and whose loop never goes on: the end of the call suffices."""
    held = Held(Job.STEP)

    async def main() -> None:
        async with held.engine, trio.open_nursery() as nursery:
            nursery.start_soon(ask, held.engine, 1)
            assert await trio.to_thread.run_sync(held.entered.wait, LONG)
            held.let_go.set()
            assert held.interpreter.back.wait(LONG), "the call has ended"  # the loop waits here

    trio.run(main)
