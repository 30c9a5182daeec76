"""The command lines of openai/whisper and whisper-ctranslate2, as ``triolet transcribe`` understands them.

The names of their flags have underscores where ours have hyphens, and their switches take True or False. A flag that
only they have is translated into ours, ignored with a warning, or refused; docs/speech.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import click

from .pages import HelpPage

WARNINGS = "triolet.other_programs.warnings"  # in click's `Context.meta`
_ANY = "*"
_COUNT = re.compile(r"any|\d[\d,-]*", re.ASCII)  # of speakers
_LIVE = "this command does not read a microphone; use Engine.live in a program"

TRANSLATED: Mapping[str, Mapping[str, str]] = {
    "--model-directory": {_ANY: "--model {}"},
    "--prompt-reset-on-temperature": {_ANY: "--prompt-reset-temperature {}"},
    "--speaker-num": {_ANY: "--speakers {}"},
    "--fp16": {"True": "--dtype auto", "False": "--dtype float32"},
    "--vad-filter": {"True": "--voice-activity skip", "False": "--voice-activity off"},
    "--batched": {"True": "--parallel", "False": "--no-parallel"},
    "--compute-type": {
        **dict.fromkeys(("default", "auto"), ""),
        **{name: f"--dtype {name}" for name in ("float32", "float16", "bfloat16")},
        "int8": "--quantization int8",
        **{f"int8_{name}": f"--quantization int8 --dtype {name}" for name in ("float32", "bfloat16")},
    },
    "--device-index": {"0": ""},
    "--suppress-blank": {"True": ""},
    "--live-transcribe": {"False": ""},
}
"""Our flags for the values of theirs. ``"*"`` stands for every value, and ``{}`` for the value in a flag of ours. Other
values are refused."""

_INSTEAD = {"--device-index": "give --device cuda:1", "--live-transcribe": _LIVE}

IGNORED: Mapping[str, str] = {
    "--hf-token": "no token is needed to find out who speaks; give --speakers",
    "--speaker-name": "speakers are called A, B and so on; --known-speaker NAME=FILE gives one a name",
    "--local-files-only": "set HF_HUB_OFFLINE=1 in the environment",
    "--pretty-json": "JSON has one line for each file",
    "--print-colors": "texts are written without colors",
    "--model-dir": "checkpoints are in the cache of the hub; set HF_HUB_CACHE in the environment to move it",
    "--batch-size": "the engine chooses the sizes of its batches",
    **{f"--live-{name}": _LIVE for name in ("volume-threshold", "input-device", "input-device-sample-rate")},
}
"""The sentence of the warning for each flag of theirs that has no effect here."""


class TranscribeCommand(HelpPage):
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
        name = written.replace("_", "-") if written.startswith("--") else written
        option, is_flag = options.get(name), name in options and options[name].is_flag
        if name in (*TRANSLATED, *IGNORED, "-p"):
            value = value if equals else left.pop(0) if left else ""
            found += _ours("--pretty-json" if name == "-p" else name, value, warnings)
        elif is_flag and name.startswith("--") and (equals or left[:1] in (["True"], ["False"])):
            found += _switch(name, value if equals else left.pop(0), options[name].secondary_opts[:1])
        elif name == "--diarize" or (name == "--speakers" and not equals and not (left and _COUNT.fullmatch(left[0]))):
            found.append("--speakers=any")  # what follows is a file; --diarize is whisperX's
        elif option is None or is_flag or equals:
            found.append(word if option is None else name + equals + value)
        else:
            found += [name, *left[:1]]
            del left[:1]
    return found, warnings


def _ours(name: str, value: str, warnings: list[str]) -> list[str]:
    if name in IGNORED:
        warnings.append(f"{name} {value} has no effect: {IGNORED[name]}")
        return []
    ours = TRANSLATED[name].get(value, TRANSLATED[name].get(_ANY))
    if ours is None:
        allowed, instead = ", ".join(TRANSLATED[name]), _INSTEAD.get(name, "leave it out")
        raise click.UsageError(f"{name} {value} is not supported; allowed: {allowed}; {instead}")
    return [word.format(value) for word in ours.split()]


def _switch(name: str, value: str, opposite: list[str]) -> list[str]:
    if value not in ("True", "False"):
        raise click.UsageError(f"{name}={value}; allowed: {' or '.join([name, *opposite])}")
    return [name] if value == "True" else opposite
