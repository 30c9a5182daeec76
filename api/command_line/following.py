"""`Following`: the options that all commands with an engine share, and the observers of the engine while it runs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeVar

import click
import trio
from attrs import frozen

from ...core.config import DTYPES, QUANTIZATIONS, EngineConfig
from ...core.errors import TrioletError
from ...core.events import Event
from .given import STDIN
from .pages import FILE, MODEL, devices, in_flags
from .terminal import FAILED, PIPE_CLOSED, OutputError, complain, is_terminal, until_interrupted
from .trace import TraceFile

if TYPE_CHECKING:
    from .watch import View


Command = TypeVar("Command", bound=Callable[..., Any])


@frozen(eq=False)
class Following:
    """The view of ``--watch`` and the file of ``--trace``, if they are wanted."""

    view: View | None = None
    trace: TraceFile | None = None

    @classmethod
    def of(cls, command: str, given: dict[str, Any]) -> Self:
        """Makes the followers that ``given`` asks for, and removes their options from ``given``."""
        watch, trace = given.pop("watch"), given.pop("trace")
        if trace == STDIN:
            raise click.UsageError(
                "--trace - is not allowed: standard output is for the results; give a file, as in --trace trace.json"
            )
        return cls(_view(command) if watch else None, None if trace is None else TraceFile(trace))

    def config(self, given: dict[str, Any], **settings: Any) -> EngineConfig:
        """Makes the settings of an engine that the followers observe. Takes them out of the options in ``given``.

        Raises:
            InvalidRequest: a value that is not allowed.
        """
        settings |= {name: given.pop(name) for name in MODEL}
        followers: list[Callable[[Event], None]] = [] if self.view is None else [self.view.state]
        if self.trace is not None:
            followers.append(self.trace)

        def observe(event: Event) -> None:
            for follower in followers:
                follower(event)

        return EngineConfig(observer=observe if followers else None, **settings)

    def run(
        self,
        open_engine: Callable[[], AbstractAsyncContextManager[Any]],
        work: Callable[[Any], Awaitable[int | None]],
        *,
        verbose: bool,
        clear: Callable[[], None] = lambda: None,
    ) -> int:
        """Runs ``work`` on an engine in a trio loop, and returns its exit status. Errors become lines on standard
        error; the view and ``clear`` make room for them.

        Raises:
            OutputError: the trace cannot be written; ``work`` has not begun.
        """

        def make_room() -> None:
            clear()
            if self.view is not None:
                self.view.clear()

        def failed(message: str) -> int:
            make_room()
            complain(message)
            return FAILED

        async def reported() -> int:
            with _log_lines(make_room, verbose=verbose):
                try:
                    async with open_engine() as engine:
                        try:
                            with nullcontext() if self.view is None else self.view.of(engine):
                                return await work(engine) or 0
                        except BrokenPipeError:
                            return PIPE_CLOSED
                        except OutputError as error:
                            return failed(str(error))
                except TrioletError as error:
                    return failed(in_flags(str(error)))

        with nullcontext() if self.trace is None else self.trace.open():
            status = trio.run(until_interrupted, reported, self.view)
        if self.trace is not None and self.trace.fault:
            complain(self.trace.fault)
            return status or FAILED
        return status


def _view(command: str) -> View | None:
    """The view on standard error; ``None`` if standard error is not a terminal."""
    if not is_terminal(sys.stderr):
        complain("--watch needs a terminal on standard error, and there is none; the command goes on without it")
        return None
    from rich.console import Console

    from .watch import View

    return View(Console(stderr=True), f"triolet {command}")


# ---- the options -----------------------------------------------------------------------------------------------------


def device_options(command: Command) -> Command:
    """Adds the options that say how a model is computed: those of every command that opens one, and of the server."""
    dtypes, quantizations = click.Choice(DTYPES), click.Choice(QUANTIZATIONS)
    computed = "The number type in which the model computes. Default: float32 on the CPU, float16 on CUDA."
    held = (
        "The number type of stored keys and values, on the CPU. 16 bits take half of the memory of 32. Default: "
        "as --dtype."
    )
    device = (
        "The device: auto, cpu, cuda or cuda:1. The command triolet devices lists the devices. Default: CUDA if there "
        "is a GPU, else the CPU."
    )
    for option in (
        click.option(
            "--threads", metavar="N", default=0, help="The number of CPU threads. Default: one for each usable core."
        ),
        click.option("--dtype", type=dtypes, default="auto", help=computed),
        click.option("--kv-dtype", type=dtypes, default="auto", help=held),
        click.option("--quantization", type=quantizations, help="Hold the weight matrices in int8, on the CPU."),
        click.option("--device", metavar="DEVICE", default="auto", shell_complete=devices, help=device),
    ):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """Adds the options of every command that opens a model, except ``--verbose``."""
    longest = (
        "The most tokens of a prompt and its answer together. Default: the model's own; on the CPU no more than fit "
        "the memory for keys and values."
    )
    for option in (
        click.option("--trace", **FILE, help="Write a trace of the engine's work into FILE. ui.perfetto.dev shows it."),
        click.option("--watch", is_flag=True, help="Show the engine's work on standard error while it runs."),
        click.option("--max-model-len", "max_positions", metavar="N", type=int, default=0, help=longest),
    ):
        command = option(command)
    return device_options(command)


def model_options(command: Command) -> Command:
    """Adds `engine_options` and ``--verbose``."""
    verbose = click.option("--verbose", "-v", is_flag=True, help="Write the log and statistics to standard error.")
    return engine_options(verbose(command))


# ---- the log ---------------------------------------------------------------------------------------------------------


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
def _log_lines(clear: Callable[[], None], *, verbose: bool) -> Iterator[None]:
    """Sends the engine's log to standard error: warnings and errors; with ``verbose``, everything except debug
    lines."""
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
