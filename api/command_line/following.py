"""`Following`: the options that all commands with an engine share, and what follows the engine while it runs."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Self

import click
import trio
from attrs import frozen

from ...core.config import EngineConfig
from ...core.events import Event
from .terminal import FAILED, STDIN, complain, is_terminal, until_interrupted
from .trace_file import TraceFile

if TYPE_CHECKING:
    from .watch import View


@frozen(eq=False)
class Following:
    """The view of ``--watch`` and the file of ``--trace``, if they are wanted."""

    view: View | None = None
    trace: TraceFile | None = None

    @classmethod
    def of(cls, command: str, given: dict[str, Any]) -> Self:
        """Takes the options of `engine_options` that ask for followers out of ``given``."""
        watch, trace = given.pop("watch"), given.pop("trace")
        if trace == STDIN:
            raise click.UsageError("--trace -, but standard output is for the results; give a file: --trace trace.json")
        return cls(_view(command) if watch else None, None if trace is None else TraceFile(trace))

    def config(self, given: dict[str, Any], **settings: Any) -> EngineConfig:
        """Takes the options of `engine_options` that are settings out of ``given``. The followers observe the engine.

        Raises:
            InvalidRequest: a value that is not allowed.
        """
        settings |= {name: given.pop(name) for name in ("device", "dtype", "kv_dtype", "quantization", "threads")}
        return EngineConfig(observer=self._observer(), **settings)

    def _observer(self) -> Callable[[Event], None] | None:
        followers: list[Callable[[Event], None]] = [] if self.view is None else [self.view.state]
        if self.trace is not None:
            followers.append(self.trace)
        if not followers:
            return None

        def observe(event: Event) -> None:
            for follower in followers:
                follower(event)

        return observe

    def run(self, work: Callable[[], Awaitable[int]]) -> int:
        """The exit status of ``work``, in a loop of trio's.

        Raises:
            OutputError: the trace cannot be written, and ``work`` has not begun.
        """
        if self.trace is None:
            return trio.run(until_interrupted, work, self.view)
        with self.trace.open():
            status = trio.run(until_interrupted, work, self.view)
        if self.trace.fault:
            complain(self.trace.fault)
        return status or (FAILED if self.trace.fault else 0)


def _view(command: str) -> View | None:
    """The view on standard error; ``None`` where that is no terminal."""
    if not is_terminal(sys.stderr):
        complain("--watch: standard error is no terminal, there is nothing to watch with; going on without")
        return None
    from rich.console import Console

    from .watch import View

    return View(Console(stderr=True), f"triolet {command}")
