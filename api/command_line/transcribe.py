"""The command ``triolet transcribe``. Wrong arguments are refused before a model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import attrs
import click

from ...core.languages import language_code
from ..formats.settings import SubtitleSettings
from ..formats.writers import ALL, FORMATS, Format, formats_of
from ..outputs.languages import unknown_language
from ..speech.options import DECODING, OPTIONS
from .destinations import follow_each_other, output_names, standard_output, to_folder
from .flags import SUBTITLES, Number, given_options, read_flags, speech_options, subtitle_options
from .following import config_of, engine_options, run
from .given import STDIN, check_model, file_fault, shown, with_folders
from .models import complete_models, is_model, model_named
from .other_programs import WARNINGS, TranscribeCommand
from .pages import MODEL, REPORTS, folders, in_flags
from .pages import files as complete_files
from .terminal import FAILED, complain, is_terminal, stdout
from .trace import TraceFile
from .transcribe_job import ProgressBar, TranscribeJob

_NO_MODEL = (
    "--model is missing; give the folder or the hub id of a checkpoint of speech in transformers' layout, such as "
    "openai/whisper-base (fast), openai/whisper-small or openai/whisper-large-v3-turbo (best). --model demo is a toy "
    "that is installed with triolet and understands only its own sample recordings"
)
_ALIASES = {"txt": "text"}
_FORMATS = click.Choice([*FORMATS, *_ALIASES, ALL])
_INCREMENT = "--temperature-increment-on-fallback"
_SHORT = "Write down what is said in audio or video files."
_MODEL = "A checkpoint of speech: its folder, its hub id, or a name of openai/whisper such as turbo. demo: a toy model."
_ALL = "The format of the output. all: one file in each of text, json, srt, vtt and tsv."
_FOLDER = "Write files into DIR, named after FILES: talk.mp3 gives talk.srt. Default: standard output."
_RISES = "A single --temperature rises by this, up to 1, until a text is good. None: it does not rise."
_VERBOSE = "Write final segments and the log to standard error. Default: only segments, and only on a terminal."
_AT_ONCE = "The number of files that are read at the same time."
_OUTPUT = ("style", "folder", "word_timestamps", "timestamps")
_DECODING = (*(name for name, option in OPTIONS.items() if DECODING in option.marks), "increment")
_SECTIONS = {
    "Model": ("model", *MODEL, "at_once"),
    "Output": _OUTPUT,
    "Subtitles": SUBTITLES,
    "Speech": [name for name in OPTIONS if name not in (*_OUTPUT, *_DECODING)],
    "Decoding": _DECODING,
    "Reports": REPORTS,
}
_BRIEF = (
    "model device quantization at_once style folder word_timestamps language task initial_prompt hotwords speakers "
    "beam_size verbose"
)
_EXAMPLES = (
    ("triolet transcribe talk.mp3 --model openai/whisper-small", ""),
    ("triolet transcribe *.wav --model base -f srt -o subtitles", "writes subtitles/NAME.srt for each file"),
    ("triolet transcribe film.mkv --model small --task translate -f json", ""),
    ("ffmpeg -i talk.mkv -f wav - | triolet transcribe - --model base --language en", ""),
)


@click.command(cls=TranscribeCommand, sections=_SECTIONS, brief=_BRIEF, examples=_EXAMPLES, short_help=_SHORT)
@click.argument("files", nargs=-1, required=True, metavar="[MODEL] FILES...", shell_complete=complete_files)
@click.option("--model", metavar="MODEL", shell_complete=complete_models, help=_MODEL)
@click.option("--format", "--output-format", "-f", "style", type=_FORMATS, default="text", show_default=True, help=_ALL)
@click.option("--output-dir", "-o", "folder", metavar="DIR", shell_complete=folders, help=_FOLDER)
@click.option("--word-timestamps/--no-word-timestamps", default=None, help="The same as --timestamps word.")
@subtitle_options
@click.option(_INCREMENT, "increment", type=Number(float), default="0.2", show_default=True, help=_RISES)
@speech_options
@engine_options
@click.option("--verbose/--no-verbose", "-v", default=None, help=_VERBOSE)
@click.option("--at-once", type=click.IntRange(1), default=8, show_default=True, help=_AT_ONCE)
@click.pass_context
def transcribe(
    context: click.Context,
    /,
    *,
    files: tuple[str, ...],
    model: str | None,
    style: str,
    folder: str | None,
    trace: TraceFile | None,
    verbose: bool | None,
    at_once: int,
    **others: Any,
) -> int:
    """Write down what is said in FILES: audio, video, or folders of such files. - is standard input.

    The format text has one line for each file. If there are several files, the line begins with "NAME: ". On a
    terminal, the text of a single file has one line for each segment, with its times. The format json has one line
    with an object for each file. If a file fails, an error on standard error names it, and the other files go on.
    After ^C, the text so far is written. The spelling of openai/whisper's and whisper-ctranslate2's options is
    understood, too; docs/speech.md compares the options.
    """
    for warning in context.meta.get(WARNINGS, ()):
        complain(f"warning: {warning}")
    if model is None and len(files) > 1 and is_model(files[0]):
        model, files = files[0], files[1:]
    if model is None:
        raise click.UsageError(_NO_MODEL)
    files = with_folders(files)
    found_model, config = model_named(model), config_of(others, observer=trace)
    options, helpers = _options(context, others)
    subtitles = SubtitleSettings(**given_options(context, SUBTITLES))
    formats = formats_of(_ALIASES.get(style, style))
    _check_output(files, formats, folder, subtitles, has_words=options.get("timestamps") == "word")
    check_model(found_model, transcribes=True)
    for helper in helpers.values():
        check_model(helper)
    readable = _readable(files)
    if not readable:
        return FAILED
    open_engine = context.obj
    with ProgressBar(shows_text=_shows_text(verbose, folder)) as progress:
        if folder is not None:
            destination = to_folder(folder, files, formats, subtitles)
        else:  # for all files together: with several, each line names its file
            destination = standard_output(stdout(), files, formats[0], subtitles, progress.clear)

        async def work(engine: Any) -> int:
            async with AsyncExitStack() as stack:
                for name, helper in helpers.items():
                    opening = open_engine(helper, attrs.evolve(config, observer=None))
                    options[name] = await stack.enter_async_context(opening)
                job = TranscribeJob(
                    names=readable,
                    destination=destination,
                    progress=progress,
                    options=options,
                    at_once=at_once,
                    tells_files=verbose is not False,
                    names_requests=trace is not None,
                )
                return await job.run(engine)

        opening = partial(open_engine, found_model, config)
        status = run(opening, work, trace, verbose=bool(verbose), clear=progress.clear)
    return status or (FAILED if len(readable) < len(files) else 0)


# ---- the arguments ---------------------------------------------------------------------------------------------------


def _options(context: click.Context, others: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The options of the transcriptions, and the models of the options that are other engines."""
    given = given_options(context, OPTIONS)
    helpers: dict[str, str] = {name: given.pop(name) for name in ("aligner", "diarizer") if name in given}
    if "diarizer" in helpers:
        given["diarizer"] = ()  # turns without a speaker, so that the other options are checked
    options = read_flags(given, word_timestamps=others["word_timestamps"], increment=others["increment"])
    _check_language(options.get("language"))
    for name, file in options.get("known_speakers", {}).items():
        if (fault := file_fault(file)) is not None:
            raise click.UsageError(f"--known-speaker {name}={file}: {fault}")
    if "aligner" in helpers and options.get("timestamps") != "word":
        raise click.UsageError("--aligner finds the times of words; give --word-timestamps, too")
    return options, helpers


def _check_language(language: str | None) -> None:
    if language is None:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if language_code(language) is None:
        raise click.UsageError(f"--language: {unknown_language(language)}")


def _readable(files: tuple[str, ...]) -> tuple[str, ...]:
    """The files that can probably be read, as `file_fault` finds out. An error is written for each other file."""
    faults = {name: file_fault(name) for name in files}
    for name, fault in faults.items():
        if fault is not None:
            complain(f"{shown(name)}: {fault}")
    return tuple(name for name in files if faults[name] is None)


def _shows_text(verbose: bool | None, folder: str | None) -> bool:
    """True if segments are written to standard error: ``verbose`` asks for it, or standard error is a terminal that
    does not show the results anyway."""
    if verbose is not None:
        return verbose
    return is_terminal(sys.stderr) and (folder is not None or not is_terminal(sys.stdout))


def _check_output(
    files: tuple[str, ...],
    formats: tuple[Format, ...],
    folder: str | None,
    subtitles: SubtitleSettings,
    *,
    has_words: bool,
) -> None:
    """Refuses outputs that cannot be written. Without a ``folder``, all outputs go to standard output."""
    if files.count(STDIN) > 1:
        raise click.UsageError(f"{STDIN} is given {files.count(STDIN)} times; standard input can be read only once")
    if subtitles.needing_words is not None and not has_words:
        told = f"{subtitles.needing_words} needs words with their times; give --word-timestamps, too"
        raise click.UsageError(in_flags(told))
    if any(each.is_subtitles for each in formats):
        for sentence in subtitles.without_effect():
            complain(f"warning: {in_flags(sentence)}")
    if folder is not None:
        _check_outputs_of_folder(files, formats, folder)
    elif len(formats) > 1:
        raise click.UsageError("--format all writes several files; give a folder for them: --output-dir DIR")
    elif len(files) > 1 and not follow_each_other(formats[0]):
        told = (
            f"{len(files)} outputs of --format {formats[0].name} cannot be written one after the other; give "
            "--output-dir DIR"
        )
        raise click.UsageError(told)


def _check_outputs_of_folder(files: tuple[str, ...], formats: tuple[Format, ...], folder: str) -> None:
    sources: dict[str, str] = {}  # the input, by the path of its output
    stems = output_names(files)
    for name in files:
        for each in formats:
            written = os.path.join(folder, f"{stems[name]}.{each.extension}")
            if written in sources:
                raise click.UsageError(
                    f"the outputs of {shown(sources[written])} and {shown(name)} would both be written to {written}; "
                    "rename one file, or transcribe each with another --output-dir"
                )
            sources[written] = name
            if name != STDIN and os.path.realpath(written) == os.path.realpath(name):
                raise click.UsageError(f"{name} would be overwritten by its own transcript; give another --output-dir")
