"""^C between any two lines of ours: it comes out, alone, and everything is given back."""

from __future__ import annotations

import linecache
import signal
import sys
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from attrs import define, field

import triolet
from triolet import Engine, EngineConfig, Event, SamplingParams
from triolet.actors import supervisor
from triolet.core.events import RequestStarted
from triolet.testing.sim import SimExecutor, sim_engine
from triolet.testing.trio_tools.schedules import Batches, run_scheduled

from ..api.threads import press_in_a_callback
from .shared import audio, prompt

OURS = (*(str(Path(module.__file__).parent) for module in (supervisor, triolet.api.engine)), __file__)
Line = tuple[str, int]


@define
class Tracer:
    """Follows the lines of our code, and presses ^C before one of them, the ``time``-th time it is reached."""

    target: Line | None = None
    time: int = 1
    seen: dict[Line, int] = field(factory=dict)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(OURS) else None

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            self.seen[line] = self.seen.get(line, 0) + 1
            if line == self.target and self.seen[line] == self.time:
                sys.settrace(None)  # what comes now is not followed, and takes less time
                signal.raise_signal(signal.SIGINT)
        return self.line


async def body(engine: Engine) -> None:
    """A stream that is read to its end, one that is left early, and a request that is waited for."""
    async with engine:
        async with engine.stream(
            prompt_token_ids=prompt(1), audio=audio(1), sampling=SamplingParams(max_tokens=2)
        ) as deltas:
            async for _ in deltas:
                pass
        async with engine.stream(prompt_token_ids=prompt(2), audio=audio(1)) as deltas:
            await anext(deltas)
        await engine.generate(prompt_token_ids=prompt(3), audio=audio(1), sampling=SamplingParams(max_tokens=1))


def run(tracer: Tracer) -> tuple[SimExecutor, Engine, BaseException | None]:
    executor = SimExecutor()
    engine = sim_engine(executor)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        run_scheduled(partial(body, engine), schedule=Batches())
    except BaseException as error:  # noqa: BLE001  (judged by the test)
        return executor, engine, error
    finally:
        sys.settrace(before)
    return executor, engine, None


def lines() -> list[tuple[Line, int]]:
    """Every line that is reached, the first time and the last time."""
    tracer = Tracer()
    *_, error = run(tracer)
    assert error is None
    return sorted(
        (line, time) for line, count in tracer.seen.items() for time in {1, count} if _can_be_helped(line, time)
    )


def _can_be_helped(line: Line, time: int) -> bool:
    """Between the last line of a user's ``async with`` and its ``__aexit__`` Python itself has a gap, for trio's own
    nurseries too (PEP 419 would have closed it)."""
    return time == 1 or not linecache.getline(*line).lstrip().startswith("async with") or line[0] != __file__


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="^C is not heard here")
def test_a_control_c_that_python_would_lose_is_heard_in_the_engines_own_tasks():
    """In a callback of the collector what a handler raises is swallowed; here it raises nothing."""
    pressed: list[Event] = []

    def observe(event: Event) -> None:
        if isinstance(event, RequestStarted):
            pressed.append(event)
            press_in_a_callback()

    engine = sim_engine(config=EngineConfig(observer=observe))
    with pytest.RaisesGroup(KeyboardInterrupt, allow_unwrapped=True, flatten_subgroups=True):
        run_scheduled(partial(body, engine), schedule=Batches())
    assert len(pressed) == 1


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="^C is not heard here")
def test_a_control_c_at_any_line_gives_everything_back():
    broken: list[str] = []
    reached = lines()
    assert len(reached) > 400, "the engine's lines are not followed"
    for line, time in reached:
        executor, engine, error = run(Tracer(line, time))
        told = error
        while isinstance(told, BaseExceptionGroup) and len(told.exceptions) == 1:
            told = told.exceptions[0]
        pending = engine.inside.pending
        if type(told) is not KeyboardInterrupt or hasattr(told, "__notes__") or executor.is_open or pending:
            where = f"{Path(line[0]).name}:{line[1]}, time {time}"
            broken.append(f"{where}: {error!r}, device held: {executor.is_open}, permits not back: {pending}")
    assert not broken, "\n".join(broken[:20])
