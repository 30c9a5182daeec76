"""The command ``triolet-kit``: it checks the promises of an engine's cache manager or scheduler."""

from __future__ import annotations

import importlib
import sys
import textwrap
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs

from . import SchedulerDeclaration, StepDeclaration
from .findings import Findings, Replay
from .schedulers import examine_scheduler, replay_scheduler
from .steps import examine_steps, replay_steps

_PROTOCOLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], type[Any]]] = {
    "step": (examine_steps, replay_steps, StepDeclaration),
    "scheduler": (examine_scheduler, replay_scheduler, SchedulerDeclaration),
}
_BOOLEANS = {"yes": True, "true": True, "no": False, "false": False}
_DESCRIPTION = """Find bugs in an engine's cache manager or scheduler through an adapter of a few lines.

FACTORY is a function of MODULE that makes an empty cache or scheduler. The kit plays the requests and the device. It
prints each broken promise, the worst first, with its shortest history. It also prints how often each kind of event
happened: a zero shows what was not tried. The exit status is 1 if a promise is broken.
"""
_EXAMPLES = """examples:
  triolet-kit triolet_kit.step_engine:Adapter
  triolet-kit my_engine.adapter:make_cache --declare closes=no --emit-test test_found.py
  triolet-kit my_engine.adapter:make_cache --ignore "encode once" --ignore "frees hit: after a failure"
  triolet-kit my_engine.adapter:make_scheduler --protocol scheduler --workloads 100000 --json
  triolet-kit my_engine.adapter:make_scheduler --protocol scheduler --replay 1234"""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with 0 (nothing found), 1 (findings) or 2 (wrong usage)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    examine, replay, declaration = _PROTOCOLS[given.protocol]
    make = _factory(parser, given.factory)
    try:
        declared = _declaration(declaration, given.declared)
        if given.replay is not None:
            if given.ignore or given.must_happen or given.emit_test is not None:
                searches = "--ignore, --must-happen and --emit-test"
                raise ValueError(f"--replay shows one workload; leave out {searches}, which need a search")
            result = replay(make, declared, number=given.replay, seed=given.seed)
            _print(result, as_json=given.json)
            sys.exit(0 if result.broken is None else 1)
        findings = examine(
            make,
            declared,
            subject=given.factory,
            seed=given.seed,
            workloads=given.workloads,
            ignore=given.ignore,
            must_happen=given.must_happen,
        )
    except ValueError as error:
        parser.error(str(error))
    _print(findings, as_json=given.json)
    if given.emit_test is not None and findings:
        try:
            given.emit_test.write_text(findings.tests(), encoding="utf-8")
        except OSError as error:
            sys.exit(f"triolet-kit: {given.emit_test} cannot be written: {error}")
        sys.stderr.write(f"triolet-kit: wrote {len(findings)} regression tests into {given.emit_test}\n")
    sys.exit(1 if findings or findings.missed else 0)


def _print(result: Findings | Replay, *, as_json: bool) -> None:
    sys.stdout.write(f"{result.as_json() if as_json else result}\n")


def _parser() -> ArgumentParser:
    epilog = "\n\n".join([_EXAMPLES, *(_options(name, declared) for name, (*_, declared) in _PROTOCOLS.items())])
    parser = ArgumentParser(
        "triolet-kit", description=_DESCRIPTION, epilog=epilog, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("factory", metavar="MODULE:FACTORY")
    add(
        "--protocol",
        choices=tuple(_PROTOCOLS),
        default="step",
        help="what FACTORY makes: a cache manager (step) or a scheduler (default: step)",
    )
    add(
        "--declare",
        dest="declared",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a property of the engine, such as closes=no (all are listed below); may be repeated",
    )
    add(
        "--workloads", metavar="N", type=_positive, default=1000, help="the number of workloads to play (default: 1000)"
    )
    add(
        "--seed",
        metavar="N",
        type=int,
        default=0,
        help="the seed of the workloads; another seed plays others (default: 0)",
    )
    add("--replay", metavar="N", type=_positive, help="play only workload N of --seed, and print its whole history")
    add(
        "--ignore",
        metavar="NAME",
        action="append",
        default=[],
        help="do not list findings of this name, which is PROMISE or PROMISE: KIND as in the report; may be repeated",
    )
    add(
        "--must-happen",
        metavar="EVENT",
        action="append",
        default=[],
        help="fail if this statistic, such as preemptions, stays zero; may be repeated",
    )
    add("--json", action="store_true", help="print findings, seed and statistics as JSON")
    add("--emit-test", metavar="FILE", type=Path, help="write a regression test for each finding into FILE")
    return parser


def _options(protocol: str, declaration: type[Any]) -> str:
    """Returns the declarations of a protocol, with their defaults."""
    defaults = {one.name: one.default for one in attrs.fields(declaration)}
    words = {name: _word(value) for name, value in defaults.items()}
    told = [f"{name}={word}" for name, word in words.items()]
    return textwrap.fill(f"--declare, by default, for --protocol {protocol}: {', '.join(told)}", subsequent_indent="  ")


def _word(value: object) -> object:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return ("no", "yes")[value] if isinstance(value, bool) else value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"got {text!r}; allowed: an integer, 1 or more")
    return int(text)


def _factory(parser: ArgumentParser, named: str) -> Any:
    """Imports the factory ``named``, with the working folder in the path of imports. An error that the module raises is
    left as it is, since its traceback helps the user.
    """
    module, _, name = named.partition(":")
    if not module or not name:
        parser.error(f"{named!r} is not a factory; allowed: MODULE:FACTORY, such as my_engine.adapter:make_cache")
    sys.path.insert(0, "")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        parser.error(f"{named!r} cannot be imported: {error}")
    if not hasattr(found, name):
        parser.error(f"{named!r} cannot be imported: {module} has no attribute {name!r}")
    return getattr(found, name)


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
            raise ValueError(f"--declare {given}: got {value!r}; allowed: yes or no")
        return _BOOLEANS[value]
    if isinstance(default, int):
        if not value.isdecimal():
            raise ValueError(f"--declare {given}: got {value!r}; allowed: an integer")
        return int(value)
    if isinstance(default, tuple):
        parts = value.split(",")
        if not all(part.isdecimal() for part in parts):
            raise ValueError(f"--declare {given}: got {value!r}; allowed: integers, as 1,2,4")
        return tuple(map(int, parts))
    return value


if __name__ == "__main__":
    main()
