"""The command ``triolet-kit``: it checks the promises of an engine's cache manager or scheduler."""

from __future__ import annotations

import importlib
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs

from . import SchedulerDeclaration, StepDeclaration, WrongAdapter, examine_scheduler, examine_steps

_PROTOCOLS: dict[str, tuple[Callable[..., Any], type[Any]]] = {
    "step": (examine_steps, StepDeclaration),
    "scheduler": (examine_scheduler, SchedulerDeclaration),
}
_BOOLEANS = {"yes": True, "true": True, "no": False, "false": False}
_DESCRIPTION = """Look for bugs in an engine's cache manager or scheduler, through an adapter of a few lines.

FACTORY, imported from MODULE, makes an empty cache or scheduler. The kit plays the requests and the device, and prints
every broken promise, the worst first, with its shortest history. Status 1: a promise is broken."""
_EXAMPLES = """examples:
  triolet-kit triolet_kit.step_engine:Adapter
  triolet-kit my_engine.adapter:make_cache --declare closes=no --emit-test test_found.py
  triolet-kit my_engine.adapter:make_scheduler --protocol scheduler --workloads 100000"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with 0 (nothing found), 1 (findings, or an adapter that cannot be called) or 2 (wrong
    usage)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    examine, declaration = _PROTOCOLS[given.protocol]
    try:
        make = _factory(given.factory)
        declared = _declaration(declaration, given.declared)
    except ValueError as error:
        parser.error(str(error))
    try:
        findings = examine(make, declared, seed=given.seed, workloads=given.workloads, subject=given.factory)
    except WrongAdapter as error:
        sys.exit(f"triolet-kit: {error}")
    sys.stdout.write(f"{findings}\n")
    if given.emit_test is not None and findings:
        try:
            given.emit_test.write_text(findings.tests(), encoding="utf-8")
        except OSError as error:
            sys.exit(f"triolet-kit: {given.emit_test} cannot be written: {error}")
        sys.stderr.write(f"triolet-kit: wrote {len(findings)} regression tests into {given.emit_test}\n")
    sys.exit(1 if findings else 0)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        "triolet-kit", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("factory", metavar="MODULE:FACTORY")
    add("--protocol", choices=tuple(_PROTOCOLS), default="step", help="a cache manager (step) or a whole scheduler")
    add(
        "--declare",
        dest="declared",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a way in which the engine differs, such as closes=no; may be repeated",
    )
    add("--workloads", metavar="N", type=_positive, default=1000, help="how many workloads are played (1000)")
    add("--seed", metavar="N", type=int, default=0, help="another seed plays other workloads (0)")
    add("--emit-test", metavar="FILE", type=Path, help="write a regression test for each finding into FILE")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}, allowed: a number from 1 on")
    return int(text)


def _factory(named: str) -> Any:
    """Imports the factory ``named``, with the working folder in the path of imports."""
    module, _, name = named.partition(":")
    if not module or not name:
        raise ValueError(f"{named!r} names no factory; write MODULE:FACTORY, such as my_engine.adapter:make_cache")
    sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{named!r} cannot be imported: {error}") from error


def _declaration(declaration: type[Any], declared: Sequence[str]) -> Any:
    fields = {one.name: one for one in attrs.fields(declaration)}
    values: dict[str, Any] = {}
    for one in declared:
        name, _, value = one.partition("=")
        if name not in fields:
            raise ValueError(f"--declare {one}: there is no {name!r}; allowed: {', '.join(fields)}")
        values[name] = _value(one, value, fields[name].default)
    try:
        return declaration(**values)
    except ValueError as error:
        raise ValueError(f"--declare: {error.args[0]}") from error


def _value(given: str, value: str, default: object) -> Any:
    """Reads ``value`` as the type of ``default``."""
    if isinstance(default, bool):
        if value not in _BOOLEANS:
            raise ValueError(f"--declare {given}: got {value!r}, allowed: yes or no")
        return _BOOLEANS[value]
    if isinstance(default, int):
        if not value.isdecimal():
            raise ValueError(f"--declare {given}: got {value!r}, allowed: a number")
        return int(value)
    return value


if __name__ == "__main__":
    main()
