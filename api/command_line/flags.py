"""The flags of ``triolet transcribe`` for the options of a transcription: one for each field of `TranscribeOptions`,
with the field's name, kind and default."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import click

from ...core.errors import InvalidRequest
from ..speech.options import ENCODER_CONTEXTS, TASKS, TIMESTAMPS, VOICE_ACTIVITY, TranscribeOptions
from .pages import languages

Command = TypeVar("Command", bound=Callable[..., Any])

FLAGS: Mapping[str, str] = {
    "language": "Spoken language: a code (en) or a name (english). Default: detect it.",
    "task": "translate: into English.",
    "initial_prompt": "Text that comes before the first window, for names and spelling.",
    "prefix": "Text with which the first window's text begins.",
    "condition_on_previous_text": "Give the text before to the model.",
    "prompt_reset_temperature": "Text sampled at a higher temperature is not given on.",
    "timestamps": "word: segments and their words; none: one segment a window.",
    "temperature": "One, which rises by --temperature-increment-on-fallback, or several, tried in order: 0,0.4,0.8.",
    "beam_size": "Hypotheses of beam search at temperature 0; 1 is greedy.",
    "patience": "How long beam search goes on behind the first texts; None: until no better one can come.",
    "length_penalty": "The power of its length by which a hypothesis' log-probability is divided.",
    "best_of": "Texts that are sampled at each temperature above 0; the likeliest is taken.",
    "compression_ratio_threshold": "Text that compresses better repeats itself: next temperature.",
    "logprob_threshold": "Text with a lower average log-probability is improbable: next temperature.",
    "no_speech_threshold": "A window more probably silent, and whose text is improbable, is silent.",
    "hallucination_silence_threshold": "Leave out words that sound like none within so many seconds of silence.",
    "clip_timestamps": "Read only these parts: START,END,START,END... in seconds; the last end may be left out.",
    "max_initial_timestamp": "The first timestamp of a window is not later. Default: as the checkpoint says.",
    "suppress_tokens": "Tokens that are never sampled: 1,2,3. -1: as the checkpoint says, which is the default.",
    "prepend_punctuations": "Marks that are part of the word behind them.",
    "append_punctuations": "Marks that are part of the word before them.",
    "voice_activity": "skip: stretches without voice are not read.",
    "encoder_context": "trimmed: little silence behind a short window, which takes less time.",
    "parallel": "Cut where nobody speaks and read the pieces at the same time. Default: files over two minutes.",
    "language_detection_segments": "The language is detected in up to so many windows.",
    "language_detection_threshold": "A language with this probability is certain.",
    "multilingual": "Detect the language of every window anew.",
    "strict": "Refuse audio that breaks off.",
    "seed": "Of sampling; None: a fresh one each time.",
}
"""What the help says of each field."""

_CHOICES = {
    "task": TASKS,
    "timestamps": TIMESTAMPS,
    "voice_activity": VOICE_ACTIVITY,
    "encoder_context": ENCODER_CONTEXTS,
}
_MOST_TEMPERATURES = 1_000
_NONE = "None"


class _Number(click.ParamType[Any]):
    """A number, or None where the field allows it, or where ``none`` is what None means."""

    def __init__(self, kind: type[int] | type[float], *, optional: bool, none: int | None = None) -> None:
        self.name = "integer" if kind is int else "number"
        self._kind = kind
        self._optional = optional
        self._none = none

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """click's: the value of the text ``value``."""
        if not isinstance(value, str):
            return value
        if value == _NONE and (self._optional or self._none is not None):
            return self._none
        try:
            return self._kind(value)
        except ValueError:
            also = ", or None" if self._optional or self._none is not None else ""
            self.fail(
                f"{value!r} is no {self.name}; allowed: a{'n' * (self._kind is int)} {self.name}{also}", param, ctx
            )


NUMBER_OR_NONE = _Number(float, optional=True)
INTEGER_OR_NONE = _Number(int, optional=True)


class _Numbers(click.ParamType[Any]):
    """Numbers separated by commas."""

    name = "numbers"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """click's: the value of the text ``value``."""
        if not isinstance(value, str):
            return value
        try:
            return tuple(self._kind(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r}; allowed: numbers separated by commas, such as 1,2", param, ctx)


def spelled(field: str) -> str:
    """The flag of ``field``: ``--beam-size``."""
    return f"--{field.replace('_', '-')}"


def speech_options(command: Command) -> Command:
    """Gives ``command`` the flags. Each arrives under its field's name."""
    for name, attribute in reversed(attrs.fields_dict(TranscribeOptions).items()):
        command = _option(attribute, FLAGS[name])(command)
    return command


def _option(attribute: attrs.Attribute[Any], told: str) -> Callable[[Command], Command]:
    name, flag = attribute.name, spelled(attribute.name)
    if str(attribute.type) == "bool":
        shown = "" if name == "parallel" else f" Default: {'on' if attribute.default else 'off'}."
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=told + shown)
    default = attribute.default
    shown = f" Default: {default}." if isinstance(default, str | int | float) else ""
    completes = languages if name == "language" else None
    return click.option(flag, name, type=_type_of(attribute), default=None, shell_complete=completes, help=told + shown)


def _type_of(attribute: attrs.Attribute[Any]) -> click.ParamType[Any]:
    if attribute.name in _CHOICES:
        return click.Choice(_CHOICES[attribute.name])
    kind = str(attribute.type)
    optional = "None" in kind
    if attribute.name in ("temperature", "suppress_tokens"):
        return _Numbers(float if attribute.name == "temperature" else int)
    if attribute.name in ("beam_size", "best_of"):  # openai/whisper says None where one means one
        return _Number(int, optional=False, none=1)
    if kind.startswith(("int", "float")):
        return _Number(int if kind.startswith("int") else float, optional=optional)
    return click.STRING


# ---- reading ---------------------------------------------------------------------------------------------------------


def given_options(context: click.Context) -> dict[str, Any]:
    """The fields of `TranscribeOptions` whose flags were given."""
    told = click.core.ParameterSource.COMMANDLINE
    names = attrs.fields_dict(TranscribeOptions)
    return {name: context.params[name] for name in names if context.get_parameter_source(name) is told}


def read_flags(
    given: Mapping[str, Any], *, word_timestamps: bool | None = None, increment: float | None = 0.2
) -> dict[str, Any]:
    """The options of a transcription for flags that were given.

    Args:
        given: what `given_options` found.
        word_timestamps: openai/whisper's flag for ``timestamps="word"``; ``None``: not given.
        increment: by how much a single temperature rises, up to 1; ``None``: it is the only one.

    Raises:
        InvalidRequest: a value that is not allowed, named as the field is; see `in_flags`.
    """
    options = dict(given)
    if options.get("language") == _NONE:
        options["language"] = None
    if options.get("suppress_tokens") is not None:
        options["suppress_tokens"] = _suppressed(options["suppress_tokens"])
    if word_timestamps is not None:
        options["timestamps"] = _with_words(options.get("timestamps"), word_timestamps)
    if "temperature" in options or increment != 0.2:
        options["temperature"] = temperatures(options.get("temperature", (0.0,)), increment)
    TranscribeOptions(**options)
    return options


def _suppressed(tokens: tuple[int, ...]) -> tuple[int, ...] | None:
    if tokens == (-1,):
        return None
    if -1 in tokens:
        raise InvalidRequest(
            f"suppress_tokens={','.join(map(str, tokens))}; allowed: -1 alone (as the checkpoint says), or token ids"
        )
    return tokens


def _with_words(timestamps: str | None, words: bool) -> str:
    if timestamps is not None and (timestamps == "word") is not words:
        raise InvalidRequest(f"timestamps={timestamps} with word_timestamps={words}; allowed: one of them")
    return timestamps or ("word" if words else "segment")


def temperatures(given: Sequence[float], increment: float | None) -> tuple[float, ...]:
    """The temperatures for one that rises by ``increment`` up to 1, as openai/whisper's command has it. Several are
    taken as they are."""
    if increment is not None and not 1 / _MOST_TEMPERATURES <= increment < float("inf"):
        raise InvalidRequest(
            f"temperature_increment_on_fallback={increment}; allowed: a number of 0.001 or more, or None"
        )
    if len(given) != 1 or increment is None or not 0 <= given[0] <= 1:
        return tuple(given)
    steps = int((1.0 - given[0]) / increment + 1e-6)
    return tuple(round(given[0] + step * increment, 10) for step in range(steps + 1))


def in_flags(message: str, fields: Iterable[str]) -> str:
    """``message`` with the flags in place of the names of ``fields``: ``--beam-size=0`` for ``beam_size=0``."""
    # a name without an underscore may be a plain word, unless a value follows
    ends = (re.escape(name) + (r"\b" if "_" in name else "(?==)") for name in fields)
    return re.sub(rf"(?<![\w-])(?:{'|'.join(ends)})", lambda found: spelled(found.group()), message)
