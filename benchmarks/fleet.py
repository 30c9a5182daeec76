"""The effect of routing on a fleet of replicas, in simulation: policies in four loads, and what breaks first at scale.

::

    python benchmarks/fleet.py                                 # 1,000 replicas: the table and the claims
    python benchmarks/fleet.py --only sweeps --replicas 200    # ingresses, how often replicas report, catalogue

All seconds are virtual, and the same on every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from attrs import evolve, field, frozen
from claims import Claims
from simulated_fleet.fleet import Fleet, Loss, play
from simulated_fleet.load import Burst, Load
from simulated_fleet.outcome import Played
from simulated_fleet.policies import POLICIES

KEY_BYTES, LOAD_BYTES = 32, 16  # bytes of a key in hexadecimal digits; bytes of a replica's number with two counts
OURS, PLAIN, BOUNDED = "by content", "by hash", "by bounded hash"


@frozen(kw_only=True)
class Case:
    """A load with losses, for a fleet. ``rate`` is the number of requests a second for each replica."""

    rate: float
    seconds: float
    contents: int = 500  # for each replica, whose cache holds 64 of them
    bursts: tuple[Burst, ...] = ()
    losses: tuple[Loss, ...] = ()
    fleet: Fleet = field(factory=Fleet)

    def play(self, policy: str, replicas: int) -> Played:
        load = Load(
            rate=self.rate * replicas,
            seconds=self.seconds,
            warm_seconds=6.0,
            contents=self.contents * replicas,
            bursts=self.bursts,
        )
        return play(evolve(self.fleet, replicas=replicas, full=True), load, POLICIES[policy], losses=self.losses)


SCENARIOS = {
    "steady": Case(rate=4.0, seconds=14.0),
    "burst": Case(rate=3.0, seconds=20.0, bursts=(Burst(begin=10.0, seconds=6.0),)),
    "loss": Case(rate=2.5, seconds=32.0, losses=(Loss(at=10.0, share=0.1, seconds=15.0),)),
    "high load": Case(rate=8.0, seconds=16.0),
}
"""The loads. A burst doubles the arrivals, and 30 % of them ask for one new content. A loss kills a tenth of the
replicas."""


def sweeps() -> Iterator[tuple[str, Case]]:
    base = Case(rate=6.0, seconds=14.0)
    for routers in (1, 4, 16, 64):
        yield f"{routers} ingresses", evolve(base, fleet=Fleet(routers=routers))
    for seconds in (0.2, 5.0):  # the reports of keys include the load, whatever ``load_seconds`` is
        yield f"16 ingresses, loads every {seconds:g} s", evolve(base, fleet=Fleet(routers=16, load_seconds=seconds))
    for seconds in (1.0, 20.0, 1e6):
        yield f"16 ingresses, keys every {seconds:g} s", evolve(base, fleet=Fleet(routers=16, tell_seconds=seconds))
    for times in (0.5, 2, 20, 200):
        yield f"catalogue of {times:g} x all caches", evolve(base, contents=round(64 * times))


def played(job: tuple[Case, str, int]) -> Played:
    case, policy, replicas = job
    return case.play(policy, replicas)


def figures(one: Played) -> str:
    return f"{one.hit_rate:.1%} | {one.p50:.2f} | {one.p99:.2f} | {one.imbalance:.2f}"


def policies(replicas: int, mapped: Any) -> None:
    keys = [(scenario, policy) for scenario in SCENARIOS for policy in POLICIES]
    found = dict(zip(keys, mapped(played, [(SCENARIOS[name], policy, replicas) for name, policy in keys]), strict=True))
    print("| scenario | policy | requests | hit rate | p50, s | p99, s | imbalance | mean to the end, s | sent again |")
    for (scenario, policy), one in found.items():
        told = f"{one.requests:,} | {figures(one)} | {one.mean:.2f} | {one.sent_again:,}"
        print(f"| {scenario} | {policy} | {told} |")
    claim = Claims()
    for scenario in SCENARIOS:
        ours, plain, bounded = (found[scenario, policy] for policy in (OURS, PLAIN, BOUNDED))
        lost = 100 * (plain.hit_rate - ours.hit_rate)
        claim(lost <= 3, f"{scenario}: the hit rate is {lost:.1f} points below plain hashing's, at most 3")
        claim(ours.p99 <= plain.p99 / 2, f"{scenario}: p99 is at most half of plain hashing's")
        if scenario in ("burst", "high load"):
            claim(ours.p99 <= bounded.p99, f"{scenario}: p99 is not above bounded hashing's")
    high = found["high load", OURS].imbalance
    claim(high <= 1.3, f"high load: the longest device time is {high:.2f} of the mean, at most 1.3")
    claim.exit()


def sweep(replicas: int, mapped: Any) -> None:
    names, cases = zip(*sweeps(), strict=True)
    found = mapped(played, [(case, OURS, replicas) for case in cases])
    print("| setting | hit rate | p50, s | p99, s | imbalance | bytes a second into each router |")
    for name, case, one in zip(names, cases, found, strict=True):
        told = one.told * KEY_BYTES + replicas / case.fleet.load_seconds * LOAD_BYTES
        print(f"| {name} | {figures(one)} | {told:,.0f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1_000)
    parser.add_argument("--only", choices=["policies", "sweeps"], default="policies")
    asked = parser.parse_args()
    with ProcessPoolExecutor() as pool:
        (policies if asked.only == "policies" else sweep)(asked.replicas, pool.map)


if __name__ == "__main__":
    main()
