"""The program ``python -m triolet_testing``, which runs the sweep."""

from __future__ import annotations

import gc
import logging
import time

import click

from .situations import SITUATIONS, STAGES, told
from .sweep import Report, sweep_all

LONG = 20_000
"""So many faults must come into every situation."""


@click.command()
@click.option("--faults", default=20_000, show_default=True, type=click.IntRange(min=1), help="how many, at least")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0), help="the first of the schedules")
@click.option("--workers", default=1, show_default=True, type=click.IntRange(min=1), help="processes")
def main(faults: int, seed: int, workers: int) -> None:
    """Inject every kind of fault at every step of every task of every scenario, and see whether a promise breaks."""
    begun, latest = time.perf_counter(), Report()

    def tell(report: Report) -> None:
        nonlocal latest
        latest = report
        click.echo(f"{report.faults} faults in {report.runs} runs, {time.perf_counter() - begun:.0f} s", err=True)

    try:
        latest = sweep_all(faults, seed=seed, workers=workers, on_progress=tell)
    except KeyboardInterrupt:
        click.echo("interrupted; so far:", err=True)
    _print(latest, time.perf_counter() - begun)
    lines, complete = told(latest.seen, (*SITUATIONS, *STAGES), enough=latest.faults >= LONG)
    click.echo(lines)
    if latest.failures or not complete:
        raise SystemExit(1)


def _print(report: Report, seconds: float) -> None:
    click.echo(f"{report.runs} runs, {report.faults} faults in {seconds:.0f} s; {len(report.failures)} broken promises")
    click.echo(f"{report.judged} steps of our scheduler were judged as the kit judges another's")
    if report.seconds:
        click.echo(f"{report.runs / report.seconds:.0f} runs a second and core")
    for kind, count in report.by_kind.most_common():
        click.echo(f"{count:9d} {kind}")
    click.echo("clients ended: " + ", ".join(f"{end} {count}" for end, count in report.by_end.most_common()))
    for failure in report.failures:
        click.echo(f"BROKEN {failure}")


def begin() -> None:
    """Runs the program without logging, since the errors are injected and the report lists the broken promises."""
    logging.getLogger("triolet").setLevel(logging.CRITICAL + 1)
    gc.freeze()  # the collector need not scan present objects
    main()


if __name__ == "__main__":
    begin()
