"""The command lines of openai/whisper and whisper-ctranslate2, as ``triolet transcribe`` understands them.

Their names have underscores where ours have hyphens, and their switches take True or False. Flags that only they have
become ours, are ignored with a warning, or are refused with a sentence; docs/speech.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from .pages import Page

WARNINGS = "triolet.other_programs.warnings"  # in click's `Context.meta`
_ANY = "*"
_SPEAKERS = "speakers are not told apart"
_LIVE = "a microphone is transcribed by Engine.live in a program, not by this command"

OURS: Mapping[str, Mapping[str, str]] = {
    "--model-directory": {_ANY: "--model {}"},
    "--prompt-reset-on-temperature": {_ANY: "--prompt-reset-temperature {}"},
    "--fp16": {"True": "--dtype auto", "False": "--dtype float32"},
    "--vad-filter": {"True": "--voice-activity skip", "False": "--voice-activity off"},
    "--batched": {"True": "--parallel", "False": "--no-parallel"},
    "--compute-type": {
        "default": "",
        "auto": "",
        "float32": "--dtype float32",
        "float16": "--dtype float16",
        "bfloat16": "--dtype bfloat16",
        "int8": "--quantization int8",
        "int8_float32": "--quantization int8 --dtype float32",
        "int8_bfloat16": "--quantization int8 --dtype bfloat16",
    },
    "--device-index": {"0": ""},
    "--suppress-blank": {"True": ""},
    "--repetition-penalty": {"1": "", "1.0": ""},
    "--no-repeat-ngram-size": {"0": ""},
    "--hotwords": {"": ""},
    "--hf-token": {"": ""},
    **{
        name: {"False": ""}
        for name in (
            *("--local-files-only", "--carry-initial-prompt", "--pretty-json"),
            *("--print-colors", "--live-transcribe"),
        )
    },
}
"""Our flags for each value of a flag of theirs; ``{}`` is the value, and ``"*"`` stands for every value."""

IGNORED: Mapping[str, str] = {
    "--model-dir": "checkpoints lie in the cache of the hub; set HF_HUB_CACHE in the environment to have it elsewhere",
    "--local-files-only": "set HF_HUB_OFFLINE=1 in the environment",
    "--batch-size": "the engine makes batches by what its memory holds",
    "--pretty-json": "JSON has one line a file",
    "--print-colors": "text has no colors",
    "--speaker-name": _SPEAKERS,
    "--speaker-num": _SPEAKERS,
    **{
        f"--vad-{name}": "voice activity has no such setting here"
        for name in ("threshold", "min-speech-duration-ms", "max-speech-duration-s", "min-silence-duration-ms")
    },
    **{f"--live-{name}": _LIVE for name in ("volume-threshold", "input-device", "input-device-sample-rate")},
}
"""Flags whose other values are ignored with a warning: this sentence."""

REFUSED: Mapping[str, str] = {
    "--carry-initial-prompt": "the prompt is given to the first window alone",
    "--compute-type": "weights are computed with as they are, or in int8 (--quantization) on the CPU",
    "--device-index": "name the device: --device cuda:1",
    "--suppress-blank": "a window never begins with a blank",
    "--repetition-penalty": "there is none here",
    "--no-repeat-ngram-size": "there is none here",
    "--hotwords": "write the words into --initial-prompt",
    "--hf-token": _SPEAKERS,
    "--live-transcribe": _LIVE,
}
"""Flags whose other values are refused with this sentence."""


class TranscribeCommand(Page):
    """A command that understands the flags of the other programs. It leaves warnings in ``context.meta``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Makes parameters of ``args``, as click asks. While a shell completes, no argument is judged."""
        if not ctx.resilient_parsing:
            args, ctx.meta[WARNINGS] = translated(args, self.get_params(ctx))
        return super().parse_args(ctx, args)


def translated(words: Sequence[str], parameters: Sequence[click.Parameter]) -> tuple[list[str], list[str]]:
    """A command line in our spelling, and what to warn of. Raises click's `UsageError` for a flag that is refused."""
    options = {name: each for each in parameters if isinstance(each, click.Option) for name in each.opts}
    left, found, warnings = list(words), list[str](), list[str]()
    while left:
        word = left.pop(0)
        written, equals, value = word.partition("=")
        name = f"--{written[2:].replace('_', '-')}" if written.startswith("--") else written
        name = "--pretty-json" if name == "-p" else name
        option = options.get(name)
        if word == "--":
            return [*found, word, *left], warnings
        if name in OURS or name in IGNORED:
            given = value if equals else left.pop(0) if left else ""
            found += _ours(name, given, warnings)
        elif option is not None and option.is_flag and name.startswith("--"):
            given = value if equals else left.pop(0) if left[:1] in (["True"], ["False"]) else "True"
            found += _switch(name, given, option)
        elif option is not None and not equals and not option.is_flag:
            found += [name, *left[:1]]
            del left[:1]
        else:
            found.append(word if option is None else name + equals + value)
    return found, warnings


def _ours(name: str, value: str, warnings: list[str]) -> list[str]:
    values = OURS.get(name, {})
    ours = values.get(value, values.get(_ANY))
    if ours is not None:
        return [word.format(value) for word in ours.split()]
    if name not in IGNORED:
        allowed = ", ".join(filter(None, values))
        told = f"{REFUSED.get(name, 'there is no such value')}" + (f"; allowed: {allowed}" if allowed else "")
        raise click.UsageError(f"{name} {value} is not supported: {told}")
    warnings.append(f"{name} {value} changes nothing: {IGNORED[name]}")
    return []


def _switch(name: str, value: str, option: click.Option) -> list[str]:
    opposite = option.secondary_opts[:1]
    if value not in ("True", "False"):
        raise click.UsageError(f"{name}={value}; allowed: {' or '.join([name, *opposite])}")
    return [name] if value == "True" else opposite
