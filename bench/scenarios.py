"""What is measured: each scenario makes the tasks of its rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

Some = Callable[[int, int], list[str]]
"""``some(count, round)``: as many inputs, which no other round has: what was computed before would be remembered."""


@frozen(kw_only=True)
class Scenario:
    """One line of the report."""

    name: str
    what: str
    task: Callable[[int], Mapping[str, Any]] = field(repr=False)  # of a round
    inputs: int  # of a task
    only_ours: bool = False  # no peer has it
    neighbour: bool = False  # another process computes meanwhile
    online: bool = False  # what each input waits is of interest, not the whole
    windows: float = 0.0  # that a task's encodings fill


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When ``count`` requests come that know nothing of each other: a Poisson process of ``rate`` a second."""
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += dice.expovariate(rate)
    return found


def speech_scenarios(
    clips: Some, short: Some, *, together: int, online: int, rate: float, trimmed: float
) -> list[Scenario]:
    """Of speech.

    Args:
        clips: paths of clips.
        short: paths of clips of some seconds.
        online: requests that arrive in a round.
        rate: how many arrive in a second.
        trimmed: windows that a short clip fills when it is trimmed.
    """
    found = [
        Scenario(name="one", what="one clip", task=lambda n: {"paths": clips(1, n)}, inputs=1, windows=1),
        Scenario(
            name="neighbour",
            what="one clip, while another process computes",
            task=lambda n: {"paths": clips(1, n)},
            inputs=1,
            neighbour=True,
            windows=1,
        ),
        Scenario(
            name="together",
            what=f"{together} clips at once",
            task=lambda n: {"paths": clips(together, n)},
            inputs=together,
            windows=together,
        ),
        Scenario(
            name="reuse",
            what="its language, its text and its translation",
            task=lambda n: {"paths": clips(1, n), "reuse": True},
            inputs=1,
            windows=1,
        ),
        Scenario(name="short", what="one short clip", task=lambda n: {"paths": short(1, n)}, inputs=1, windows=1),
        Scenario(
            name="trimmed",
            what="one short clip, trimmed",
            task=lambda n: {"paths": short(1, n), "context": "trimmed"},
            inputs=1,
            only_ours=True,
            windows=trimmed,
        ),
    ]
    if online:
        found.append(
            Scenario(
                name="online",
                what=f"{online} short clips, {rate:.2g} a second",
                task=lambda n: {"paths": short(online, n), "arrivals": arrivals(online, rate, n)},
                inputs=online,
                online=True,
                windows=online,
            )
        )
    return found


def text_scenarios(prompts: Some, *, tokens: int, together: Sequence[int], online: int, rate: float) -> list[Scenario]:
    """Of text: ``tokens`` behind each prompt."""

    def made(count: int) -> Callable[[int], Mapping[str, Any]]:
        return lambda number: {"prompts": prompts(count, number), "tokens": tokens}

    found = [
        Scenario(name="one" if n == 1 else f"together {n}", what=f"{n} at once", task=made(n), inputs=n)
        for n in (1, *together)
    ]
    if online:
        found.append(
            Scenario(
                name="online",
                what=f"{online} prompts, {rate:.2g} a second",
                task=lambda n: {**made(online)(n), "arrivals": arrivals(online, rate, n)},
                inputs=online,
                online=True,
            )
        )
    return found
