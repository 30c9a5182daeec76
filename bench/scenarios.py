"""What is measured: each scenario makes the tasks of its rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

Some = Callable[[int, int], list[str]]
"""``some(count, number)``: as many inputs, which no other number has: what was computed before would be remembered."""

SPEECH = ("one", "neighbour", "thread", "together", "reuse", "short", "trimmed", "online")
"""The scenarios of speech."""

_BESIDE_A_THREAD = 8  # tokens: an engine may take many seconds for each
_APART = 1_000_000  # between the numbers of two scenarios


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
    windows: float = 0.0  # that a task has encoded
    share: float = 1.0  # of a whole window that each has


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """When ``count`` requests come that know nothing of each other: a Poisson process of ``rate`` a second."""
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += dice.expovariate(rate)
    return found


def names_of_text(together: Sequence[int]) -> tuple[str, ...]:
    """The scenarios of text."""
    return ("one", "thread", *(f"together {count}" for count in together), "online")


def _of_scenario(some: Some, place: int) -> Some:
    """Inputs that no other scenario has."""
    return lambda count, number: some(count, number + _APART * place)


def speech_scenarios(
    clips: Some, short: Some, *, together: int, online: int, rate: float, trimmed: float
) -> list[Scenario]:
    """Of speech.

    Args:
        clips: paths of clips.
        short: paths of clips of some seconds.
        online: requests that arrive in a round.
        rate: how many arrive in a second.
        trimmed: share of a window that a short clip has at least when it is trimmed.
    """
    one, beside, several, reuse = (_of_scenario(clips, place) for place in range(4))
    brief, cut, chance, shared = (_of_scenario(short, place) for place in range(4, 8))
    return [
        Scenario(name="one", what="one clip", task=lambda n: {"paths": one(1, n)}, inputs=1, windows=1),
        Scenario(
            name="neighbour",
            what="one clip, while another process computes",
            task=lambda n: {"paths": beside(1, n)},
            inputs=1,
            neighbour=True,
            windows=1,
        ),
        Scenario(
            name="thread",
            what="one short clip, while a Python thread of the same process computes",
            task=lambda n: {"paths": shared(1, n), "thread": True},
            inputs=1,
            windows=1,
        ),
        Scenario(
            name="together",
            what=f"{together} clips at once",
            task=lambda n: {"paths": several(together, n)},
            inputs=together,
            windows=together,
        ),
        Scenario(
            name="reuse",
            what="its language, its text and its translation",
            task=lambda n: {"paths": reuse(1, n), "reuse": True},
            inputs=1,
            windows=1,
        ),
        Scenario(name="short", what="one short clip", task=lambda n: {"paths": brief(1, n)}, inputs=1, windows=1),
        Scenario(
            name="trimmed",
            what="one short clip, trimmed",
            task=lambda n: {"paths": cut(1, n), "context": "trimmed"},
            inputs=1,
            only_ours=True,
            windows=1,
            share=trimmed,
        ),
        Scenario(
            name="online",
            what=f"{online} short clips, {rate:.2g} a second",
            task=lambda n: {"paths": chance(online, n), "arrivals": arrivals(online, rate, n)},
            inputs=online,
            online=True,
        ),
    ]


def text_scenarios(prompts: Some, *, tokens: int, together: Sequence[int], online: int, rate: float) -> list[Scenario]:
    """Of text: ``tokens`` behind each prompt."""

    def made(count: int, place: int) -> Callable[[int], Mapping[str, Any]]:
        some = _of_scenario(prompts, place)
        return lambda number: {"prompts": some(count, number), "tokens": tokens}

    counts = {"one": 1, **{f"together {count}": count for count in together}}
    found = [
        Scenario(name=name, what=f"{count} at once", task=made(count, place), inputs=count)
        for place, (name, count) in enumerate(counts.items())
    ]
    chance, shared, few = made(online, len(found)), made(1, len(found) + 1), min(tokens, _BESIDE_A_THREAD)
    found.insert(
        1,
        Scenario(
            name="thread",
            what=f"{few} tokens of one, while a Python thread of the same process computes",
            task=lambda n: {**shared(n), "tokens": few, "thread": True},
            inputs=1,
        ),
    )
    found.append(
        Scenario(
            name="online",
            what=f"{online} prompts, {rate:.2g} a second",
            task=lambda n: {**chance(n), "arrivals": arrivals(online, rate, n)},
            inputs=online,
            online=True,
        )
    )
    return found
