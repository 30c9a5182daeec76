"""Flags that are made of declared fields: those of a transcription, of sampling, and of subtitles.

A flag has the name, kind, choices, default and sentence of its field. Only values that were given are passed on; the
others are the defaults of the fields.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click

from ...core.errors import InvalidRequest
from ...core.request import SamplingParams, Structure
from ..formats.settings import SubtitleSettings
from ..speech.options import OPTIONS, TranscribeOptions
from .given import check_readable, checked_text
from .pages import FILE, folders, languages
from .terminal import WrongFile

Command = TypeVar("Command", bound=Callable[..., Any])

SAMPLING = tuple(name for name in attrs.fields_dict(SamplingParams) if name not in ("n", "structure"))
FORM = ("schema", "regex", "choices", "grammar")
SUBTITLES = tuple(attrs.fields_dict(SubtitleSettings))
_MOST_TEMPERATURES = 1_000
_NONE = "None"
_REPEATED = {"known_speakers": "NAME=FILE", "logit_bias": "ID=NUMBER", "stop": "TEXT"}
_COMPLETED = {"language": languages, "aligner": folders, "diarizer": folders}
_SHOWN = {"parallel": "on for files over two minutes", "skip_special_tokens": "on", False: "off", True: "on"}


class Number(click.ParamType[Any]):
    """A number, or the text "None", which becomes the value ``none``. With ``several``, numbers separated by commas."""

    def __init__(self, kind: type[int] | type[float], *, none: int | None = None, several: bool = False) -> None:
        self.name = "integer" if kind is int else "number"
        self._kind = kind
        self._none = none
        self._several = several

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the value of the text ``value``, as click asks."""
        if not isinstance(value, str):
            return value
        if value == _NONE and not self._several:
            return self._none
        try:
            if self._several:
                return tuple(self._kind(part) for part in value.split(",") if part.strip())
            return self._kind(value)
        except ValueError:
            allowed = "numbers separated by commas, such as 1,2" if self._several else f"one {self.name} or None"
            self.fail(f"{value!r}; allowed: {allowed}", param, ctx)


def sentences(settings: type) -> dict[str, str]:
    """The first sentence about each field in the docstring of ``settings``, without backticks and quotation marks, and
    with flags in place of other fields."""
    text = inspect.cleandoc(settings.__doc__ or "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    firsts = {name: re.split(r"(?<=\.) (?=[A-Z`])", " ".join(entry.split()))[0] for name, entry in entries}
    known = attrs.fields_dict(settings)
    flagged = re.compile(rf"\b({'|'.join(name for name in known if '_' in name)})\b")

    def told(sentence: str) -> str:
        text = re.sub('[`"]', "", sentence[0].upper() + sentence[1:])
        return flagged.sub(lambda found: f"--{found[1].replace('_', '-')}", text)

    return {name: told(one) for name, one in firsts.items() if name in known}


def field_options(
    settings: type[attrs.AttrsInstance], names: Collection[str], needs: str = ""
) -> Callable[[Command], Command]:
    """Adds a flag for each of ``names``, fields of ``settings``. `given_options` reads their values. ``needs`` is a
    sentence that is true of all."""

    def add(command: Command) -> Command:
        told = sentences(settings)
        for attribute in reversed([one for one in attrs.fields(settings) if one.name in names]):
            command = _option(attribute, told[attribute.name] + needs)(command)
        return command

    return add


def _option(attribute: attrs.Attribute[Any], told: str) -> Callable[[Command], Command]:
    name, default, kind = attribute.name, attribute.default, str(attribute.type)
    flag = "--known-speaker" if name == "known_speakers" else f"--{name.replace('_', '-')}"
    if kind.startswith("bool"):
        shown = _SHOWN.get(name, _SHOWN.get(default))
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=f"{told} Default: {shown}.")
    if name in _REPEATED:
        return click.option(flag, name, metavar=_REPEATED[name], multiple=True, help=f"{told} May be repeated.")
    shown = f" Default: {default}." if isinstance(default, str | int | float) else ""
    metavar, completes = "MODEL" if name in ("aligner", "diarizer") else None, _COMPLETED.get(name)
    return click.option(
        flag, name, metavar=metavar, type=_type_of(attribute), default=None, shell_complete=completes, help=told + shown
    )


def _type_of(attribute: attrs.Attribute[Any]) -> click.ParamType[Any]:
    option = attribute.metadata.get("option")
    if option is not None and option.choices:
        return click.Choice(option.choices)
    found = re.fullmatch(r"(tuple\[)?(int|float)(?:, \.\.\.\])?(?: \| None)?", str(attribute.type))
    if found is None:
        return click.STRING
    none = 1 if attribute.name in ("beam_size", "best_of") else None  # for openai/whisper None means one
    return Number(int if found[2] == "int" else float, none=none, several=found[1] is not None)


speech_options = field_options(TranscribeOptions, OPTIONS)
"""Adds the flags of a transcription."""
subtitle_options = field_options(SubtitleSettings, SUBTITLES, " Needs --word-timestamps.")
"""Adds the flags of `SubtitleSettings`."""


def sampling_options(command: Command) -> Command:
    """Adds the flags of `SamplingParams`, which `sampling_of` reads."""
    matched = "Write text that the whole regular expression matches. [0-9] is an ASCII digit, \\d any script's."
    followed = "Write text that follows the grammar in FILE, in the Lark dialect of llguidance."
    chosen = "Write one of these texts. Give --choice once for each text."
    for option in (
        click.option("--grammar", **FILE, help=followed),
        click.option("--choice", "choices", multiple=True, metavar="TEXT", help=chosen),
        click.option("--regex", metavar="REGEX", help=matched),
        click.option("--json-schema", "schema", **FILE, help="Write JSON that follows the JSON schema in FILE."),
    ):
        command = option(command)
    return field_options(SamplingParams, SAMPLING)(command)


# ---- reading ---------------------------------------------------------------------------------------------------------


def given_options(context: click.Context, names: Collection[str]) -> dict[str, Any]:
    """The values of ``names`` whose flags were given."""
    given = click.core.ParameterSource.COMMANDLINE
    return {name: context.params[name] for name in names if context.get_parameter_source(name) is given}


def read_flags(
    given: Mapping[str, Any], *, word_timestamps: bool | None = None, increment: float | None = 0.2
) -> dict[str, Any]:
    """The options of a transcription for the flags that were given.

    Args:
        given: the result of `given_options`.
        word_timestamps: the value of openai/whisper's flag for ``timestamps="word"``; ``None``: not given.
        increment: the step by which a single temperature rises up to 1; ``None``: it does not rise.

    Raises:
        InvalidRequest: a value that is not allowed.
    """
    options = dict(given)
    if "known_speakers" in options:
        options["known_speakers"] = _known_speakers(options["known_speakers"])
    if options.get("language") == _NONE:
        options["language"] = None
    if word_timestamps is not None:
        timestamps = options.setdefault("timestamps", "word" if word_timestamps else "segment")
        if (timestamps == "word") is not word_timestamps:
            raise InvalidRequest(f"{timestamps=!s} with {word_timestamps=!s}; give only one of the two")
    if "temperature" in options or increment != 0.2:
        options["temperature"] = temperatures(options.get("temperature", (0.0,)), increment)
    TranscribeOptions(**options)
    return options


def _known_speakers(given: Sequence[str]) -> dict[str, str]:
    known: dict[str, str] = {}
    for one in given:
        name, _, file = one.partition("=")
        if not file or name in known:
            raise InvalidRequest(f"known_speakers={one!r}; allowed: NAME=FILE, once for each name")
        known[name] = file
    return known


def temperatures(given: Sequence[float], increment: float | None) -> tuple[float, ...]:
    """The temperatures to try. If ``given`` has a single one, it rises by ``increment`` up to 1, as in openai/whisper's
    command. Several are returned as they are.
    """
    if increment is not None and not 1 / _MOST_TEMPERATURES <= increment < float("inf"):
        raise InvalidRequest(
            f"temperature_increment_on_fallback={increment}; allowed: a number of 0.001 or more, or None"
        )
    if len(given) != 1 or increment is None or not 0 <= given[0] <= 1:
        return tuple(given)
    steps = int((1.0 - given[0]) / increment + 1e-6)
    return tuple(round(given[0] + step * increment, 10) for step in range(steps + 1))


def sampling_of(context: click.Context) -> SamplingParams:
    """The sampling that the flags of `sampling_options` ask for.

    Raises:
        InvalidRequest: a value that is not allowed.
        WrongFile: a file that cannot be used.
    """
    values = given_options(context, SAMPLING)
    if "logit_bias" in values:
        values["logit_bias"] = tuple(map(_bias, values["logit_bias"]))
    return SamplingParams(**values, structure=_structure(**{name: context.params[name] for name in FORM}))


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
