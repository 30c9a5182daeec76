"""Functions that the commands share: for writing results and errors, and for ending.

Results go to standard output, errors to standard error. Exit status: see `triolet.api.command_line.main`.
"""

from __future__ import annotations

import codecs
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import IO, Any, TextIO, TypeAlias

import click
import trio

from ...core.config import EngineConfig

OpenEngine: TypeAlias = Callable[[str, EngineConfig], AbstractAsyncContextManager[Any]]

FAILED, WRONG, CUT_OFF, INTERRUPTED, PIPE_CLOSED = 1, 2, 3, 130, 141
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class WrongInput(click.ClickException):
    """A prompt that cannot be used, found before any model is loaded. The user sees one line; the exit status is 2."""

    exit_code = WRONG

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002  (click's)
        """Writes the message to standard error."""
        complain(self.message)


class WrongFile(WrongInput):
    """A file or standard input that cannot be used, found before any model is loaded. The user sees one line; the exit
    status is 1.
    """

    exit_code = FAILED


class OutputError(WrongFile):
    """Results cannot be written: the disk is full, standard output is closed. The user sees one line; the exit status
    is 1."""


def visible(text: str) -> str:
    """``text`` with escapes such as \\x1b for control characters. A terminal would obey these, and a model may write
    some.
    """
    return text.translate(_CONTROLS)


def gibibytes(count: int) -> str:
    """A number of bytes as text for people."""
    return f"{count / 2**30:.1f} GiB"


def is_terminal(stream: Any) -> bool:
    """True if ``stream`` is open and a terminal."""
    return stream is not None and not stream.closed and bool(stream.isatty())


def stdout() -> TextIO:
    """Standard output. Raises `OutputError` if the shell has closed it (``>&-``), before a model is loaded in vain."""
    if sys.stdout is None or sys.stdout.closed:
        raise OutputError("standard output is closed; redirect it to a file (> FILE) or pipe it into a program")
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


def end_stdout() -> None:
    """Flushes buffered output. Output that cannot be written is discarded, since the interpreter would raise at
    exit."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def complain(message: str) -> None:
    """Writes one line to standard error. If standard error is closed, the line is lost, and only the exit status
    is left."""
    with suppress(OSError, ValueError):
        click.echo("triolet: " + " ".join(message.split()), err=True)


async def until_interrupted(work: Callable[[], Awaitable[int]]) -> int:
    """Runs ``work`` and returns its exit status, or `INTERRUPTED`. The first ^C cancels ``work``, so that everything
    closes in order; a second ^C raises KeyboardInterrupt as usual."""
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
        status = await work()
        nursery.cancel_scope.cancel()
    return INTERRUPTED if interrupted else status


def is_utf8(out: TextIO) -> bool:
    """True if ``out`` writes every character as it is. Other encodings write characters that they lack as Python's
    escapes, such as \\xe9, which are not valid JSON."""
    return out.encoding is None or codecs.lookup(out.encoding).name == "utf-8"
