"""Shared by the commands: where they write, how they end, what they read from standard input.

Results go to standard output, errors to standard error. Exit status: see `triolet.api.command_line.main`.
"""

from __future__ import annotations

import codecs
import errno
import logging
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeAlias, TypeVar

import click
import trio

from ...core.config import DTYPES, QUANTIZATIONS, EngineConfig
from ...core.errors import InvalidRequest, TrioletError
from . import pages

if TYPE_CHECKING:
    from .watch import View

OpenEngine: TypeAlias = Callable[[str, EngineConfig], AbstractAsyncContextManager[Any]]
Opening: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]
Command = TypeVar("Command", bound=Callable[..., Any])

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
STDIN = "-"
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class OutputError(Exception):
    """Results cannot be written: the disk is full, standard output is closed. The error's text is one line."""


class WrongInput(click.ClickException):
    """A prompt that cannot be used, found before any model is loaded: one line, status 2."""

    exit_code = WRONG

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002  (click's)
        """Shows it on standard error."""
        complain(self.message)


class WrongFile(WrongInput):
    """A file or standard input that cannot be used, found before any model is loaded: one line, status 1."""

    exit_code = FAILED


def engine_options(command: Command) -> Command:
    """The options of every command that opens a model, but ``--verbose``."""
    for option in (
        click.option(
            "--trace",
            metavar="FILE",
            shell_complete=pages.files,
            help="Write what the engine did into FILE, for ui.perfetto.dev.",
        ),
        click.option("--watch", is_flag=True, help="Show on standard error what the engine does, as it does it."),
        click.option("--threads", metavar="N", default=0, help="CPU threads. Default: one for each usable core."),
        click.option(
            "--dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="What is computed in. Default: float32 on the CPU, float16 on CUDA.",
        ),
        click.option(
            "--kv-dtype",
            type=click.Choice(DTYPES),
            default="auto",
            help="What keys and values are held in, on the CPU: 16 bits are half of the bytes. Default: as --dtype.",
        ),
        click.option("--quantization", type=click.Choice(QUANTIZATIONS), help="Hold the matrices in int8, on the CPU."),
        click.option(
            "--device",
            metavar="DEVICE",
            default="auto",
            shell_complete=pages.devices,
            help="cpu, cuda or cuda:1; see triolet devices. Default: CUDA where there is one.",
        ),
    ):
        command = option(command)
    return command


def model_options(command: Command) -> Command:
    """`engine_options` and ``--verbose``."""
    verbose = click.option("--verbose", "-v", is_flag=True, help="The log, and statistics, on standard error.")
    return engine_options(verbose(command))


def visible(text: str) -> str:
    """``text`` for a terminal, which obeys control characters, even those that a model wrote."""
    return text.translate(_CONTROLS)


def gibibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**30:.1f} GiB"


def is_terminal(stream: Any) -> bool:
    """True if ``stream`` is open and a terminal."""
    return stream is not None and not stream.closed and bool(stream.isatty())


def stdout() -> TextIO:
    """Standard output. Raises before a model is loaded in vain, if the shell has closed it (``>&-``)."""
    if sys.stdout is None or sys.stdout.closed:
        raise OutputError("standard output is closed; send it somewhere, such as to a file (> FILE) or to a program")
    return sys.stdout


def write(line: str, out: TextIO, *, end: str = "\n") -> None:
    """Writes ``line`` and ``end``, and flushes.

    Raises:
        BrokenPipeError: the reader went away.
        OutputError: the line cannot be written for another reason.
    """
    try:
        out.write(line + end)
        out.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise OutputError(f"the output cannot be written: {error}") from error


def stdout_fails() -> bool:
    """True if buffered output cannot be written."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        return True
    return False


def discard_stdout() -> None:
    """Discards buffered output, which must not raise when the interpreter flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def complain(message: str) -> None:
    """Writes one line to standard error. Where that is gone too, only the exit status is left."""
    with suppress(OSError, ValueError):
        click.echo("triolet: " + " ".join(message.split()), err=True)


class _LogLines(logging.Handler):
    """Writes each record as one line to standard error, after ``clear`` has made room."""

    def __init__(self, clear: Callable[[], None]) -> None:
        super().__init__()
        self.clear = clear

    def emit(self, record: logging.LogRecord) -> None:
        self.clear()
        text = record.getMessage()
        complain(text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}")


@contextmanager
def log_lines(clear: Callable[[], None], *, verbose: bool) -> Iterator[None]:
    """Sends the engine's log to standard error: warnings, or (``verbose``) all but debug lines."""
    logger, handler = logging.getLogger("triolet"), _LogLines(clear)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False  # no other handler may write into the view
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


async def until_interrupted(work: Callable[[], Awaitable[int]], view: View | None = None) -> int:
    """The status of ``work``, or `INTERRUPTED`. The first ^C cancels ``work``, so that all closes in order. A second ^C
    is Python's KeyboardInterrupt again. ``view`` is drawn meanwhile."""
    interrupted = False

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        nonlocal interrupted
        with trio.open_signal_receiver(signal.SIGINT) as signals:
            task_status.started()
            async for _ in signals:
                interrupted = True
                nursery.cancel_scope.cancel()
                return

    status = INTERRUPTED
    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        if view is not None:
            nursery.start_soon(view.run)
        status = await work()
        nursery.cancel_scope.cancel()
    return INTERRUPTED if interrupted else status


async def reported(
    open_engine: Opening,
    work: Callable[[Any], Awaitable[int | None]],
    view: View | None,
    *,
    verbose: bool,
    clear: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of ``work`` in an engine's block, which ``view`` shows. Errors become lines on standard error,
    for which ``view`` and ``clear`` make room."""

    def make_room() -> None:
        clear()
        if view is not None:
            view.clear()

    def failed(error: Exception) -> int:
        make_room()
        complain(pages.in_flags(str(error)))
        return FAILED

    with log_lines(make_room, verbose=verbose):
        try:
            async with open_engine() as engine:
                try:
                    with nullcontext() if view is None else view.of(engine):
                        return await work(engine) or 0
                except BrokenPipeError:
                    return PIPE_CLOSED
                except OutputError as error:
                    return failed(error)
        except TrioletError as error:
            return failed(error)


def is_utf8(out: TextIO) -> bool:
    """True if ``out`` writes every character as it is. In other encodings missing characters are written as Python's
    escapes, such as \\xe9, which JSON does not know."""
    return out.encoding is None or codecs.lookup(out.encoding).name == "utf-8"


def shown(name: str) -> str:
    return {STDIN: "standard input", "": "''"}.get(name, name)


_EMPTY_NAME = "an empty file name; look at the quotes, and whether the variable between them is set"


def at_a_shell(name: str, error: TrioletError) -> str:
    """The text of ``error`` for a user who types file names, and has no arrays or bytes to pass."""
    if not name:
        return _EMPTY_NAME
    return _no_such_file(name) if isinstance(error.__cause__, FileNotFoundError) else pages.in_flags(str(error))


def _no_such_file(name: str) -> str:
    if "://" in name:
        return "no such file; addresses are not fetched: download it first, or pipe it in and give - as its name"
    return "no such file; check the spelling and the folder (ls shows what is there)"


def file_fault(name: str) -> str | None:
    """The reason why the file ``name`` cannot be read, as far as that shows without reading it; ``None``: it can be
    read. Standard input has no fault here."""
    if name == STDIN:
        return None
    if not name:
        return _EMPTY_NAME
    try:
        mode = os.stat(name).st_mode
        if stat.S_ISDIR(mode):
            return f"it is a folder; give the files in it ({name.rstrip('/')}/*)"
        if stat.S_ISREG(mode):  # a pipe that was opened and closed again would have lost its writer
            with open(name, "rb"):
                pass
    except FileNotFoundError:
        return _no_such_file(name)
    except (OSError, ValueError) as error:
        return f"it cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


def read_stdin(what: str) -> bytes:
    """All of standard input, which should be ``what``, by its descriptor: an abandoned read then holds no lock of
    Python's.

    Raises:
        InvalidRequest: standard input is closed, or cannot be read.
    """
    if sys.stdin is None or sys.stdin.closed:
        raise InvalidRequest(f"it is closed; pipe {what} in, or redirect it from a file (< FILE)")
    parts = []
    try:
        while part := os.read(sys.stdin.fileno(), 1 << 16):
            parts.append(part)
    except OSError as error:
        raise InvalidRequest(
            f"it cannot be read ({error}); pipe {what} in, or redirect it from a file (< FILE)"
        ) from error
    return b"".join(parts)
