"""The command ``triolet transcribe``. What is wrong with its arguments is told before a model is loaded."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import click
from attrs import frozen
from click.shell_completion import CompletionItem

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest
from ..formats.settings import SubtitleSettings
from ..formats.writers import ALL, FORMATS, Format, formats_of
from ..outputs.languages import language_code, unknown_language
from ..speech.options import TranscribeOptions
from .destinations import (
    Destination,
    Folder,
    clash,
    follow_each_other,
    output_name,
    prepare_folder,
    standard_output,
)
from .flags import INTEGER_OR_NONE, NUMBER_OR_NONE, given_options, in_flags, read_flags, speech_options, spelled
from .following import Following
from .given import check_model
from .other_programs import WARNINGS, TranscribeCommand
from .pages import FOLLOWING, MODEL, folders
from .pages import files as complete_files
from .terminal import (
    FAILED,
    STDIN,
    OpenEngine,
    complain,
    engine_options,
    file_fault,
    is_terminal,
    shown,
    stdout,
)
from .transcribe_job import Job

DEMO = "demo"
_SIZES = ("tiny", "base", "small", "medium", "large", "large-v2", "large-v3", "turbo")
WHISPER_NAMES = {name: f"openai/whisper-{name}" for name in (*_SIZES, *(f"{size}.en" for size in _SIZES[:4]))} | {
    "large": "openai/whisper-large-v3",
    "large-v1": "openai/whisper-large",
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
    "turbo": "openai/whisper-large-v3-turbo",
}
"""Hub ids for the names that openai/whisper's command knows."""
_NO_MODEL = (
    "no --model: give the folder or the hub id of a Whisper checkpoint in transformers' layout, such as "
    "openai/whisper-base (fast), openai/whisper-small or openai/whisper-large-v3-turbo (best); --model demo is a toy "
    "that comes along and understands only its own sample recordings"
)
_ALIASES = {"txt": "text"}
_WRITER_FIELDS = tuple(attrs.fields_dict(SubtitleSettings))
_FIELDS = (
    *attrs.fields_dict(TranscribeOptions),
    *_WRITER_FIELDS,
    "word_timestamps",
    "temperature_increment_on_fallback",
)


_OUTPUT = ("style", "folder", *_WRITER_FIELDS, "word_timestamps", "timestamps")
_DECODING = (
    *("temperature", "increment", "beam_size", "patience", "length_penalty", "best_of", "compression_ratio_threshold"),
    *("logprob_threshold", "no_speech_threshold", "max_initial_timestamp", "suppress_tokens", "seed"),
)
_SECTIONS = {
    "Model": ("model", *MODEL, "at_once"),
    "Output": _OUTPUT,
    "Speech": [name for name in attrs.fields_dict(TranscribeOptions) if name not in (*_OUTPUT, *_DECODING)],
    "Decoding": _DECODING,
    "Watching": FOLLOWING,
}
_EXAMPLES = (
    ("triolet transcribe talk.mp3 --model openai/whisper-small", ""),
    ("triolet transcribe *.wav --model base -f srt -o subtitles", "subtitles/NAME.srt for each file"),
    ("triolet transcribe film.mkv --model small --task translate -f json", ""),
    ("ffmpeg -i talk.mkv -f wav - | triolet transcribe - --model base --language en", ""),
)


def _models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models, or a folder."""
    known = [CompletionItem(name) for name in (DEMO, *WHISPER_NAMES) if name.startswith(incomplete)]
    return known or folders(ctx, param, incomplete)


@click.command(
    cls=TranscribeCommand,
    sections=_SECTIONS,
    examples=_EXAMPLES,
    short_help="Write down what is said in audio or video files.",
)
@click.argument("files", nargs=-1, required=True, shell_complete=complete_files)
@click.option(
    "--model",
    metavar="MODEL",
    shell_complete=_models,
    help="Folder or hub id of a Whisper checkpoint, or base, small, turbo... as whisper has it; demo: a toy.",
)
@click.option(
    "--format",
    "--output-format",
    "-f",
    "style",
    type=click.Choice([*FORMATS, *_ALIASES, ALL]),
    default="text",
    show_default=True,
    help="all: text, json, srt, vtt and tsv.",
)
@click.option(
    "--output-dir",
    "-o",
    "folder",
    metavar="DIR",
    shell_complete=folders,
    help="Write files there, named after FILES: talk.mp3 gives talk.srt. Else to stdout.",
)
@click.option("--word-timestamps/--no-word-timestamps", default=None, help="The same as --timestamps word.")
@click.option("--max-line-width", type=INTEGER_OR_NONE, help="Characters of a line of subtitles; needs words.")
@click.option("--max-line-count", type=INTEGER_OR_NONE, help="Lines of a subtitle; needs words and --max-line-width.")
@click.option("--max-words-per-line", type=INTEGER_OR_NONE, help="Words of a subtitle; needs words.")
@click.option("--highlight-words/--no-highlight-words", default=False, help="Underline each word as it is said.")
@click.option(
    "--temperature-increment-on-fallback",
    "increment",
    type=NUMBER_OR_NONE,
    default="0.2",
    show_default=True,
    help="By how much one --temperature rises, up to 1; None: not at all.",
)
@speech_options
@engine_options
@click.option(
    "--verbose/--no-verbose",
    "-v",
    default=None,
    help="Segments as they become final, and the log, on standard error. Default: segments on a terminal.",
)
@click.option("--at-once", type=click.IntRange(1), default=8, show_default=True, help="Files held in memory together.")
@click.pass_context
def transcribe(
    context: click.Context,
    /,
    *,
    files: tuple[str, ...],
    model: str | None,
    style: str,
    folder: str | None,
    device: str,
    dtype: str,
    kv_dtype: str,
    quantization: str | None,
    threads: int,
    watch: bool,
    trace: str | None,
    verbose: bool | None,
    at_once: int,
    **others: Any,
) -> int:
    """Write down what is said in FILES (audio or video; - reads standard input).

    Text: one line a file; with several files it begins with "NAME: ". On a terminal the text of one file comes a
    segment a line, with its times. JSON: one object a line and file. A file that fails is named on standard error, and
    the others go on. ^C writes what was transcribed so far. docs/speech.md compares the options with those of
    openai/whisper and whisper-ctranslate2, whose spelling is understood too.
    """
    for warning in context.meta.get(WARNINGS, ()):
        complain(f"warning: {warning}")
    found_model = _model(model)
    following = Following.of("transcribe", watch=watch, trace=trace)
    try:
        config = EngineConfig(
            device=device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            quantization=quantization,
            threads=threads,
            observer=following.observer,
        )
        given = given_options(context)
        options = read_flags(given, word_timestamps=others["word_timestamps"], increment=others["increment"])
        subtitles = SubtitleSettings(**{name: others[name] for name in _WRITER_FIELDS})
    except InvalidRequest as error:
        raise click.UsageError(in_flags(str(error), _FIELDS)) from error
    output = Output(formats_of(_ALIASES.get(style, style)), folder, subtitles)
    output.check(files, has_words=options.get("timestamps") == "word")
    _check_language(options.get("language"))
    check_model(found_model, transcribes=True)
    readable = _readable(files)
    if not readable:
        return FAILED
    job = Job(
        files=readable,
        destination=output.destination(files),
        options=options,
        parallel_when_long="parallel" not in given and options.get("prefix") is None,
        at_once=at_once,
        verbose=bool(verbose),
        shows_text=following.view is None and _shows_text(verbose, folder),
        names_requests=following.observer is not None,
        view=following.view,
    )
    open_engine: OpenEngine = context.obj
    status = following.run(lambda: job.run(lambda: open_engine(found_model, config)))
    return status or (FAILED if len(readable) < len(files) else 0)


# ---- the arguments ---------------------------------------------------------------------------------------------------


def _model(name: str | None) -> str:
    if name is None:
        raise click.UsageError(_NO_MODEL)
    if name == DEMO:
        from ...demo import checkpoint

        return str(checkpoint())
    if name in WHISPER_NAMES and not os.path.exists(name):
        return WHISPER_NAMES[name]
    return name


def _check_language(language: str | None) -> None:
    if language is None:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if language_code(language) is None:
        raise click.UsageError(f"--language: {unknown_language(language)}")


def _readable(files: tuple[str, ...]) -> tuple[str, ...]:
    """The files that can be read, as far as that shows; the others are complained of."""
    faults = {name: file_fault(name) for name in files}
    for name, fault in faults.items():
        if fault is not None:
            complain(f"{shown(name)}: {fault}")
    return tuple(name for name in files if faults[name] is None)


def _shows_text(verbose: bool | None, folder: str | None) -> bool:
    """True if segments are written to standard error: where they are asked for, and on a terminal that does not get the
    results anyway."""
    if verbose is not None:
        return verbose
    return is_terminal(sys.stderr) and (folder is not None or not is_terminal(sys.stdout))


@frozen
class Output:
    """The formats, the folder that the outputs are written to (``None``: standard output), and how subtitles look."""

    formats: tuple[Format, ...]
    folder: str | None
    subtitles: SubtitleSettings

    def check(self, files: tuple[str, ...], *, has_words: bool) -> None:
        """Refuses what cannot be written, and makes the folder."""
        for fault in self._faults(files, has_words=has_words):
            raise click.UsageError(fault)
        if any(each.is_subtitles for each in self.formats):
            for sentence in self.subtitles.without_effect():
                complain(f"warning: {in_flags(sentence, _WRITER_FIELDS)}")
        if self.folder is not None:
            prepare_folder(self.folder)

    def _faults(self, files: tuple[str, ...], *, has_words: bool) -> Iterator[str]:
        if files.count(STDIN) > 1:
            yield f"{STDIN} is given {files.count(STDIN)} times; standard input can be read once"
        needing = self.subtitles.needing_words
        if needing is not None and not has_words:
            yield f"{spelled(needing)} needs words with their times; give --word-timestamps too"
        if self.folder is None:
            yield from self._faults_of_stdout(files)
        else:
            yield from self._faults_of_folder(files, self.folder)

    def _faults_of_stdout(self, files: tuple[str, ...]) -> Iterator[str]:
        if len(self.formats) > 1:
            yield "--format all writes several files; give their folder: --output-dir DIR"
        elif len(files) > 1 and not follow_each_other(self.formats[0]):
            name = self.formats[0].name
            yield f"--format {name} of {len(files)} files cannot follow each other; give --output-dir DIR"

    def _faults_of_folder(self, files: tuple[str, ...], folder: str) -> Iterator[str]:
        both = clash(files)
        if both is not None:
            written = os.path.join(folder, f"{output_name(both[0])}.{self.formats[0].extension}")
            names = " and ".join(map(shown, both))
            yield f"{names} would both be written to {written}; rename one, or give each another --output-dir"
        for name in files:
            for each in self.formats:
                written = os.path.join(folder, f"{output_name(name)}.{each.extension}")
                if name != STDIN and os.path.realpath(written) == os.path.realpath(name):
                    yield f"{name} would be overwritten by its own transcript; give another --output-dir"

    def destination(self, files: tuple[str, ...]) -> Callable[[Callable[[], None]], Destination]:
        """Makes the destination for ``files``, those with faults included: with several, lines have names.

        Raises:
            OutputError: standard output is closed.
        """
        if self.folder is not None:
            folder = Folder(Path(self.folder), self.formats, self.subtitles)
            return lambda _: folder
        out, format_ = stdout(), self.formats[0]
        return lambda clear: standard_output(out, files, format_, self.subtitles, clear)
