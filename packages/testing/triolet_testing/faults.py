"""The faults of a simulation, and their injector, which makes each fault happen at its time."""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import trio
from attrs import define, evolve, field

from triolet.actors.worker import Job
from triolet.core.errors import CheckpointError, DeviceLost

from .trio_tools import faults as trio_faults
from .trio_tools.faults import StepCounter
from .trio_tools.hooks import leaves_a_nursery, throw_into
from .trio_tools.schedules import role


class FaultKind(enum.Enum):
    """The kinds of fault."""

    CANCEL = "the surroundings are cancelled"
    CANCEL_RELEASE_FAILS = "the surroundings are cancelled, and a release raises"
    INTERRUPT = "^C"
    CRASH = "the actor raises"
    CLIENT_RAISES = "a client raises"
    OBSERVER_FAILS = "the observer raises"
    STALL = "a client stops reading"
    OPEN_FAILS = "the load raises"
    RELEASE_FAILS = "a release raises"
    ENCODE_FAILS = "an encode batch raises"
    ITEM_FAILS = "every encode batch with an item raises"
    STEP_FAILS = "a step raises"
    PROMPT_FAILS = "every step with a prompt raises"
    FREE_FAILS = "a free raises, and the runner starts anew"
    OUT_OF_MEMORY = "a call of the device runs out of memory"
    DEVICE_LOST = "a call of the device finds it lost"
    SLEEP_FAILS = "a sleep finds no room for the weights"
    WAKE_FAILS = "a wake runs out of memory"
    STEP_HANGS = "a step never returns"
    ADAPTER_FAILS = "a load of an adapter raises"

    def __repr__(self) -> str:
        return f"FaultKind.{self.name}"


class Injected(Exception):
    """The error that a fault raises."""


ACTORS = {  # each actor with the names of its channels; a runner that crashes reads no more
    "triolet scheduler": "_to_scheduler",
    "triolet encoder cache": "_to_encoder_cache",
    "triolet runner": None,
    "triolet step lane": None,
    "triolet encode lane": None,
}


Fault: TypeAlias = trio_faults.Fault[FaultKind]
"""A fault of kind ``kind``, which happens just before ``task`` takes its ``step``-th step, counted from 1. If a task is
leaving a nursery then, it crashes at its next step instead. A kind of `OCCASIONS` happens on the ``step``-th of its
occasions, and ``task`` is the name of these occasions."""


DEVICE_FAULTS: Mapping[FaultKind, tuple[set[Job], type[Exception]]] = {
    FaultKind.ENCODE_FAILS: ({Job.ENCODE}, RuntimeError),
    FaultKind.ITEM_FAILS: ({Job.ENCODE}, RuntimeError),
    FaultKind.STEP_FAILS: ({Job.STEP}, RuntimeError),
    FaultKind.PROMPT_FAILS: ({Job.STEP}, RuntimeError),
    FaultKind.FREE_FAILS: ({Job.FREE}, RuntimeError),
    FaultKind.OUT_OF_MEMORY: ({Job.ENCODE, Job.STEP}, MemoryError),
    FaultKind.OPEN_FAILS: ({Job.OPEN}, RuntimeError),
    FaultKind.RELEASE_FAILS: ({Job.CLOSE}, RuntimeError),
    FaultKind.ADAPTER_FAILS: ({Job.ADAPTER}, CheckpointError),
    FaultKind.SLEEP_FAILS: ({Job.SLEEP}, MemoryError),
    FaultKind.WAKE_FAILS: ({Job.WAKE}, MemoryError),
    FaultKind.DEVICE_LOST: ({Job.ENCODE, Job.STEP, Job.FREE}, DeviceLost),
}


OCCASIONS: Mapping[FaultKind, str] = {
    FaultKind.CLIENT_RAISES: "reads of clients",
    FaultKind.STALL: "reads of clients",
    FaultKind.OBSERVER_FAILS: "events",
    FaultKind.STEP_HANGS: "calls of step",
    **{kind: f"calls of {', '.join(sorted(job.value for job in jobs))}" for kind, (jobs, _) in DEVICE_FAULTS.items()},
}
"""The kinds of fault that happen on an occasion, each with the name of its occasions. All others happen at a step of a
task."""


@define(eq=False)
class Injector(StepCounter):
    """An injector that counts the steps of every task and makes the fault happen."""

    scope: trio.CancelScope = field(factory=trio.CancelScope)
    put_back: Callable[[str, object], None] = lambda *_: None  # returns a message to an actor that was about to read it
    over: bool = False  # the run has ended; later steps do not count
    release_failed: bool = False
    _releases_fail: bool = False
    _occasions: int = 0
    _cause: object = None  # the item or prompt that fails from now on
    _prompts: dict[int, object] = field(factory=dict)  # by sequence

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Implements `trio.abc.Instrument.before_task_step`."""
        if not self.over:
            super().before_task_step(task)

    def fire(self, task: trio.lowlevel.Task, fault: Fault) -> None:
        """Implements `StepCounter.fire`."""
        kind = fault.kind
        if kind in {FaultKind.CANCEL, FaultKind.CANCEL_RELEASE_FAILS}:
            self.met, self._releases_fail = True, kind is FaultKind.CANCEL_RELEASE_FAILS
            self.scope.cancel()
        elif kind is FaultKind.INTERRUPT:
            self.met = True
            signal.raise_signal(signal.SIGINT)
        elif role(task) in ACTORS and leaves_a_nursery(task):
            self.fault = evolve(fault, step=fault.step + 1)
        elif role(task) in ACTORS:
            self.met = True
            unread = throw_into(task, Injected(f"in {role(task)}"))
            if unread is not None:
                self.put_back(role(task), unread)

    def happens(self, kind: FaultKind) -> bool:
        """Counts another occasion for ``kind``. Returns whether the fault happens now."""
        fault = self.fault
        if fault is None or fault.kind is not kind:
            return False
        self._occasions += 1
        if self._occasions != fault.step:
            return False
        self.met = True
        return True

    def on_device(self, job: Job, argument: Any) -> BaseException | None:
        """Implements `SimExecutor.fault`."""
        causes = self._causes(job, argument)
        if self._cause in causes:
            return RuntimeError(f"injected into {job.value} again")
        if self.fault is not None and self.fault.kind in DEVICE_FAULTS:
            jobs, error = DEVICE_FAULTS[self.fault.kind]
            if job in jobs and self.happens(self.fault.kind):
                self.release_failed = job is Job.CLOSE
                if self.fault.kind in {FaultKind.ITEM_FAILS, FaultKind.PROMPT_FAILS}:
                    self._cause = next(iter(causes), None)
                return error(f"injected into {job.value}")
        if job is Job.CLOSE and self._releases_fail:
            self.release_failed = True
            return Injected("into close")
        return None

    def _causes(self, job: Job, argument: Any) -> list[object]:
        """Returns the items that a call encodes, or the prompts of the sequences that it feeds."""
        if job is Job.ENCODE:
            return [item.key for item in argument]
        if job is not Job.STEP:
            return []
        self._prompts.update((start.sequence_id, start.token_ids[: start.prompt_length]) for start in argument.started)
        return [self._prompts[chunk.sequence_id] for chunk in argument.chunks if chunk.sequence_id in self._prompts]

    def hangs(self, job: Job) -> bool:
        """Implements `SimWorker.hangs`."""
        return job is Job.STEP and self.happens(FaultKind.STEP_HANGS)
