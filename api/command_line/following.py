"""The options that all commands with an engine share, and the run of an engine, with its log and its trace."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import click
import trio

from ...core.config import DTYPES, QUANTIZATIONS, EngineConfig
from ...core.errors import TrioletError
from .given import STDIN
from .pages import FILE, MODEL, devices, in_flags
from .terminal import FAILED, PIPE_CLOSED, OutputError, complain, until_interrupted
from .trace import TraceFile

Command = TypeVar("Command", bound=Callable[..., Any])

# ---- the options -----------------------------------------------------------------------------------------------------


def device_options(command: Command) -> Command:
    """Adds the options that say how a model is computed: those of every command that opens one, and of the server."""
    dtypes, quantizations = click.Choice(DTYPES), click.Choice(QUANTIZATIONS)
    computed = "The number type in which the model computes. Default: float32 on the CPU, float16 on CUDA."
    held = "The number type of stored keys and values, on the CPU. 16 bits take half the memory. Default: as --dtype."
    quantized = "Hold the weight matrices in int8, on the CPU; or those of linear layers in 4 bits."
    device = "The device: auto, cpu, cuda or cuda:1, as triolet devices lists them. Default: CUDA if there is a GPU."
    threads = "The number of CPU threads. Default: one for each usable core."
    for option in (
        click.option("--threads", metavar="N", default=0, help=threads),
        click.option("--dtype", type=dtypes, default="auto", help=computed),
        click.option("--kv-dtype", type=dtypes, default="auto", help=held),
        click.option("--quantization", type=quantizations, help=quantized),
        click.option("--device", metavar="DEVICE", default="auto", shell_complete=devices, help=device),
    ):
        command = option(command)
    return command


def engine_options(command: Command) -> Command:
    """Adds the options of every command that opens a model, except ``--verbose``."""
    longest = "The most tokens of a prompt and its answer together. Default: as many as the model and the memory allow."
    traced = "Write a trace of the engine's work into FILE. ui.perfetto.dev shows it."
    for option in (
        click.option("--trace", **FILE, callback=_trace_file, help=traced),
        click.option("--max-model-len", "max_positions", metavar="N", type=int, default=0, help=longest),
    ):
        command = option(command)
    return device_options(command)


def model_options(command: Command) -> Command:
    """Adds `engine_options` and ``--verbose``."""
    verbose = click.option("--verbose", "-v", is_flag=True, help="Write the log and statistics to standard error.")
    return engine_options(verbose(command))


def _trace_file(ctx: click.Context, param: click.Parameter, path: str | None) -> TraceFile | None:  # noqa: ARG001
    if path == STDIN:
        raise click.UsageError(
            "--trace - is not allowed: standard output is for the results; give a file, as in --trace trace.json"
        )
    return None if path is None else TraceFile(path)


# ---- the run ---------------------------------------------------------------------------------------------------------


def config_of(given: dict[str, Any], **settings: Any) -> EngineConfig:
    """Makes the settings of an engine, and takes their options out of ``given``.

    Raises:
        InvalidRequest: a value that is not allowed.
    """
    return EngineConfig(**{name: given.pop(name) for name in MODEL}, **settings)


def run(
    open_engine: Callable[[], AbstractAsyncContextManager[Any]],
    work: Callable[[Any], Awaitable[int | None]],
    trace: TraceFile | None,
    *,
    verbose: bool,
    clear: Callable[[], None] = lambda: None,
) -> int:
    """Runs ``work`` on an engine in a trio loop, and returns its exit status. Errors become lines on standard error;
    ``clear`` makes room for them.

    Raises:
        OutputError: the trace cannot be written; ``work`` has not begun.
    """

    def say(message: str) -> int:
        clear()
        complain(message)
        return FAILED

    async def reported() -> int:
        with _log_lines(say, verbose=verbose):
            try:
                async with open_engine() as engine:
                    try:
                        return await work(engine) or 0
                    except BrokenPipeError:
                        return PIPE_CLOSED
                    except OutputError as error:
                        return say(str(error))
            except TrioletError as error:
                return say(in_flags(str(error)))

    with nullcontext() if trace is None else trace.open():
        status = trio.run(until_interrupted, reported)
    if trace is not None and trace.fault:
        complain(trace.fault)
        return status or FAILED
    return status


class _LogLines(logging.Handler):
    """Says each record as one line."""

    def __init__(self, say: Callable[[str], object]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.say(text if record.levelno == logging.INFO else f"{record.levelname.lower()}: {text}")


@contextmanager
def _log_lines(say: Callable[[str], object], *, verbose: bool) -> Iterator[None]:
    """Sends the engine's log to ``say``: warnings and errors; with ``verbose``, everything except debug lines."""
    logger, handler = logging.getLogger("triolet"), _LogLines(say)
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    logger.propagate = False  # no other handler may write beside the bar
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
