"""``python -m triolet.testing``: the sweep."""

from __future__ import annotations

import time

import click

from .sweep import sweep_all


@click.command()
@click.option("--faults", "least_faults", default=20_000, show_default=True, help="how many faults, at least")
@click.option("--seed", default=0, show_default=True, help="the first seed of the schedules")
@click.option("--workers", default=1, show_default=True, help="processes")
def main(least_faults: int, seed: int, workers: int) -> None:
    """Inject every kind of fault at every step of every task of every scenario."""
    begun = time.perf_counter()
    report = sweep_all(least_faults, seed=seed, workers=workers)
    took = time.perf_counter() - begun
    click.echo(f"{report.runs} runs, {report.faults} faults in {took:.0f} s")
    click.echo(f"{report.runs / report.seconds:.0f} runs a second and core")
    for kind, count in report.by_kind.most_common():
        click.echo(f"{count:9d} {kind}")
    click.echo("clients ended: " + ", ".join(f"{end} {count}" for end, count in report.by_end.most_common()))
    for failure in report.failures:
        click.echo(f"BROKEN {failure}")
    if report.failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
