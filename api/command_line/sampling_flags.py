"""The flags of ``triolet generate`` that become `SamplingParams`, with the defaults and the sentences of its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import Attribute, fields_dict

from ...core.request import SamplingParams, Structure
from .flags import Number, sentences
from .given import check_readable, checked_text
from .pages import FILE
from .terminal import WrongFile

Command = TypeVar("Command", bound=Callable[..., Any])

FORM = ("schema", "regex", "choices", "grammar")
SAMPLING = tuple(name for name in fields_dict(SamplingParams) if name not in ("n", "structure"))
_REPEATED = {"logit_bias": "ID=NUMBER", "stop": "TEXT"}


def sampling_options(command: Command) -> Command:
    """Adds the flags to ``command``. `sampling_of` reads their values."""
    for option in (
        click.option(
            "--grammar", **FILE, help="Write text that follows the grammar in FILE, in the Lark dialect of llguidance."
        ),
        click.option(
            "--choice",
            "choices",
            multiple=True,
            metavar="TEXT",
            help="Write one of these texts. Give --choice once for each text.",
        ),
        click.option(
            "--regex",
            metavar="REGEX",
            help="Write text that the whole regular expression matches. [0-9] is an ASCII digit, \\d any script's.",
        ),
        click.option("--json-schema", "schema", **FILE, help="Write JSON that follows the JSON schema in FILE."),
    ):
        command = option(command)
    told = sentences(SamplingParams)
    for name in reversed(SAMPLING):
        command = _option(fields_dict(SamplingParams)[name], told[name])(command)
    return command


def _option(attribute: Attribute[Any], told: str) -> Callable[[Command], Command]:
    name, default, kind = attribute.name, attribute.default, str(attribute.type)
    flag = f"--{name.replace('_', '-')}"
    if name in _REPEATED:
        return click.option(flag, name, multiple=True, metavar=_REPEATED[name], help=f"{told} May be repeated.")
    if kind.startswith("bool"):
        switch = flag if default is False else f"{flag}/--no-{flag[2:]}"
        return click.option(switch, name, is_flag=True, default=default, help=told)
    number = Number(float if kind.startswith("float") else int, several=default == ())
    shown = isinstance(default, int | float)
    return click.option(flag, name, type=number, default=default, show_default=shown, help=told)


def sampling_of(given: dict[str, Any]) -> SamplingParams:
    """Returns the sampling that the flags ask for, and removes their values from ``given``.

    Raises:
        InvalidRequest: a value that is not allowed.
        WrongFile: a file that cannot be used.
    """
    values = {name: given.pop(name) for name in SAMPLING}
    values["logit_bias"] = tuple(map(_bias, values["logit_bias"]))
    return SamplingParams(**values, structure=_structure(**{name: given.pop(name) for name in FORM}))


def _bias(given: str) -> tuple[int, float]:
    token, _, bias = given.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.UsageError(f"--logit-bias {given}; allowed: ID=NUMBER, such as 50=-2.5") from None


def _structure(schema: str | None, regex: str | None, choices: Sequence[str], grammar: str | None) -> Structure | None:
    """Returns the structure that one of the flags describes; ``None``: no flag is given."""
    flags = {"--json-schema": schema, "--regex": regex, "--choice": choices, "--grammar": grammar}
    given = [flag for flag, value in flags.items() if value not in (None, ())]
    if len(given) > 1:
        raise click.UsageError(f"{' with '.join(given)}; allowed: one of them, since an output has one form")
    if schema is not None:
        return _followed(_of_schema(schema), WrongFile, f"{schema}: ")
    if grammar is not None:
        return _followed(Structure(kind="lark", text=_text(grammar)), WrongFile, f"{grammar}: ")
    if regex is not None:
        return _followed(Structure(kind="regex", text=checked_text(regex, "--regex")), click.UsageError, "--regex: ")
    if choices:
        return _followed(Structure.choice([checked_text(one, "--choice") for one in choices]), click.UsageError, "")
    return None


def _of_schema(name: str) -> Structure:
    try:
        json.loads(text := _text(name))
        return Structure.json_schema(text)  # with the digits of its numbers
    except ValueError as error:
        raise WrongFile(f"{name}: it is not JSON ({error}); give a JSON schema") from error
    except RecursionError as error:
        raise WrongFile(
            f"{name}: it is nested too deeply to be read; let the schema refer to itself instead"
        ) from error


def _text(name: str) -> str:
    check_readable(name)
    try:
        return Path(name).read_bytes().decode()
    except OSError as error:
        raise WrongFile(f"{name}: it cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise WrongFile(f"{name}: it is not UTF-8 text (at byte {error.start}); convert it first") from error


def _followed(structure: Structure, wrong: type[click.ClickException], where: str) -> Structure:
    """Returns ``structure``. Raises an error of the class ``wrong`` if no output can follow it."""
    from ...models.sampling.structure import fault_of

    if fault := fault_of(structure):
        raise wrong(where + fault)
    return structure
