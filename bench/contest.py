"""The contest, which opens the contenders, plays the scenarios and makes tables of the outcomes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median

from attrs import evolve, field, frozen

from .inputs import word_error_rate
from .machine import Machine
from .report import Line, Table, is_ours, least_cosine, ratios_of, waits_of
from .rounds import Contender, Entry, Outcome, take_turns
from .scenarios import Scenario
from .work import Work

Say = Callable[[str], None]


@frozen(kw_only=True, eq=False)
class Rules:
    """Rules by which a contest is played and judged."""

    machine: Machine
    work: Work
    rounds: int
    texts: Mapping[str, str | None] = field(factory=dict)  # what is said in each input, by its path
    say: Say = field(repr=False)


def play(contenders: Sequence[Contender], scenarios: Sequence[Scenario], rules: Rules) -> Iterator[Table]:
    """Plays the scenarios. Yields the table of each as soon as the scenario has ended."""
    for scenario in scenarios:
        taking_part = [one for one in contenders if is_ours(one.entry) or not scenario.only_ours]
        rules.say(f"{scenario.name}: {scenario.what}, {rules.rounds} rounds of {len(taking_part)}")
        with _neighbour() if scenario.neighbour else nullcontext():
            outcomes = take_turns(taking_part, scenario.task, rounds=rules.rounds)
        yield _table(scenario, [one.entry for one in taking_part], outcomes, rules)


@contextmanager
def _neighbour() -> Iterator[None]:
    """Runs another process, which computes as long as the block lasts."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def starts(entries: Sequence[Entry], rules: Rules) -> Table:
    """Measures the seconds of each entry from the start of its process until its model is open."""
    rules.say(f"start: {rules.rounds} rounds of {len(entries)}")
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for number in range(-1, rules.rounds):
        for entry in entries:
            contender = Contender.start(entry)
            contender.close()
            if number >= 0:
                seconds[entry.name].append(contender.started)
    outcomes = {name: Outcome(seconds=tuple(found), answers=()) for name, found in seconds.items()}
    lines = [_line(entry, entries, outcomes) for entry in entries]
    return Table(name="start", what="from the start of the process until the model is open", lines=tuple(lines))


def _table(scenario: Scenario, entries: Sequence[Entry], outcomes: Mapping[str, Outcome], rules: Rules) -> Table:
    task = scenario.task(rules.rounds - 1)
    inputs: list[str] = task.get("paths") or task.get("prompts") or task["texts"]
    rows = sum(len(text.split()) for text in task.get("texts", ()))  # a word has at least one token
    reference = outcomes.get("transformers float32")
    lines = []
    for entry in entries:
        answers, line = outcomes[entry.name].answers, _line(entry, entries, outcomes)
        heard = dict(zip(inputs, (answer.get("text", "") for answer in answers), strict=True))
        line = evolve(line, error_rate=word_error_rate(rules.texts, heard))
        if reference and "texts" in task:
            line = evolve(line, cosine=least_cosine(answers, reference.answers))
        elif reference and is_ours(entry) and entry.numbers == "float32":
            pairs = zip(answers, reference.answers, strict=True)
            line = evolve(line, equal=sum(one["tokens"] == other["tokens"] for one, other in pairs) / len(answers))
        if scenario.online:  # the arrivals decide how long a round takes
            line = evolve(line, ratios={}, waits=waits_of(answers))
        else:
            steps, share = max(len(answer.get("tokens", ())) for answer in answers), scenario.share
            limit = rules.work.limit(
                rules.machine, entry.numbers, windows=scenario.windows, share=share, steps=steps, rows=rows
            )
            line = evolve(line, limit=limit)
        lines.append(line)
    return Table(name=scenario.name, what=scenario.what, lines=tuple(lines))


def _line(entry: Entry, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]) -> Line:
    outcome = outcomes[entry.name]
    return Line(
        contender=entry.name,
        seconds=outcome.seconds,
        median=outcome.median,
        ratios=ratios_of(entry, entries, outcomes),
        counted=median(outcome.counted) if outcome.counted else None,
    )
