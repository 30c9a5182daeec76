"""The flags of ``triolet transcribe``: one for each declared option of a transcription.

A flag has the name, kind, choices, default and sentence of its option. Some flags can also be spelled as in
openai/whisper's command.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import click

from ...core.errors import InvalidRequest
from ..speech.options import OPTIONS, TranscribeOptions
from .pages import folders, languages

Command = TypeVar("Command", bound=Callable[..., Any])

_MOST_TEMPERATURES = 1_000
_NONE = "None"


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
    """The first sentence about each field in the docstring of ``settings``, without backticks and quotation marks."""
    text = inspect.cleandoc(settings.__doc__ or "")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE)
    firsts = {name: re.split(r"(?<=\.) (?=[A-Z`])", " ".join(entry.split()))[0] for name, entry in entries}
    known = attrs.fields_dict(settings)
    return {name: re.sub('[`"]', "", one[0].upper() + one[1:]) for name, one in firsts.items() if name in known}


def speech_options(command: Command) -> Command:
    """Adds the flags to ``command``, which gets each value under the name of its option."""
    told = sentences(TranscribeOptions)
    for attribute in reversed(attrs.fields(TranscribeOptions)):
        command = _option(attribute, told[attribute.name])(command)
    return command


def _option(attribute: attrs.Attribute[Any], told: str) -> Callable[[Command], Command]:
    name, default = attribute.name, attribute.default
    flag = f"--{name.replace('_', '-')}"
    if isinstance(default, bool):
        shown = "on for files over two minutes" if name == "parallel" else "on" if default else "off"
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=f"{told} Default: {shown}.")
    shown = f" Default: {default}." if isinstance(default, str | int | float) else ""
    if name == "known_speakers":
        return click.option("--known-speaker", name, metavar="NAME=FILE", multiple=True, help=told)
    completes = {"language": languages, "aligner": folders, "diarizer": folders}.get(name)
    metavar = "MODEL" if name in ("aligner", "diarizer") else None
    kind = _type_of(attribute)
    return click.option(
        flag, name, metavar=metavar, type=kind, default=None, shell_complete=completes, help=told + shown
    )


def _type_of(attribute: attrs.Attribute[Any]) -> click.ParamType[Any]:
    name, kind = attribute.name, str(attribute.type)
    if OPTIONS[name].choices:
        return click.Choice(OPTIONS[name].choices)
    if name in ("temperature", "suppress_tokens"):
        return Number(float if name == "temperature" else int, several=True)
    if kind.startswith(("int", "float")):
        none = 1 if name in ("beam_size", "best_of") else None  # for openai/whisper None means one
        return Number(int if kind.startswith("int") else float, none=none)
    return click.STRING


# ---- reading ---------------------------------------------------------------------------------------------------------


def given_options(context: click.Context) -> dict[str, Any]:
    """The options of a transcription whose flags were given."""
    given = click.core.ParameterSource.COMMANDLINE
    return {name: context.params[name] for name in OPTIONS if context.get_parameter_source(name) is given}


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
