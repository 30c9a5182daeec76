"""`Following`: what follows a command's engine while it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

import click
import trio
from attrs import frozen

from ...core.events import Event
from .terminal import FAILED, STDIN, complain, until_interrupted, view_of
from .trace_file import TraceFile

if TYPE_CHECKING:
    from .watch import View


@frozen(eq=False)
class Following:
    """The view of ``--watch`` and the file of ``--trace``, if they are wanted."""

    view: View | None = None
    trace: TraceFile | None = None

    @classmethod
    def of(cls, command: str, *, watch: bool, trace: str | None) -> Self:
        """For the options of ``command``."""
        if trace == STDIN:
            raise click.UsageError("--trace -, but standard output is for the results; give a file: --trace trace.json")
        return cls(view_of(command, watch=watch), None if trace is None else TraceFile(trace))

    @property
    def observer(self) -> Callable[[Event], None] | None:
        """For `EngineConfig`."""
        view, trace = self.view, self.trace
        if view is None or trace is None:
            return trace if view is None else view.state
        state = view.state

        def both(event: Event) -> None:
            state(event)
            trace(event)

        return both

    def run(self, work: Callable[[], Awaitable[int]]) -> int:
        """The exit status of ``work``, in a loop of trio's.

        Raises:
            OutputError: the trace cannot be written, and ``work`` has not begun.
        """
        if self.trace is None:
            return trio.run(until_interrupted, work, self.view)
        self.trace.open()
        try:
            status = trio.run(until_interrupted, work, self.view)
        finally:
            self.trace.close()
        if self.trace.fault:
            complain(self.trace.fault)
        return status or (FAILED if self.trace.fault else 0)
