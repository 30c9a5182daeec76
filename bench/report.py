"""The report of a contest: for people, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
from attrs import asdict, field, frozen

from .machine import Machine
from .rounds import Entry, Outcome, Ratio

_OURS = "triolet"


@frozen(kw_only=True)
class Line:
    """The figures of one contender in one scenario."""

    contender: str
    seconds: tuple[float, ...]  # the seconds of each round
    median: float
    ratios: Mapping[str, Ratio]  # of our contenders only: each peer's seconds over ours, by the peer's name
    limit: float | None = None  # the least seconds that the machine needs
    error_rate: float | None = None  # percentage of wrong words
    equal: float | None = None  # share of the answers that have the tokens of transformers in float32
    cosine: float | None = None  # the least of the vectors' cosines with those of transformers in float32
    waits: Mapping[str, float] = field(factory=dict)  # percentiles of the seconds from arrival to answer, and to the
    # first token, if the scenario is online
    counted: float | None = None  # how far a thread in the same process counted in a second


@frozen(kw_only=True)
class Table:
    """The figures of one scenario."""

    name: str
    what: str
    lines: tuple[Line, ...]


def is_ours(entry: Entry) -> bool:
    """Returns whether the entry is the engine itself."""
    return entry.name.startswith(_OURS)


def ratios_of(entry: Entry, entries: Sequence[Entry], outcomes: Mapping[str, Outcome]) -> dict[str, Ratio]:
    """Returns the ratios of one of our entries, by the names of the peers that it is compared with. These are the peers
    that compute in the same numbers, and the peers in whose numbers none of our entries computes. The ratios of a peer
    are empty."""
    if not is_ours(entry):
        return {}
    numbers = {one.numbers for one in entries if is_ours(one)}
    peers = [one for one in entries if not is_ours(one) and one.name in outcomes]
    fair = [one for one in peers if one.numbers == entry.numbers or one.numbers not in numbers]
    return {peer.name: Ratio.of(outcomes[peer.name], outcomes[entry.name]) for peer in fair}


def least_cosine(answers: Sequence[Mapping[str, Any]], reference: Sequence[Mapping[str, Any]]) -> float:
    """Returns the least cosine of the answers' vectors with those of ``reference``. All have length 1."""
    return min(float(np.dot(one["vector"], other["vector"])) for one, other in zip(answers, reference, strict=True))


def waits_of(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns percentiles of the seconds that the inputs of an online scenario waited."""
    found: dict[str, float] = {}
    for name, key in (("", "total"), ("first token ", "first")):
        values = [answer[key] for answer in answers if answer.get(key) is not None]
        if len(values) > 1:
            cuts = quantiles(values, n=100, method="inclusive")
            found.update({f"{name}p{percent}": cuts[percent - 1] for percent in (50, 95, 99)})
    return found


def shown(tables: Sequence[Table]) -> list[str]:
    """Returns the lines of the report for people."""
    lines = []
    for table in tables:
        lines += ["", f"{table.name}: {table.what}"]
        lines += [f"  {_line(one)}" for one in table.lines]
    return lines


def _line(one: Line) -> str:
    parts = [f"{one.contender:<26}{one.median:8.3f} s ({min(one.seconds):.3f} to {max(one.seconds):.3f})"]
    if one.limit is not None:
        share = f"limit {one.limit:.3f} s, {100 * one.limit / one.median:.0f} %"
        saves = f"below the {one.limit:.3f} s of reading each weight for each token: caches or draft tokens save some"
        parts.append(share if one.limit <= one.median else saves)
    if one.error_rate is not None:
        parts.append(f"WER {one.error_rate:.1f} %")
    if one.equal is not None:
        parts.append("transformers' tokens" if one.equal == 1.0 else f"{one.equal:.0%} of transformers' tokens")
    if one.cosine is not None:
        parts.append(f"cosine with transformers at least {one.cosine:.4f}")
    parts += [f"{name} {seconds:.2f} s" for name, seconds in one.waits.items()]
    if one.counted is not None:
        parts.append(f"the thread counts {one.counted / 1e6:.1f} million/s")
    parts += [f"{ratio.median:.2f}x of {peer}" for peer, ratio in one.ratios.items()]
    return "; ".join(parts)


def as_json(machine: Machine, about: Mapping[str, Any], tables: Sequence[Table]) -> str:
    """Returns the whole report as JSON."""
    told = {"machine": asdict(machine), "contenders": dict(about), "scenarios": [asdict(table) for table in tables]}
    return json.dumps(told, indent=1)


def plot(tables: Sequence[Table], path: Path) -> None:
    """Draws the medians as bars, in one panel for each scenario. A line across each bar is the limit of the machine.

    Raises:
        ImportError: matplotlib is not installed (``pip install 'triolet[bench]'``).
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.0 + 1.6 * len(tables)), layout="constrained")
    panels = figure.subplots(len(tables), 1, squeeze=False)[:, 0]
    for panel, table in zip(panels, tables, strict=True):
        names = [line.contender for line in table.lines]
        medians = [line.median for line in table.lines]
        spread = [
            [line.median - min(line.seconds) for line in table.lines],
            [max(line.seconds) - line.median for line in table.lines],
        ]
        colours = ["tab:blue" if name.startswith(_OURS) else "tab:gray" for name in names]
        panel.barh(names, medians, xerr=spread, color=colours)
        for index, line in enumerate(table.lines):
            if line.limit is not None:
                panel.plot([line.limit] * 2, [index - 0.4, index + 0.4], color="tab:red")
        panel.invert_yaxis()
        panel.set_xlabel("seconds")
        panel.set_title(f"{table.name}: {table.what}", fontsize="medium")
    figure.savefig(path)
