"""The scenarios of a contest. Each makes the tasks of its rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

Some = Callable[[int, int], list[str]]
"""``some(count, number)`` returns ``count`` inputs that no other number has, since engines may remember what they have
computed."""

SPEECH = ("one", "neighbour", "thread", "together", "reuse", "short", "trimmed", "online")
"""The scenarios of speech."""

EMBED = ("one", "thread", "together", "tasks", "online")
"""The scenarios of vectors."""

_BESIDE_A_THREAD = 8  # tokens; an engine may take many seconds for each
_APART = 1_000_000  # the distance between the numbers of two scenarios


@frozen(kw_only=True)
class Scenario:
    """One scenario, a line of the report."""

    name: str
    what: str
    task: Callable[[int], Mapping[str, Any]] = field(repr=False)  # makes the task of a round
    only_ours: bool = False  # no peer can play it
    neighbour: bool = False  # another process computes meanwhile
    online: bool = False  # the wait of each input is measured, not the time of the whole task
    windows: float = 0.0  # the windows that a task has encoded
    share: float = 1.0  # the length of each window, as a share of a whole one


def arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Returns the moments at which ``count`` independent requests come: a Poisson process of ``rate`` a second."""
    dice, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(now)
        now += dice.expovariate(rate)
    return found


def names_of_text(together: Sequence[int]) -> tuple[str, ...]:
    """Returns the names of the text scenarios."""
    return ("one", "thread", *(f"together {count}" for count in together), "online")


def _task(
    some: Some, kind: str, place: int, count: int, rate: float = 0.0, **asked: Any
) -> Callable[[int], dict[str, Any]]:
    """Returns a function that makes tasks with ``count`` inputs that no other scenario has. With a ``rate``, the inputs
    arrive by chance."""

    def task(number: int) -> dict[str, Any]:
        found = {kind: some(count, number + _APART * place), **asked}
        return {**found, "arrivals": arrivals(count, rate, number)} if rate else found

    return task


def speech_scenarios(
    clips: Some, short: Some, *, together: int, online: int, rate: float, trimmed: float
) -> list[Scenario]:
    """Returns the scenarios of speech.

    Args:
        clips: returns paths of clips.
        short: returns paths of clips of a few seconds.
        online: how many requests arrive in a round.
        rate: how many requests arrive in a second.
        trimmed: the least share of a window that a short clip has when it is trimmed.
    """
    found: list[Scenario] = []

    def add(name: str, what: str, some: Some, count: int = 1, *, asked: Mapping[str, Any] = {}, **more: Any) -> None:
        task = _task(some, "paths", len(found), count, **asked)
        found.append(Scenario(name=name, what=what, task=task, **{"windows": count, **more}))

    add("one", "one clip", clips)
    add("neighbour", "one clip, while another process computes", clips, neighbour=True)
    beside = "one short clip, while a Python thread of the same process computes"
    add("thread", beside, short, asked={"thread": True})
    add("together", f"{together} clips at once", clips, together)
    add("reuse", "its language, its text and its translation", clips, asked={"reuse": True})
    add("short", "one short clip", short)
    cut = {"context": "trimmed"}
    add("trimmed", "one short clip, trimmed", short, asked=cut, only_ours=True, share=trimmed)
    what = f"{online} short clips, {rate:.2g} a second"
    add("online", what, short, online, asked={"rate": rate}, online=True, windows=0)
    return found


def text_scenarios(prompts: Some, *, tokens: int, together: Sequence[int], online: int, rate: float) -> list[Scenario]:
    """Returns the scenarios of text, which write ``tokens`` after each prompt."""
    found: list[Scenario] = []

    def add(name: str, what: str, count: int, *, online: bool = False, **asked: Any) -> None:
        task = _task(prompts, "prompts", len(found), count, **{"tokens": tokens, **asked})
        found.append(Scenario(name=name, what=what, task=task, online=online))

    few = min(tokens, _BESIDE_A_THREAD)
    add("one", "1 at once", 1)
    beside = f"{few} tokens of one, while a Python thread of the same process computes"
    add("thread", beside, 1, tokens=few, thread=True)
    for count in together:
        add(f"together {count}", f"{count} at once", count)
    add("online", f"{online} prompts, {rate:.2g} a second", online, online=True, rate=rate)
    return found


def embed_scenarios(queries: Some, texts: Some, *, together: int, online: int, rate: float) -> list[Scenario]:
    """Returns the scenarios of vectors, of ``queries`` and of mixed ``texts``."""
    found: list[Scenario] = []

    def add(name: str, what: str, some: Some, count: int = 1, *, online: bool = False, **asked: Any) -> None:
        task = _task(some, "texts", len(found), count, **asked)
        found.append(Scenario(name=name, what=what, task=task, online=online))

    add("one", "one query", queries)
    add("thread", "one query, while a Python thread of the same process computes", queries, thread=True)
    add("together", f"{together} texts in one call", texts, together)
    add("tasks", f"{together} tasks of one text each", texts, together, each=True)
    add("online", f"{online} queries, {rate:.2g} a second", queries, online, online=True, rate=rate)
    return found
