"""What routing does to a fleet of replicas, in simulation: policies and scenarios, and what breaks first at scale.

::

    python benchmarks/fleet.py                                 # 1,000 replicas: table, claims, plots
    python benchmarks/fleet.py --only sweeps --replicas 200    # ingresses, telling, catalogue
    python benchmarks/fleet.py --only routers                  # memory and decisions of one router

All seconds of the first table are virtual, and the same on every machine. What a router costs is this machine's.
"""

from __future__ import annotations

import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
from attrs import evolve, field, frozen

from triolet.core.routing import Router, RoutingLimits
from triolet.testing.fleet.fleet import Fleet, Loss, play
from triolet.testing.fleet.load import Burst, Load
from triolet.testing.fleet.outcome import Played
from triolet.testing.fleet.policies import POLICIES

KEY_BYTES = 32  # `content_key` writes 16 bytes as hexadecimal digits
LOAD_BYTES = 16  # of what `Router.told_load` is told: a replica's number and two counts
OURS, PLAIN = "by content", "by hash"
IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


@frozen(kw_only=True)
class Case:
    """A load with losses, for a fleet. ``rate`` is of each replica, a second."""

    rate: float
    seconds: float
    warm_seconds: float = 6.0
    contents: int = 500  # for each replica: 64 of them fit its cache
    bursts: tuple[Burst, ...] = ()
    losses: tuple[Loss, ...] = ()
    fleet: Fleet = field(factory=Fleet)

    def play(self, policy: str, replicas: int) -> Played:
        load = Load(
            rate=self.rate * replicas,
            seconds=self.seconds,
            warm_seconds=self.warm_seconds,
            contents=self.contents * replicas,
            bursts=self.bursts,
        )
        fleet = evolve(self.fleet, replicas=replicas, full=True)
        return play(fleet, load, POLICIES[policy], losses=self.losses)


SCENARIOS: Mapping[str, Case] = {
    "steady": Case(rate=4.0, seconds=14.0),
    "burst": Case(rate=3.0, seconds=20.0, bursts=(Burst(begin=10.0, seconds=6.0),)),
    "loss": Case(rate=2.5, seconds=32.0, losses=(Loss(at=10.0, share=0.1, seconds=15.0),)),
    "high load": Case(rate=8.0, seconds=16.0),
}
"""A burst doubles the arrivals, and 30 % of them ask for one new content. In a loss a tenth of the replicas dies."""


# -- policies ----------------------------------------------------------------------------------------------------------


def played(job: tuple[str, str, int]) -> tuple[str, str, Played]:
    scenario, policy, replicas = job
    return scenario, policy, SCENARIOS[scenario].play(policy, replicas)


def compare(replicas: int, workers: int) -> dict[tuple[str, str], Played]:
    """Prints a row a run, in the order of the table."""
    click.echo(
        "| scenario | policy | requests | hit rate | p50, s | p99, s | mean to the end, s | imbalance | sent again |"
    )
    click.echo("|---|---|---|---|---|---|---|---|---|")
    jobs = [(scenario, policy, replicas) for scenario in SCENARIOS for policy in POLICIES]
    found: dict[tuple[str, str], Played] = {}
    for scenario, policy, one in mapped(played, jobs, workers):
        found[scenario, policy] = one
        click.echo(
            f"| {scenario} | {policy} | {one.requests:,} | {one.hit_rate:.1%} | {one.p50:.2f} | {one.p99:.2f} "
            f"| {one.mean:.2f} | {one.imbalance:.2f} | {one.sent_again:,} |"
        )
    return found


def mapped(function: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> Iterator[Any]:
    """In processes; in this one where one is asked for."""
    if workers == 1:
        yield from map(function, jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(function, jobs)


def claims_of(found: Mapping[tuple[str, str], Played]) -> Iterator[tuple[bool, str]]:
    for scenario in SCENARIOS:
        ours, plain = found[scenario, OURS], found[scenario, PLAIN]
        lost = 100 * (plain.hit_rate - ours.hit_rate)
        yield lost <= 3, f"{scenario}: the hit rate is {lost:.1f} points below plain hashing's, at most 3"
        yield (
            ours.p99 <= plain.p99 / 2,
            f"{scenario}: p99 {ours.p99:.2f} s is at most half of plain hashing's {plain.p99:.2f} s",
        )
    for scenario in ("burst", "high load"):
        ours, bounded = found[scenario, OURS], found[scenario, "by bounded hash"]
        yield ours.p99 <= bounded.p99, f"{scenario}: p99 is not above bounded hashing's {bounded.p99:.2f} s"
    high = found["high load", OURS].imbalance
    yield high <= 1.3, f"high load: the longest device time is {high:.2f} of the mean, at most 1.3"


# -- what breaks first -------------------------------------------------------------------------------------------------


def swept(job: tuple[str, Case, int]) -> tuple[str, Played]:
    name, case, replicas = job
    return name, case.play(OURS, replicas)


def sweeps() -> Iterator[tuple[str, Case]]:
    base = Case(rate=6.0, seconds=14.0)
    for routers in (1, 4, 16, 64):
        yield f"{routers} ingresses", evolve(base, fleet=Fleet(routers=routers))
    for seconds in (0.2, 5.0):  # with the keys a load is told at any rate
        yield (
            f"16 ingresses, loads told every {seconds:g} s",
            evolve(base, fleet=Fleet(routers=16, load_seconds=seconds)),
        )
    for seconds in (1.0, 20.0, 1e6):
        told = f"every {seconds:g} s" if seconds < 1e6 else "never"
        yield f"16 ingresses, keys told {told}", evolve(base, fleet=Fleet(routers=16, tell_seconds=seconds))
    for times in (0.5, 2, 20, 200):
        yield f"catalogue of {times:g} x all caches", evolve(base, contents=max(1, round(64 * times)))


def sweep(replicas: int, workers: int) -> None:
    click.echo(f"\n{replicas:,} replicas, 6 requests a second each\n")
    click.echo("| setting | hit rate | p50, s | p99, s | imbalance | bytes a second into each router |")
    click.echo("|---|---|---|---|---|---|")
    cases = dict(sweeps())
    jobs = [(name, case, replicas) for name, case in cases.items()]
    for name, one in mapped(swept, jobs, workers):
        fleet = cases[name].fleet
        told = one.told * KEY_BYTES + replicas / fleet.load_seconds * LOAD_BYTES
        click.echo(
            f"| {name} | {one.hit_rate:.1%} | {one.p50:.2f} | {one.p99:.2f} | {one.imbalance:.2f} | {told:,.0f} |"
        )


def routers(sizes: Iterable[int], keys: int) -> None:
    """Of one router, each replica of which holds ``keys``: its memory, and the time of its decisions."""
    click.echo(
        "\n| replicas | keys of each | memory, MB | a hit, us | a miss, us | 300 holders, us | told, us | a join, ms |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    for size in sizes:
        click.echo(f"| {size:,} | {keys} | " + " | ".join(f"{figure:.1f}" for figure in measured(size, keys)) + " |")


def measured(size: int, keys: int) -> list[float]:
    names = [f"replica {number}" for number in range(size)]
    held = {name: [f"{number * keys + one:032x}" for one in range(keys)] for number, name in enumerate(names)}
    tracemalloc.start()
    router = Router(random.Random(0).randrange, RoutingLimits())
    for name in names:
        router.joined(name)
        router.told(name, held[name])
    router.choose(("",))
    memory = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    some = random.Random(1).choices(names, k=2_000)
    hits = timed([lambda name=name: router.choose((held[name][0],)) for name in some])
    misses = timed([lambda number=number: router.choose((f"new {number}",)) for number in range(2_000)])
    tells = timed([lambda name=name: router.told(name, held[name]) for name in some[:200]])
    for name in names[:300]:
        router.told(name, ["hot"])
    hot = timed([lambda: router.choose(("hot",))] * 200)
    begun = time.perf_counter()
    router.joined("one more")
    router.choose(("new",))
    return [memory, hits, misses, hot, tells, 1e3 * (time.perf_counter() - begun)]


def timed(calls: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one."""
    begun = time.perf_counter()
    for call in calls:
        call()
    return 1e6 * (time.perf_counter() - begun) / len(calls)


# -- plots -------------------------------------------------------------------------------------------------------------


def draw(found: Mapping[tuple[str, str], Played], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "fleet"  # the same ids in every run
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, panes = plt.subplots(1, 3, figsize=(12, 4), layout="constrained")
    kinds = {"hit_rate": "hit rate", "p99": "p99 to the first token, s", "imbalance": "imbalance"}
    for pane, (name, title) in zip(panes, kinds.items(), strict=True):
        for index, policy in enumerate(POLICIES):
            places = [number + 0.2 * (index - 1.5) for number in range(len(SCENARIOS))]
            pane.bar(places, [getattr(found[one, policy], name) for one in SCENARIOS], width=0.19, label=policy)
        pane.set_xticks(range(len(SCENARIOS)), SCENARIOS)
        pane.set_title(title)
        pane.set_yscale("linear" if name == "hit_rate" else "log")
    figure.legend(*panes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, folder / "fleet-policies.svg")
    figure, panes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for pane, scenario in zip(panes, ("burst", "loss"), strict=True):
        for policy in POLICIES:
            waits = found[scenario, policy].p99_by_second
            begin = SCENARIOS[scenario].warm_seconds
            pane.plot([begin + second for second in range(len(waits))], waits, label=policy)
        pane.set_yscale("log")
        pane.set_title(f"{scenario}: p99 to the first token, s")
        pane.set_xlabel("second of arrival")
    figure.legend(*panes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save(figure, folder / "fleet-time.svg")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text(encoding="utf-8")
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    click.echo(f"wrote {path.name}")


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--replicas", default=1_000, show_default=True)
@click.option("--workers", default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--only", type=click.Choice(["policies", "sweeps", "routers"]), help="One part; by default the policies.")
@click.option("--images", type=click.Path(path_type=Path), default=IMAGES, help="The folder of the plots.")
def main(replicas: int, workers: int, only: str | None, images: Path) -> None:
    if only == "sweeps":
        sweep(replicas, workers)
        return
    if only == "routers":
        routers([replicas, 10 * replicas], keys=64)
        return
    begun = time.perf_counter()
    found = compare(replicas, workers)
    claims = list(claims_of(found))
    draw(found, images)
    took = time.perf_counter() - begun
    claims.append((took < 1_200, f"{replicas:,} replicas: {took:.0f} s of this machine, below 1,200"))
    for right, claim in claims:
        click.echo(f"{'holds' if right else 'FAILS'}: {claim}")
    sys.exit(0 if all(right for right, _ in claims) else 1)


if __name__ == "__main__":
    main()
