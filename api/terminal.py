"""What the commands share: where they write, how they end, what they read from standard input.

Results go to standard output, errors to standard error. Exit status: see `triolet.api.cli`.
"""

from __future__ import annotations

import codecs
import errno
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import IO, Any, TextIO, TypeAlias, TypeVar

import click
import trio

from ..core.config import DTYPES, EngineConfig
from ..core.errors import InvalidRequest, TrioletError

OpenEngine: TypeAlias = Callable[[str, EngineConfig], AbstractAsyncContextManager[Any]]
Command = TypeVar("Command", bound=Callable[..., Any])

FAILED, WRONG, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
STDIN = "-"
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


class OutputError(Exception):
    """Results cannot be written: the disk is full, standard output is closed. Its text says so in one line."""


class WrongInput(click.ClickException):
    """A prompt or a file that cannot be used, found before any model is loaded: one line, status 2."""

    exit_code = WRONG

    def show(self, file: IO[Any] | None = None) -> None:  # noqa: ARG002  (click's)
        """On standard error."""
        complain(self.message)


def model_options(command: Command) -> Command:
    """The options of every command that opens a model."""
    for option in (
        click.option("--threads", default=0, help="CPU threads. Default: as many as torch likes."),
        click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of the weights."),
        click.option("--device", default="auto", show_default=True, help="cpu, cuda, cuda:1; see: triolet devices."),
    ):
        command = option(command)
    return command


def stdout() -> TextIO:
    """Standard output, which the shell may have closed (``>&-``): before any model is loaded for nothing."""
    if sys.stdout is None or sys.stdout.closed:
        raise OutputError("standard output is closed; send it somewhere, such as to a file (> FILE) or to a program")
    return sys.stdout


def write(line: str, out: TextIO, *, end: str = "\n") -> None:
    """Writes a line, or what ``end`` makes of it, at once.

    Raises:
        BrokenPipeError: its reader went away.
        OutputError: it cannot be written for another reason.
    """
    try:
        out.write(line + end)
        out.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise OutputError(f"the output cannot be written: {error}") from error


def stdout_fails() -> bool:
    """Something is still buffered that cannot be written."""
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except OSError:
        return True
    return False


def discard_stdout() -> None:
    """What is still buffered must not raise when the interpreter flushes it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def complain(message: str) -> None:
    """One line on standard error; where that is gone too, the exit status alone has to tell."""
    with suppress(OSError, ValueError):
        click.echo("triolet: " + " ".join(message.split()), err=True)


async def until_interrupted(work: Callable[[], Awaitable[int]]) -> int:
    """The status of ``work``, or `INTERRUPTED`. The first ^C cancels it, so that all closes in order; a second one is
    Python's KeyboardInterrupt again."""
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
    """``out`` writes every character as it is. In other encodings what it lacks would be written as Python's escapes,
    such as \\xe9, which JSON does not know."""
    return out.encoding is None or codecs.lookup(out.encoding).name == "utf-8"


def shown(name: str) -> str:
    return {STDIN: "standard input", "": "''"}.get(name, name)


def at_a_shell(name: str, error: TrioletError) -> str:
    """What ``error`` means to somebody who types file names and has no arrays or bytes to give."""
    if not name:
        return "an empty file name; look at the quotes, and whether the variable between them is set"
    if not isinstance(error.__cause__, FileNotFoundError):
        return str(error)
    if "://" in name:
        return "no such file; addresses are not fetched: download it first, or pipe it in and give - as its name"
    return "no such file; check the spelling and the folder (ls shows what is there)"


def read_stdin(what: str) -> bytes:
    """All of standard input, which should be ``what``, by its descriptor: an abandoned read then holds no lock of
    Python's.

    Raises:
        InvalidRequest: it is closed, or cannot be read.
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
