"""The faults that happen to a trio program just before a step of one of its tasks, and the counter of these steps."""

from __future__ import annotations

import enum
from collections import Counter
from typing import Any, Generic, TypeVar

import trio
from attrs import define, field, frozen

from .schedules import role

KindOfFault = TypeVar("KindOfFault", bound=enum.Enum)


class TrioFault(enum.Enum):
    """The kinds of fault of a program."""

    CANCEL = "the whole program is cancelled"
    CANCEL_PART = "a part of the program is cancelled"
    INTERRUPT = "^C"

    def __repr__(self) -> str:
        return f"TrioFault.{self.name}"


@frozen
class Fault(Generic[KindOfFault]):
    """A fault of kind ``kind``, which happens just before ``task`` takes its ``step``-th step, counted from 1. Tasks of
    one name are counted together. A kind that has occasions instead of steps happens on the ``step``-th occasion, and
    ``task`` is the name of the occasions."""

    kind: KindOfFault
    task: str
    step: int


@define(eq=False)
class StepCounter(trio.abc.Instrument):
    """A counter of the steps of every task, which calls `fire` before the step at which the fault is to happen."""

    fault: Fault[Any] | None
    steps: Counter[str] = field(factory=Counter)
    met: bool = False
    _roles: dict[str, str] = field(factory=dict)  # for each name of a task

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """Implements `trio.abc.Instrument.before_task_step`."""
        name = self._roles.get(task.name) or self._roles.setdefault(task.name, role(task))
        self.steps[name] += 1
        fault = self.fault
        if fault is not None and name == fault.task and self.steps[name] == fault.step:
            self.fire(task, fault)

    def fire(self, task: trio.lowlevel.Task, fault: Fault[Any]) -> None:
        """Makes the fault happen, just before ``task`` runs."""
        raise NotImplementedError
