"""The host's work in a step, over a device that answers at once: ``python benchmarks/load.py``.

The measured time is that of trio, the actors, the planner, and of bringing tokens to their readers. Run the script on a
machine that has nothing else to do.
"""

from __future__ import annotations

import time

import trio
from attrs import define
from claims import Claims

from triolet import Engine, EngineConfig, SamplingParams
from triolet.actors.worker import ThreadWorker
from triolet.core.plan import SampledToken, StepPlan, StepResult
from triolet_testing import Kind, SimExecutor, SimModel

claim = Claims()


@define
class Instant(SimExecutor):
    """A device that answers every step at once with the same token."""

    steps: int = 0

    def step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        sampled = (SampledToken(token_id=5 if chunk.samples else None, logprob=-1.0) for chunk in plan.chunks)
        return StepResult(step_id=plan.step_id, sampled=tuple(sampled))


async def step(running: int, waiting: int) -> float:
    """Returns the seconds of a step, all of which the host takes."""
    pages = running * 520
    model = SimModel(kind=Kind.DECODER, max_positions=8192, page_size=16, pages=pages, vocabulary_size=64)
    device = Instant(model)
    sampling = SamplingParams(max_tokens=max(300, 20_000 // running), ignore_eos=True)
    ended = trio.Event()

    async def read(number: int) -> None:
        prompt = [1, *(2 + (number * 7 + index) % 50 for index in range(100))]
        async with engine.stream(prompt_token_ids=prompt, sampling=sampling) as deltas:
            async for _ in deltas:
                pass
        ended.set()

    config = EngineConfig(max_running=running, max_pending=100_000)
    parts = Engine.from_parts(lambda: device, ThreadWorker, config=config)
    async with parts as engine, trio.open_nursery() as nursery:
        for number in range(running + waiting):
            nursery.start_soon(read, number)
        while (now := engine.statistics().requests).running < running or now.waiting < waiting:  # noqa: ASYNC110
            await trio.sleep(0.001)
        steps, begun = device.steps, time.perf_counter()
        await ended.wait()
        seconds = (time.perf_counter() - begun) / (device.steps - steps)
        nursery.cancel_scope.cancel()
    return seconds


def steps() -> None:
    for running, most in ((8, 0.15), (64, 0.6), (256, 2.5)):
        for waiting in (0, 1000):
            took = 1e3 * trio.run(step, running, waiting)
            told = f"{running} streams run, {waiting} wait: a step takes {took:.2f} ms"
            claim(took <= most, f"{told}; claimed: at most {most}")


if __name__ == "__main__":
    steps()
    claim.exit()
