"""The command lines of openai/whisper and whisper-ctranslate2, as ``triolet transcribe`` understands them.

The names of their flags have underscores where ours have hyphens, and their switches take True or False. A flag that
only they have is translated into ours, ignored with a warning, or refused with an explanation; docs/speech.md has the
table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import click
from attrs import frozen

from .pages import Page

WARNINGS = "triolet.other_programs.warnings"  # in click's `Context.meta`
_ANY = "*"
_COUNT = re.compile(r"any|\d[\d,-]*", re.ASCII)  # of speakers


@frozen
class Foreign:
    """A flag that only the other programs have.

    Args:
        ours: our flags for each of its values; ``{}`` stands for the value in a flag, and the key ``"*"`` for every
            value.
        otherwise: the sentence for all values that ``ours`` lacks.
        is_ignored: true if such values are ignored, with the sentence as a warning, rather than refused.
    """

    ours: Mapping[str, str]
    otherwise: str = "the flag does not have this value"
    is_ignored: bool = False


_OFF = {"False": ""}
_TOKEN = "no token is needed to find out who speaks; give --speakers"
_NAMES = "speakers are called A, B and so on; --known-speaker NAME=FILE gives one a name"
_LIVE = "this command does not read a microphone; use Engine.live in a program"
_CACHE = "checkpoints are in the cache of the hub; set HF_HUB_CACHE in the environment to move it"
_WEIGHTS = "the model computes in the types of --dtype, or in int8 on the CPU (--quantization int8)"
_COMPUTE_TYPES = {
    **dict.fromkeys(("default", "auto"), ""),
    **{name: f"--dtype {name}" for name in ("float32", "float16", "bfloat16")},
    "int8": "--quantization int8",
    **{f"int8_{name}": f"--quantization int8 --dtype {name}" for name in ("float32", "bfloat16")},
}

FOREIGN: Mapping[str, Foreign] = {
    "--model-directory": Foreign({_ANY: "--model {}"}),
    "--prompt-reset-on-temperature": Foreign({_ANY: "--prompt-reset-temperature {}"}),
    "--fp16": Foreign({"True": "--dtype auto", "False": "--dtype float32"}),
    "--vad-filter": Foreign({"True": "--voice-activity skip", "False": "--voice-activity off"}),
    "--batched": Foreign({"True": "--parallel", "False": "--no-parallel"}),
    "--compute-type": Foreign(_COMPUTE_TYPES, _WEIGHTS),
    "--device-index": Foreign({"0": ""}, "give the number with the device, as in --device cuda:1"),
    "--suppress-blank": Foreign({"True": ""}, "a window never begins with a blank"),
    "--hf-token": Foreign({"": ""}, _TOKEN, is_ignored=True),
    "--speaker-num": Foreign({_ANY: "--speakers {}"}),
    "--speaker-name": Foreign({}, _NAMES, is_ignored=True),
    "--live-transcribe": Foreign(_OFF, _LIVE),
    "--local-files-only": Foreign(_OFF, "set HF_HUB_OFFLINE=1 in the environment", is_ignored=True),
    "--pretty-json": Foreign(_OFF, "JSON has one line for each file", is_ignored=True),
    "--print-colors": Foreign(_OFF, "texts are written without colors", is_ignored=True),
    "--model-dir": Foreign({}, _CACHE, is_ignored=True),
    "--batch-size": Foreign({}, "the engine chooses the sizes of its batches", is_ignored=True),
    **{
        f"--live-{name}": Foreign({}, _LIVE, is_ignored=True)
        for name in ("volume-threshold", "input-device", "input-device-sample-rate")
    },
}


class TranscribeCommand(Page):
    """A command that understands the flags of the other programs. It leaves warnings in ``context.meta``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses ``args``, as click asks. While a shell completes a command line, no argument is refused."""
        if not ctx.resilient_parsing:
            args, ctx.meta[WARNINGS] = translated(args, self.get_params(ctx))
        return super().parse_args(ctx, args)


def translated(words: Sequence[str], parameters: Sequence[click.Parameter]) -> tuple[list[str], list[str]]:
    """The command line in our spelling, and the warnings. Raises click's `UsageError` for a flag that is refused."""
    options = {name: each for each in parameters if isinstance(each, click.Option) for name in each.opts}
    left, found, warnings = list(words), list[str](), list[str]()
    while left:
        word = left.pop(0)
        if word == "--":
            return [*found, word, *left], warnings
        written, equals, value = word.partition("=")
        name = f"--{written[2:].replace('_', '-')}" if written.startswith("--") else written
        name = "--pretty-json" if name == "-p" else name
        option = options.get(name)
        if name in FOREIGN:
            value = value if equals else left.pop(0) if left else ""
            found += _ours(name, value, FOREIGN[name], warnings)
        elif option is None:
            found.append(word)
        elif option.is_flag and name.startswith("--"):
            value = value if equals else left.pop(0) if left[:1] in (["True"], ["False"]) else "True"
            opposite = option.secondary_opts[:1]
            if value not in ("True", "False"):
                raise click.UsageError(f"{name}={value}; allowed: {' or '.join([name, *opposite])}")
            found += [name] if value == "True" else opposite
        elif name == "--speakers" and not equals and not (left and _COUNT.fullmatch(left[0])):
            found.append("--speakers=any")  # what follows is a file
        else:
            found.append(name + equals + value)
            if not equals and not option.is_flag:
                found += left[:1]
                del left[:1]
    return found, warnings


def _ours(name: str, value: str, flag: Foreign, warnings: list[str]) -> list[str]:
    ours = flag.ours.get(value, flag.ours.get(_ANY))
    if ours is not None:
        return [word.format(value) for word in ours.split()]
    if flag.is_ignored:
        warnings.append(f"{name} {value} has no effect: {flag.otherwise}")
        return []
    allowed = ", ".join(filter(None, flag.ours))
    told = f"{name} {value} is not supported: {flag.otherwise}"
    raise click.UsageError(told + (f"; allowed: {allowed}" if allowed else ""))
