"""The command ``triolet verify``: it checks the promises of another engine's cache manager or scheduler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from .api.command_line.pages import Page, files
from .api.command_line.terminal import FAILED, OutputError, complain, stdout, write

if TYPE_CHECKING:
    from .testing.kit.findings import Findings

_BOOLEANS = {"yes": True, "true": True, "no": False, "false": False}
_EXAMPLES = (
    ("triolet verify triolet.testing.kit.step_engine:Adapter", "the engine of the page"),
    ("triolet verify my_engine.adapter:make_cache --declare closes=no", "no close()"),
    ("triolet verify my_engine.adapter:make_cache --emit-test test_found.py", ""),
)


@click.command(cls=Page, examples=_EXAMPLES, short_help="Look for bugs in another engine's cache manager.")
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "--protocol",
    type=click.Choice(("step", "scheduler")),
    default="step",
    help="What is adapted: the cache manager of a step engine, or a whole scheduler. Default: step.",
)
@click.option(
    "--declare",
    "declared",
    metavar="NAME=VALUE",
    multiple=True,
    help="What the engine does otherwise, such as closes=no; more than once. See docs/adapt_your_cache.md.",
)
@click.option("--workloads", metavar="N", type=click.IntRange(1), default=1000, help="How many. Default: 1000.")
@click.option("--seed", metavar="N", type=int, default=0, help="Another one plays other workloads. Default: 0.")
@click.option(
    "--emit-test",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    shell_complete=files,
    help="Write a regression test for each finding into FILE.",
)
def verify(
    factory: str, protocol: str, declared: Sequence[str], workloads: int, seed: int, emit_test: Path | None
) -> int:
    """Look for bugs in another engine's cache manager, through an adapter of a few lines.

    FACTORY, imported from MODULE, makes an empty cache of so much room. Requests and the device are played with it, and
    every promise that it breaks is told, the worst first, with its shortest history. Status 1: there is one.
    """
    out = stdout()
    make = _factory(factory)
    from .testing import kit

    examine: Any = kit.examine_steps if protocol == "step" else kit.examine_scheduler
    declaration = {"step": kit.StepDeclaration, "scheduler": kit.SchedulerDeclaration}[protocol]
    options: dict[str, Any] = {"declared": _declaration(declaration, declared), "subject": factory}
    try:
        findings = examine(make, seed=seed, workloads=workloads, **options)
    except kit.WrongAdapter as error:
        complain(str(error))
        return FAILED
    write(str(findings), out)
    if emit_test is not None and findings:
        _emit(findings, emit_test)
    return FAILED if findings else 0


def _factory(named: str) -> Any:
    """Imports the factory ``named``, with the working folder in the path of imports."""
    module, _, name = named.partition(":")
    if not module or not name:
        raise click.UsageError(
            f"{named!r} names no factory; write MODULE:FACTORY, such as my_engine.adapter:make_cache"
        )
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise click.UsageError(f"{named!r} cannot be imported: {error}") from error


def _declaration(declaration: type[Any], declared: Sequence[str]) -> Any:
    fields = {one.name: one for one in attrs.fields(declaration)}
    values: dict[str, Any] = {}
    for one in declared:
        name, _, value = one.partition("=")
        if name not in fields:
            raise click.UsageError(f"--declare {one}: there is no {name!r}; allowed: {', '.join(fields)}")
        values[name] = _value(one, value, fields[name].default)
    try:
        return declaration(**values)
    except ValueError as error:
        raise click.UsageError(f"--declare: {error.args[0]}") from error


def _value(told: str, value: str, default: object) -> Any:
    """Reads ``value`` as the type of ``default``."""
    if isinstance(default, bool):
        if value not in _BOOLEANS:
            raise click.UsageError(f"--declare {told}: got {value!r}, allowed: yes or no")
        return _BOOLEANS[value]
    if isinstance(default, int):
        if not value.isdecimal():
            raise click.UsageError(f"--declare {told}: got {value!r}, allowed: a number")
        return int(value)
    return value


def _emit(findings: Findings, path: Path) -> None:
    try:
        path.write_text(findings.tests(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error}") from error
    complain(f"wrote {len(findings)} regression tests into {path}")
