"""The options of openai/whisper's command and of whisper-ctranslate2, as ``triolet transcribe`` understands them.

Their names have underscores where ours have hyphens, and their switches take True or False. Options that only they have
become ours, are accepted with a warning, or are refused with a sentence. docs/speech.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import click
from attrs import define, field, frozen

from ...core.errors import InvalidRequest
from .pages import Page

WARNINGS = "triolet.other_programs.warnings"  # in click's `Context.meta`
_BOOLEANS = ("True", "False")
_ANY = "*"
_WHISPER, _CT2, _BOTH = "whisper", "whisper-ctranslate2", "both"


@frozen(kw_only=True)
class Foreign:
    """An option that we do not have.

    Args:
        name: in our spelling, with hyphens.
        of: the programs that have it.
        becomes: our arguments for each of its values; ``{}`` in them is the value, and ``"*"`` stands for all values.
        told: what to do instead of all other values.
        warned: other values are accepted with a warning, not refused.
    """

    name: str
    of: str
    becomes: Mapping[str, tuple[str, ...]] = field(factory=dict)
    told: str = ""
    warned: bool = False


def _switch(name: str, of: str, told: str, *, warned: bool = False) -> Foreign:
    return Foreign(name=name, of=of, becomes={"False": ()}, told=told, warned=warned)


_NO_COMPUTE_TYPE = "weights are computed with as they are, or in int8 (--quantization) on the CPU"
_NO_SPEAKERS = "speakers are not told apart"
_NO_TUNING = "voice activity has no such setting here"
_LIVE = "a microphone is transcribed by Engine.live in a program, not by this command"

FOREIGN = (
    Foreign(
        name="--model-dir",
        of=_BOTH,
        told="checkpoints lie in the cache of the hub; set HF_HUB_CACHE in the environment to have it elsewhere",
        warned=True,
    ),
    Foreign(name="--model-directory", of=_CT2, becomes={_ANY: ("--model", "{}")}),
    _switch("--local-files-only", _CT2, "set HF_HUB_OFFLINE=1 in the environment", warned=True),
    _switch("--carry-initial-prompt", _WHISPER, "the prompt is given to the first window alone"),
    Foreign(name="--fp16", of=_WHISPER, becomes={"True": ("--dtype", "auto"), "False": ("--dtype", "float32")}),
    Foreign(
        name="--compute-type",
        of=_CT2,
        becomes={
            "default": (),
            "auto": (),
            "float32": ("--dtype", "float32"),
            "float16": ("--dtype", "float16"),
            "bfloat16": ("--dtype", "bfloat16"),
            "int8": ("--quantization", "int8"),
            "int8_float32": ("--quantization", "int8", "--dtype", "float32"),
            "int8_bfloat16": ("--quantization", "int8", "--dtype", "bfloat16"),
        },
        told=_NO_COMPUTE_TYPE,
    ),
    Foreign(name="--device-index", of=_CT2, becomes={"0": ()}, told="name the device: --device cuda:1"),
    Foreign(name="--prompt-reset-on-temperature", of=_CT2, becomes={_ANY: ("--prompt-reset-temperature", "{}")}),
    Foreign(
        name="--vad-filter",
        of=_CT2,
        becomes={"True": ("--voice-activity", "skip"), "False": ("--voice-activity", "off")},
    ),
    *(
        Foreign(name=f"--vad-{name}", of=_CT2, told=_NO_TUNING, warned=True)
        for name in ("threshold", "min-speech-duration-ms", "max-speech-duration-s", "min-silence-duration-ms")
    ),
    Foreign(name="--batched", of=_CT2, becomes={"True": ("--parallel",), "False": ("--no-parallel",)}),
    Foreign(name="--batch-size", of=_CT2, told="the engine makes batches by what its memory holds", warned=True),
    Foreign(name="--suppress-blank", of=_CT2, becomes={"True": ()}, told="a window never begins with a blank"),
    Foreign(name="--repetition-penalty", of=_CT2, becomes={"1": (), "1.0": ()}, told="there is none here"),
    Foreign(name="--no-repeat-ngram-size", of=_CT2, becomes={"0": ()}, told="there is none here"),
    Foreign(name="--hotwords", of=_CT2, becomes={"": ()}, told="write the words into --initial-prompt"),
    _switch("--pretty-json", _CT2, "JSON has one line a file", warned=True),
    _switch("--print-colors", _CT2, "text has no colors", warned=True),
    Foreign(name="--hf-token", of=_CT2, becomes={"": ()}, told=_NO_SPEAKERS),
    Foreign(name="--speaker-name", of=_CT2, told=_NO_SPEAKERS, warned=True),
    Foreign(name="--speaker-num", of=_CT2, told=_NO_SPEAKERS, warned=True),
    _switch("--live-transcribe", _CT2, _LIVE),
    *(
        Foreign(name=f"--live-{name}", of=_CT2, told=_LIVE, warned=True)
        for name in ("volume-threshold", "input-device", "input-device-sample-rate")
    ),
)
SAME = {
    "--model": (_BOTH, "no default; also a folder or a hub id. `base` is openai/whisper-base, and so on"),
    "--output-dir": (_BOTH, "default: standard output"),
    "--output-format": (_BOTH, "default: `text`, which is also `txt`. `json` is one line"),
    "--verbose": (_BOTH, "segments and the log go to standard error. Default: segments on a terminal"),
    "--device": (_BOTH, ""),
    "--threads": (_BOTH, ""),
    "--task": (_BOTH, ""),
    "--language": (_BOTH, ""),
    "--temperature": (_BOTH, "or several: `0,0.4,0.8`"),
    "--temperature-increment-on-fallback": (_BOTH, ""),
    "--best-of": (_BOTH, ""),
    "--beam-size": (_BOTH, ""),
    "--patience": (_BOTH, ""),
    "--length-penalty": (_BOTH, ""),
    "--suppress-tokens": (_BOTH, "`-1` alone, or token ids"),
    "--initial-prompt": (_BOTH, ""),
    "--condition-on-previous-text": (_BOTH, ""),
    "--compression-ratio-threshold": (_BOTH, ""),
    "--logprob-threshold": (_BOTH, ""),
    "--no-speech-threshold": (_BOTH, ""),
    "--word-timestamps": (_BOTH, ""),
    "--prepend-punctuations": (_BOTH, ""),
    "--append-punctuations": (_BOTH, ""),
    "--highlight-words": (_BOTH, ""),
    "--max-line-width": (_BOTH, ""),
    "--max-line-count": (_BOTH, ""),
    "--max-words-per-line": (_BOTH, ""),
    "--hallucination-silence-threshold": (_BOTH, ""),
    "--clip-timestamps": (_WHISPER, ""),
    "--prefix": (_CT2, ""),
    "--multilingual": (_CT2, ""),
}
"""Options that mean the same here, of which program, and what differs."""
_SHORT = {"-p": "--pretty-json"}
_BY_NAME = {each.name: each for each in FOREIGN}


class TranscribeCommand(Page):
    """A command that understands the spelling of the other programs. Warnings are left in ``context.meta``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """click's: makes parameters of ``args``."""
        if ctx.resilient_parsing:  # a shell completes
            return super().parse_args(ctx, args)
        known = Known.of(self.get_params(ctx))
        translation = Translation(known)
        try:
            translation.take(args)
        except InvalidRequest as error:
            raise click.UsageError(str(error), ctx) from error
        ctx.meta[WARNINGS] = tuple(translation.warnings)
        return super().parse_args(ctx, translation.arguments)


@frozen(kw_only=True)
class Known:
    """Our options: those that take a value, and each switch with its opposite (``None``: it has none)."""

    valued: frozenset[str]
    switches: Mapping[str, str | None]

    @classmethod
    def of(cls, parameters: Iterable[click.Parameter]) -> Known:
        """The options among ``parameters``."""
        options = [each for each in parameters if isinstance(each, click.Option)]
        switches = {
            on: next(iter(each.secondary_opts), None) for each in options if each.is_flag for on in _long(each.opts)
        }
        valued = {name for each in options if not each.is_flag for name in each.opts}
        return cls(valued=frozenset(valued), switches=switches)


def _long(names: Iterable[str]) -> Iterator[str]:
    return (name for name in names if name.startswith("--"))


@define
class Translation:
    """Arguments in our spelling, and what to warn of."""

    known: Known
    arguments: list[str] = field(factory=list, init=False)
    warnings: list[str] = field(factory=list, init=False)

    def take(self, given: Sequence[str]) -> None:
        """Translates the arguments of a command line.

        Raises:
            InvalidRequest: an option that is refused.
        """
        left = list(given)
        while left:
            word = left.pop(0)
            if word == "--":
                self.arguments += [word, *left]
                return
            self._take_word(word, left)

    def _take_word(self, word: str, left: list[str]) -> None:
        """Takes ``word``, and from ``left`` the value that belongs to it."""
        written, equals, value = word.partition("=")
        written = _SHORT.get(written, written)
        name = "--" + written[2:].replace("_", "-") if written.startswith("--") else written
        if name in _BY_NAME:
            self._take_foreign(_BY_NAME[name], value if equals else left.pop(0) if left else "")
        elif name in self.known.switches:
            self._take_switch(name, value if equals else None, left)
        elif name in self.known.valued:
            self.arguments += [name + equals + value] if equals else [name, *left[:1]]
            del left[: 0 if equals else 1]
        else:
            self.arguments.append(word)

    def _take_switch(self, name: str, value: str | None, left: list[str]) -> None:
        if value is None and left and left[0] in _BOOLEANS:
            value = left.pop(0)
        opposite = self.known.switches[name]
        if value is None or value == "True":
            self.arguments.append(name)
        elif value == "False":
            self.arguments += [opposite] if opposite else []
        else:
            raise InvalidRequest(f"{name}={value}; allowed: {name}" + (f" or {opposite}" if opposite else ""))

    def _take_foreign(self, option: Foreign, value: str) -> None:
        arguments = option.becomes.get(value, option.becomes.get(_ANY))
        if arguments is not None:
            self.arguments += [argument.format(value) for argument in arguments]
        elif option.warned:
            self.warnings.append(f"{option.name} {value} changes nothing: {option.told}")
        else:
            allowed = f"; allowed: {', '.join(filter(None, option.becomes))}" if any(option.becomes) else ""
            raise InvalidRequest(f"{option.name} {value} is not supported: {option.told or 'no such value'}{allowed}")


# ---- the table in docs/speech.md -------------------------------------------------------------------------------------


def options_table() -> str:
    """The table of their options and ours."""
    rows = [(name, of, f"the same; {note}" if note else "the same") for name, (of, note) in SAME.items()]
    rows += [(option.name, option.of, _meaning(option)) for option in FOREIGN]
    lines = [f"| `--{name[2:].replace('-', '_')}` | {of} | {meaning} |" for name, of, meaning in rows]
    return "\n".join(["| option | of | here |", "|---|---|---|", *lines])


def _meaning(option: Foreign) -> str:
    same = [value for value, arguments in option.becomes.items() if not arguments]
    told = [_becomes(value, arguments) for value, arguments in option.becomes.items() if arguments]
    if same:
        told.append(f"{', '.join(f'`{value}`' if value else 'empty' for value in same)}: accepted, nothing changes")
    if option.told:
        rest = "all else is " if told else ""
        told.append(f"{rest}{'accepted with a warning' if option.warned else 'refused'}: {option.told}")
    return "; ".join(told)


def _becomes(value: str, arguments: Sequence[str]) -> str:
    shown = "" if value == _ANY else f"`{value}`: "
    return f"{shown}`{' '.join(arguments).replace('{}', '...')}`"
