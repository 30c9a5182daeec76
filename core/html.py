"""Statistics as tables of HTML, which notebooks show in place of a long repr. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from .ledger_values import LedgerStatistics
from .plan import DeviceMemory
from .planning.statistics import PlannerStatistics
from .power import Power

Row = tuple[str, str]  # its name, its figures


def table(caption: str, rows: Iterable[Row]) -> str:
    """A table with a line for each row."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(figures)}</td></tr>'
        for name, figures in rows
    )
    return f'<table><caption style="text-align:left">{escape(caption)}</caption>{lines}</table>'


def statistics_rows(
    power: Power, requests: PlannerStatistics, encoder_cache: LedgerStatistics, device: DeviceMemory
) -> tuple[Row, ...]:
    """The figures of an engine, without those of parts that its model does not have."""
    return (
        ("power", power.value),
        ("requests", f"{requests.waiting:,} waiting, {requests.running:,} running, {requests.leaving:,} leaving"),
        ("steps", _steps(requests)),
        ("tokens", _tokens(requests)),
        *_memory_of_sequences(requests),
        *_encoder_cache(encoder_cache),
        (f"memory on {device.device}", _memory(device)),
    )


def _steps(requests: PlannerStatistics) -> str:
    return (
        f"{requests.steps:,}, {requests.failed_steps:,} failed, {requests.steps_in_flight:,} in flight; "
        f"{requests.preemptions:,} preemptions"
    )


def _tokens(requests: PlannerStatistics) -> str:
    told = f"{requests.tokens_committed:,} sampled; prompts: {requests.tokens_cached:,} cached"
    if requests.tokens_drafted:
        told += f"; draft tokens: {requests.tokens_accepted:,} of {requests.tokens_drafted:,} right"
    return told


def _memory_of_sequences(requests: PlannerStatistics) -> Iterable[Row]:
    if requests.pages:
        used = requests.pages - requests.pages_free
        yield "pages", f"{used:,} of {requests.pages:,} used, {requests.pages_cached:,} cached"
    if requests.cross_slots:
        used, idle = requests.cross_slots_used, requests.cross_slots_idle
        yield "cross slots", f"{used:,} of {requests.cross_slots:,} used, {idle:,} idle"


def _encoder_cache(cache: LedgerStatistics) -> Iterable[Row]:
    if cache.acquires:
        entries = f"{cache.entries:,} entries, {cache.held:,} held; {cache.hits:,} of {cache.acquires:,} acquires hit"
        yield "encoder cache", f"{_mebibytes(cache.taken)} of {_mebibytes(cache.capacity)}; {entries}"


def _memory(device: DeviceMemory) -> str:
    owners = sorted(device.by_owner.items(), key=lambda item: -item[1])
    told = ", ".join(f"{owner.replace('_', ' ')} {_mebibytes(count)}" for owner, count in owners if count)
    return f"{_mebibytes(device.total)}{': ' if told else ''}{told}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
