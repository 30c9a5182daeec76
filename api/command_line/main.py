"""The command ``triolet``: ``transcribe`` files, ``generate`` text, ``embed`` texts, list ``devices``.

Results go to standard output, in the order of the files; progress and errors go to standard error. Exit status: 0 all
is well, 1 a file or the model failed or the output could not be written, 2 wrong usage or a prompt that cannot be
served, 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import attrs
import click
import trio
from attrs import define, field, frozen

from ...core.config import EngineConfig
from ...core.errors import InvalidRequest, TrioletError
from ..inputs.audio import AudioSource
from ..outputs.results import Segment, Transcript
from ..speech.options import TASKS
from .generate import embed, generate
from .terminal import (
    FAILED,
    INTERRUPTED,
    PIPE_CLOSED,
    STDIN,
    UNWRITABLE,
    OpenEngine,
    OutputError,
    at_a_shell,
    complain,
    discard_stdout,
    is_utf8,
    log_lines,
    model_options,
    read_stdin,
    shown,
    stdout,
    stdout_fails,
    until_interrupted,
    view_of,
    watched,
    write,
)

if TYPE_CHECKING:
    from .watch import View


def main(arguments: Sequence[str] | None = None, open_engine: OpenEngine | None = None) -> NoReturn:
    """Runs the command and exits. ``open_engine`` replaces `Engine` in tests."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode, a file name that is no text
    try:
        status = cli.main(arguments, prog_name="triolet", standalone_mode=False, obj=open_engine or _open_engine)
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except OutputError as error:
        complain(str(error))
        status = FAILED
    except OSError as error:  # from click, which writes the help by a stream of its own
        if error.errno not in UNWRITABLE:
            raise
        complain(f"the output cannot be written: {error}")
        status = FAILED
    except (click.Abort, KeyboardInterrupt):
        status = INTERRUPTED
    except BaseExceptionGroup as errors:  # interrupted for a second time, while the engine closed
        if errors.subgroup(KeyboardInterrupt) is None:
            raise
        status = INTERRUPTED
    if stdout_fails():
        discard_stdout()
    sys.exit(status or 0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="triolet", message="triolet %(version)s")
def cli() -> None:
    """Speech to text, text, questions about images and audio, and embeddings, by models on this machine."""


@cli.command()
@click.argument("files", nargs=-1, required=True)
@click.option("--model", help="Folder or hub id of a checkpoint. Default: the small demo model that comes along.")
@click.option("--language", help="Spoken language: a code (en) or a name (english). Default: detect it.")
@click.option("--task", type=click.Choice(TASKS), default=TASKS[0], show_default=True, help="translate: into English.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text", show_default=True)
@model_options
@click.option("--at-once", type=click.IntRange(1), default=8, show_default=True, help="Files held in memory together.")
@click.pass_obj
def transcribe(
    open_engine: OpenEngine,
    /,
    *,
    files: tuple[str, ...],
    model: str | None,
    style: str,
    device: str,
    dtype: str,
    threads: int,
    watch: bool,
    **options: Any,
) -> int:
    """Write down what is said in FILES (audio or video; - reads standard input).

    Text: one line a file; with several files it begins with "NAME: ". JSON: one object a line and file, with the
    segments and their times in seconds. A file that fails is named on standard error, and the others go on.
    """
    if files.count(STDIN) > 1:
        raise click.UsageError(f"{STDIN} is given {files.count(STDIN)} times; standard input can be read once")
    view = view_of("transcribe", watch=watch)
    observer = None if view is None else view.state
    try:
        config = EngineConfig(device=device, dtype=dtype, threads=threads, observer=observer)
    except InvalidRequest as error:
        raise click.UsageError(str(error)) from error
    out = stdout()
    job = Job(files=files, style=style, view=view, **options)
    return trio.run(until_interrupted, lambda: job.run(lambda: open_engine(model or _demo(), config), out), view)


cli.add_command(generate)
cli.add_command(embed)


@cli.command()
def devices() -> int:
    """List what a model can run on. The default is marked with a star."""
    out = stdout()
    try:
        for line in _device_lines():
            write(line, out)
    except BrokenPipeError:
        return PIPE_CLOSED
    return 0


def _open_engine(model: str, config: EngineConfig) -> AbstractAsyncContextManager[Any]:
    from ..engine import Engine

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # problems become errors of ours
    return Engine(model, config=config)


def _demo() -> str:
    from ...demo import checkpoint

    return str(checkpoint())


# ---- transcribe ------------------------------------------------------------------------------------------------------


@define
class _Slot:
    """A file's place in the output."""

    name: str
    done: trio.Event = field(factory=trio.Event)
    outcome: Transcript | TrioletError | None = None


@frozen(kw_only=True)
class Job:
    """Files to transcribe through one engine.

    Args:
        files: paths; "-" is standard input.
        language, task: as for `Engine.transcribe`.
        style: ``"text"`` or ``"json"``.
        at_once: files transcribed together, and so held in memory.
        verbose: write the log to standard error, not its warnings alone.
        view: what ``--watch`` draws.
    """

    files: tuple[str, ...]
    language: str | None = None
    task: str = "transcribe"
    style: str = "text"
    at_once: int = 8
    verbose: bool = False
    view: View | None = None

    async def run(self, open_engine: Callable[[], AbstractAsyncContextManager[Any]], out: TextIO) -> int:
        """Writes a line per file to ``out``; returns the exit status."""
        progress = _Progress(self.view)
        with progress, log_lines(progress.clear, verbose=self.verbose):
            try:
                async with open_engine() as engine:
                    with watched(self.view, engine):
                        return await self._run(engine, out, progress)
            except TrioletError as error:
                progress.clear()
                complain(str(error))
                return FAILED

    async def _run(self, engine: Any, out: TextIO, progress: _Progress) -> int:
        slots = [_Slot(name) for name in self.files]
        waiting = iter(slots)
        status = 0
        async with trio.open_nursery() as nursery:
            for _ in range(min(self.at_once, len(slots))):
                nursery.start_soon(self._work, engine, waiting, progress)
            try:
                for slot in slots:
                    await slot.done.wait()
                    status = max(status, self._report(slot, out, progress))
            except BrokenPipeError:
                status = PIPE_CLOSED
                nursery.cancel_scope.cancel()
            except OutputError as error:
                progress.clear()
                complain(str(error))
                status = FAILED
                nursery.cancel_scope.cancel()
        return status

    async def _work(self, engine: Any, waiting: Iterator[_Slot], progress: _Progress) -> None:
        for slot in waiting:
            try:
                slot.outcome = await self._transcribe(engine, slot.name, progress)
            except TrioletError as error:
                slot.outcome = error
            slot.done.set()

    async def _transcribe(self, engine: Any, name: str, progress: _Progress) -> Transcript:
        source: AudioSource = name
        if name == STDIN:
            source = await trio.to_thread.run_sync(_read_audio, abandon_on_cancel=True)
        found: list[Segment] = []
        named = {} if self.view is None else {"request_id": shown(Path(name).name)}  # lines say which file they are of
        async with engine.stream_transcription(source, language=self.language, task=self.task, **named) as segments:
            told = progress.begin(segments.duration)
            async for segment in segments:
                found.append(segment)
                told = progress.advance(told, segments.position)
            progress.advance(told, segments.duration)
            return Transcript.of(
                found,
                language=segments.language,
                language_probability=segments.language_probability,
                duration=segments.duration,
            )

    def _report(self, slot: _Slot, out: TextIO, progress: _Progress) -> int:
        outcome, slot.outcome = slot.outcome, None
        assert outcome is not None, "a file was reported before it was done"
        if isinstance(outcome, TrioletError):
            progress.clear()
            complain(f"{shown(slot.name)}: {at_a_shell(slot.name, outcome)}")
            return FAILED
        progress.clear()
        write(self._line(slot.name, outcome, out), out)
        return 0

    def _line(self, name: str, transcript: Transcript, out: TextIO) -> str:
        if self.style == "json":
            told = attrs.asdict(transcript, filter=lambda attribute, _: attribute.name != "timings")
            return json.dumps({"file": name, **told}, ensure_ascii=not is_utf8(out))
        text = " ".join(transcript.text.splitlines())
        return text if len(self.files) == 1 else f"{name}: {text}"


def _read_audio() -> bytes:
    return read_stdin("audio")


class _Progress:
    """A bar of seconds of audio on standard error; nothing where standard error is no terminal, or there is a view."""

    def __init__(self, view: View | None = None) -> None:
        self._view = view
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, seconds: float) -> float:
        """A file of that length was opened. Returns the seconds done: 0."""
        if self._view is not None:
            return 0.0
        if self._bar is None:
            from tqdm import tqdm

            form = "{percentage:3.0f}% of {total:.0f} s |{bar}| {elapsed}, {remaining} left"
            self._bar = tqdm(total=seconds, file=sys.stderr, disable=None, leave=False, bar_format=form)
        else:
            self._bar.total += seconds
            self._bar.refresh()
        return 0.0

    def advance(self, told: float, position: float) -> float:
        """The file has moved on from ``told`` to ``position``, in seconds."""
        if self._bar is not None:
            self._bar.update(position - told)
        return position

    def clear(self) -> None:
        """Makes room for a line on the terminal."""
        if self._view is not None:
            self._view.clear()
        if self._bar is not None:
            self._bar.clear()


# ---- devices ---------------------------------------------------------------------------------------------------------


def _device_lines() -> list[str]:
    from ...models.machine.host import affinity, available_memory, choose_threads, read_file, usable_cores
    from ...models.machine.openmp import prepare_openmp

    policy = prepare_openmp()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lines = []
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        star = "*" if index == torch.cuda.current_device() else " "
        free, total = torch.cuda.mem_get_info(index)
        lines.append(f"{star} cuda:{index}  {device.name}, {_gibibytes(total)} ({_gibibytes(free)} free), float16")
    star = " " if count else "*"
    threads = choose_threads(torch.get_num_threads())
    cores = usable_cores(read_file, affinity(), os.cpu_count() or 1)
    left = available_memory(read_file)
    available = "" if left is None else f" ({_gibibytes(left)} available)"
    return [
        *lines,
        f"{star} cpu  {_cpu_name()}, {_gibibytes(_memory())}{available}, float32, {threads} threads",
        f"       cores: {cores.count} usable of {cores.reason}",
        f"       waiting threads: {policy.setting or 'spin'}, {policy.reason}",
    ]


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


def _memory() -> int:
    """Bytes of the machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return next(iter(names), platform.processor() or platform.machine())
