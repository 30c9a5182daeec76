"""The flags of ``triolet generate`` that become `SamplingParams`, with the defaults of its fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from attrs import fields_dict

from ...core.request import SamplingParams, Structure
from .flags import Number
from .given import check_readable, checked_text
from .pages import FILE
from .terminal import WrongFile

Command = TypeVar("Command", bound=Callable[..., Any])

FORM = ("schema", "regex", "choices", "grammar")
_HELP = {
    "max_tokens": "The most tokens to write. Default: up to the model's last position.",
    "min_tokens": "The fewest tokens to write.",
    "temperature": "How freely tokens are sampled. 0: always the likeliest token.",
    "top_p": "Sample from the fewest tokens that together have this probability. 1: off.",
    "top_k": "Sample from this many of the likeliest tokens. 0: off.",
    "min_p": "Leave out tokens with less than this share of the likeliest token's probability. 0: off.",
    "repetition_penalty": "Above 1, tokens of the prompt and the output become less likely. 1: off.",
    "presence_penalty": "Above 0, tokens that were written become less likely. 0: off.",
    "frequency_penalty": "Above 0, tokens become less likely each time they are written. 0: off.",
    "logit_bias": "Add NUMBER to the logit of token ID. May be repeated.",
    "seed": "The seed of sampling. The same seed gives the same tokens.",
    "stop": "End the output before this text. May be repeated.",
    "stop_token_ids": "Ids of tokens that end the output, besides the model's own. Commas separate them.",
    "ignore_eos": "Do not end the output at the model's end-of-text token.",
    "logprobs": "Write the log-probabilities of the N likeliest tokens. Needs --json or --json-lines.",
    "beam_size": "Search with this many beams, and write the best text. 1: off.",
    "length_penalty": "Above 0, beam search prefers longer texts.",
    "patience": "Beam search ends after --beam-size times this number of texts. Default: when no text can improve.",
    "skip_special_tokens": "Leave special tokens out of the text. Default: on.",
}
SAMPLING = tuple(_HELP)
_KINDS: dict[str, dict[str, Any]] = {
    "max_tokens": {"type": int, "metavar": "N", "show_default": False},
    "logit_bias": {"multiple": True, "metavar": "ID=NUMBER", "show_default": False},
    "stop": {"multiple": True, "metavar": "TEXT", "show_default": False},
    "stop_token_ids": {"metavar": "ID,ID", "type": Number(int, several=True), "show_default": False},
    "ignore_eos": {"is_flag": True, "show_default": False},
    "logprobs": {"type": int, "metavar": "N", "show_default": False},
    "patience": {"type": Number(float), "show_default": False},
    "skip_special_tokens": {"show_default": False},
}


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
    for name, told in reversed(_HELP.items()):
        flag = f"--{name.replace('_', '-')}"
        if name == "skip_special_tokens":
            flag += f"/--no-{flag[2:]}"
        settings = {"default": fields_dict(SamplingParams)[name].default, "show_default": True, **_KINDS.get(name, {})}
        command = click.option(flag, name, help=told, **settings)(command)
    return command


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
