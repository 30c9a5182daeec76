"""^C between any two lines of ours: it comes out, alone, and everything is given back."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

import triolet
from triolet import Engine, EngineConfig, Event, SamplingParams
from triolet.actors import supervisor
from triolet.core.events import RequestStarted
from triolet_testing.sim import SimExecutor, sim_engine
from triolet_testing.trio_tools.schedules import Batches, run_scheduled

from ..api.hosts import SpeakingModel
from ..api.test_hosts import ALL_OF_IT
from ..api.threads import press_in_a_callback
from ..tracer import Tracer, alone
from .shared import audio, prompt

Use = Callable[[Engine], Awaitable[None]]
ACTORS, API = (str(Path(module.__file__).parent) for module in (supervisor, triolet.api.engine))


async def tokens(engine: Engine) -> None:
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


async def segments(engine: Engine) -> None:
    """Their reader runs the requests, between the two ends of the block: one at a time, then some together."""
    async with engine:
        for options in (ALL_OF_IT, {**ALL_OF_IT, "temperature": (0.4,), "best_of": 3}):
            async with engine.stream_transcription(audio(1), **options) as stream:
                await anext(stream)


def run(use: Use, tracer: Tracer) -> tuple[SimExecutor, Engine, BaseException | None]:
    executor = SimExecutor(SpeakingModel())
    engine = sim_engine(executor)
    return executor, engine, tracer.follow(partial(run_scheduled, partial(use, engine), schedule=Batches()))


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
        run_scheduled(partial(tokens, engine), schedule=Batches())
    assert len(pressed) == 1


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is not signal.default_int_handler, reason="^C is not heard here")
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 2, 3))])
@pytest.mark.parametrize(("use", "ours"), [(tokens, (ACTORS, API, __file__)), (segments, (f"{API}/hosts", __file__))])
def test_a_control_c_at_any_line_gives_everything_back(use: Use, ours: tuple[str, ...], first: int):
    """At each fourth moment; a thorough run has the others."""
    plain, broken = Tracer(ours), list[str]()
    assert run(use, plain)[-1] is None
    assert len(plain.seen) > 100, "the engine's lines are not followed"
    for line, time in plain.moments(__file__)[first::4]:
        executor, engine, error = run(use, Tracer(ours, line, time))
        told, pending = alone(error), engine.inside.pending
        if type(told) is not KeyboardInterrupt or hasattr(told, "__notes__") or executor.is_open or pending:
            where = f"{Path(line.file).name}:{line.number}, time {time}"
            broken.append(f"{where}: {error!r}, device held: {executor.is_open}, permits not back: {pending}")
    assert not broken, "\n".join(broken[:20])
