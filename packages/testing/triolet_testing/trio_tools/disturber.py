"""The disturber of a program, which makes faults happen and notices who swallows a cancellation."""

from __future__ import annotations

import signal
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
from attrs import define, field

from .faults import Fault, StepCounter, TrioFault
from .hooks import about_to_raise, errors_within, leaves_a_nursery
from .schedules import role, where_of

_REASON = "injected by triolet"
_TRIO = str(Path(trio.__file__).parent)


@define(eq=False)
class _Block:
    """A block that can be cancelled, and the task that entered it."""

    task: trio.lowlevel.Task
    scope: trio.CancelScope = field(factory=trio.CancelScope)


@define(eq=False)
class Disturber(StepCounter):
    """A disturber, which cancels blocks and presses ^C. Steps are counted while a block is open. The first block is the
    whole program. The blocks within it are its parts.
    """

    within_parts: defaultdict[str, list[int]] = field(factory=lambda: defaultdict(list))  # steps within parts
    place: str = ""  # where the task stood at whose step the fault happened
    swallowed: list[tuple[str, str]] = field(factory=list)  # the task, and where it was cancelled
    _blocks: list[_Block] = field(factory=list)
    _told: dict[trio.lowlevel.Task, str] = field(factory=dict)  # the cancelled tasks, and where
    _errors: int = 0  # how many errors the nursery of the running task has had

    @asynccontextmanager
    async def block(self) -> AsyncIterator[trio.CancelScope]:
        """Opens a block that the fault may cancel, even at the block's first checkpoint."""
        block = _Block(trio.lowlevel.current_task())
        self._blocks.append(block)
        try:
            with block.scope:
                await trio.lowlevel.cancel_shielded_checkpoint()  # the step before the first step of the block
                yield block.scope
        except BaseException:
            if block.scope.cancel_called:
                self._told.pop(block.task, None)  # else the cancellation is on its way to an outer block
            raise
        finally:
            self._blocks.remove(block)
        where = self._told.pop(block.task, None)
        if where is not None and not block.scope.cancelled_caught:
            self._note(block.task, f"was cancelled in {where}, and went on")

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Implements `trio.abc.Instrument.before_task_step`."""
        if not self._blocks:
            return
        if self.met:
            self._look(task)
        super().before_task_step(task)
        if len(self._blocks) > 1:
            name = self._roles[task.name]
            self.within_parts[name].append(self.steps[name])

    def _look(self, task: trio.lowlevel.Task) -> None:
        """Notes whether the fault is cancelling ``task`` now."""
        self._errors = errors_within(task.parent_nursery)
        error = about_to_raise(task)
        if isinstance(error, trio.Cancelled) and error.reason == _REASON and not leaves_a_nursery(task):
            self._told[task] = where_of(task)

    def task_exited(self, task: trio.lowlevel.Task) -> None:
        """Implements `trio.abc.Instrument.task_exited`."""
        where = self._told.pop(task, None)
        if where is not None and errors_within(task.parent_nursery) == self._errors:
            self._note(task, f"was cancelled in {where}, and ended as if it were done")

    def _note(self, task: trio.lowlevel.Task, what: str) -> None:
        if not task.coro.cr_code.co_filename.startswith(_TRIO):
            self.swallowed.append((role(task), f"task {role(task)!r} {what}"))

    @property
    def tasks(self) -> list[trio.lowlevel.Task]:
        """The tasks that are within a block."""
        return [block.task for block in self._blocks]

    def forget(self) -> None:
        """Drops the references to tasks, at the end of a run."""
        self._blocks.clear()
        self._told.clear()

    def fire(self, task: trio.lowlevel.Task, fault: Fault[Any]) -> None:
        """Implements `StepCounter.fire`."""
        if fault.kind is TrioFault.CANCEL:
            self._cancel(self._blocks[0], task)
        elif fault.kind is TrioFault.CANCEL_PART and len(self._blocks) > 1:
            self._cancel(self._part_of(task), task)
        elif fault.kind is TrioFault.INTERRUPT:
            self.met, self.place = True, where_of(task)
            signal.raise_signal(signal.SIGINT)

    def _cancel(self, block: _Block, task: trio.lowlevel.Task) -> None:
        self.met, self.place = True, where_of(task)
        block.scope.cancel(reason=_REASON)

    def _part_of(self, task: trio.lowlevel.Task) -> _Block:
        """Returns the innermost part that ``task`` or one of its ancestors has entered; if there is none, the latest
        part."""
        above: trio.lowlevel.Task | None = task
        while above is not None:
            for block in reversed(self._blocks[1:]):
                if block.task is above:
                    return block
            above = above.parent_nursery.parent_task if above.parent_nursery is not None else None
        return self._blocks[-1]


@contextmanager
def interruptible(fault: Fault[Any] | None) -> Iterator[None]:
    """Makes ^C raise `KeyboardInterrupt` within the block, if the fault is a ^C."""
    if fault is None or fault.kind is not TrioFault.INTERRUPT:
        yield
        return
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("^C reaches only the main thread; run the sweep there, or without TrioFault.INTERRUPT")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
