"""The price of `EngineConfig(verify=True)`, a step: ``python benchmarks/verify.py``.

The same load runs with and without ``verify``, in turns, over a device that answers at once. The difference, in time of
the processor, is all that ``verify`` costs a step: events are made, emitted and checked. A step of a real model takes
so long that the difference would drown in its noise.
"""

from __future__ import annotations

import argparse
import time
from statistics import quantiles

import numpy as np
import trio
from trio.testing import MockClock

from triolet import EngineConfig, SamplingParams
from triolet.actors.worker import Job
from triolet_testing import SimExecutor, SimModel, sim_engine

CLIENTS, TOKENS = 8, 100


async def step(verify: bool) -> float:
    """Returns the microseconds of processor time that a step takes."""
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    executor = SimExecutor(SimModel(max_positions=2 * TOKENS, pages=CLIENTS * TOKENS))

    async def read(number: int) -> None:
        audio = np.full(1600, number, dtype=np.float32)
        async with engine.stream(prompt_token_ids=(1, 2, number), audio=audio, sampling=sampling) as deltas:
            async for _ in deltas:
                pass

    async with sim_engine(executor, config=EngineConfig(verify=verify)) as engine:
        begun = time.process_time()
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                nursery.start_soon(read, number)
        return 1e6 * (time.process_time() - begun) / executor.calls.count(Job.STEP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    pairs, took = parser.parse_args().pairs, {True: list[float](), False: list[float]()}
    for pair in range(pairs):
        for verify in (bool(pair % 2), not pair % 2):  # the two take turns in going first
            took[verify].append(trio.run(step, verify, clock=MockClock(autojump_threshold=0)))
    low, cost, high = quantiles([one - other for one, other in zip(took[True], took[False], strict=True)], n=4)
    print(f"in {pairs} pairs: {cost:.0f} us a step, quartiles {low:.0f} and {high:.0f}")


if __name__ == "__main__":
    main()
