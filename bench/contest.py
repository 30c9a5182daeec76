"""Runs a contest: opens the contenders, plays the scenarios, and makes the tables of what came out."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

from attrs import field, frozen

from .inputs import word_error_rate
from .machine import Machine
from .report import Line, Table, is_ours, ratios_of, waits_of
from .rounds import Contender, Entry, Outcome, Ratio, take_turns
from .scenarios import Scenario
from .work import Work

Say = Callable[[str], None]


@frozen(kw_only=True, eq=False)
class Rules:
    """How a contest is played and judged."""

    machine: Machine
    work: Work
    rounds: int
    texts: Mapping[str, str | None] = field(factory=dict)  # what is said in each input
    say: Say = field(repr=False)


def play(contenders: Sequence[Contender], scenarios: Sequence[Scenario], rules: Rules) -> Iterator[Table]:
    """The table of each scenario, as soon as it was played."""
    for scenario in scenarios:
        taking_part = [one for one in contenders if is_ours(one.entry) or not scenario.only_ours]
        rules.say(f"{scenario.name}: {scenario.what}, {rules.rounds} rounds of {len(taking_part)}")
        with _neighbour() if scenario.neighbour else nullcontext():
            outcomes = take_turns(taking_part, scenario.task, rounds=rules.rounds)
        yield _table(scenario, [one.entry for one in taking_part], outcomes, rules)


@contextmanager
def _neighbour() -> Iterator[None]:
    """Another process that computes all the time."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def starts(entries: Sequence[Entry], rules: Rules) -> Table:
    """How long each takes from the start of its process until its model is open."""
    rules.say(f"start: {rules.rounds} rounds of {len(entries)}")
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for number in range(-1, rules.rounds):
        for entry in entries:
            contender = Contender.start(entry)
            contender.close()
            if number >= 0:
                seconds[entry.name].append(contender.started)
    outcomes = {name: Outcome(seconds=tuple(found), answers=()) for name, found in seconds.items()}
    lines = [
        Line(
            contender=entry.name,
            seconds=outcomes[entry.name].seconds,
            median=outcomes[entry.name].median,
            ratios=ratios_of(entry, entries, outcomes),
        )
        for entry in entries
    ]
    return Table(name="start", what="from the start of the process until the model is open", lines=tuple(lines))


def _table(scenario: Scenario, entries: Sequence[Entry], outcomes: Mapping[str, Outcome], rules: Rules) -> Table:
    task = scenario.task(rules.rounds - 1)
    inputs: list[str] = task.get("paths") or task["prompts"]
    reference = _reference(entries, outcomes)
    lines = [
        _line(entry, scenario, inputs, outcomes, reference, _ratios(scenario, entry, entries, outcomes), rules)
        for entry in entries
    ]
    return Table(name=scenario.name, what=scenario.what, lines=tuple(lines))


def _ratios(
    scenario: Scenario, entry: Entry, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]
) -> dict[str, Ratio]:
    """None where the arrivals tell how long a round takes."""
    return {} if scenario.online else ratios_of(entry, entries, outcomes)


def _reference(entries: Sequence[Entry], outcomes: Mapping[str, Outcome]) -> list[Any] | None:
    """The tokens of transformers in float32, of each input."""
    for entry in entries:
        if entry.name == "transformers float32":
            return [answer["tokens"] for answer in outcomes[entry.name].answers]
    return None


def _line(
    entry: Entry,
    scenario: Scenario,
    inputs: Sequence[str],
    outcomes: Mapping[str, Outcome],
    reference: Sequence[Any] | None,
    ratios: Mapping[str, Any],
    rules: Rules,
) -> Line:
    outcome = outcomes[entry.name]
    answers = outcome.answers
    steps = max(len(answer["tokens"]) for answer in answers)
    limit = rules.work.limit(rules.machine, entry.numbers, windows=scenario.windows, share=scenario.share, steps=steps)
    same = (
        reference
        and is_ours(entry)
        and [answer["tokens"] == tokens for answer, tokens in zip(answers, reference, strict=True)]
    )
    heard = dict(zip(inputs, (answer["text"] for answer in answers), strict=True))
    return Line(
        contender=entry.name,
        seconds=outcome.seconds,
        median=outcome.median,
        ratios=ratios,
        limit=None if scenario.online else limit,
        error_rate=word_error_rate(rules.texts, heard),
        equal=sum(same) / len(same) if same and entry.numbers == "float32" else None,
        waits=waits_of(answers) if scenario.online else {},
        counted=median(outcome.counted) if outcome.counted else None,
    )
