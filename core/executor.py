"""`Executor`: the seam between the actors and the hardware."""

from __future__ import annotations

from typing import Protocol

from .model import ModelDescription
from .plan import DeviceMemory, EncodeJob, StepPlan, StepResult


class Executor(Protocol):
    """The seam between the runner actor and the hardware. Synchronous; every call comes from one thread, its own.

    A call either does all it was asked or raises; what it raises belongs to the items of that call alone.
    """

    def open(self) -> ModelDescription:
        """Loads the weights and takes all memory. Raises `CheckpointError` or `UnsupportedModel`."""

    def encode(self, jobs: tuple[EncodeJob, ...]) -> None:
        """Computes the encoder outputs of ``jobs`` in one batch and keeps each as its own copy under its key."""

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step. The records of ``plan.ended`` are dropped first, so also where it raises."""

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs. A key that is not resident is our bug: `AssertionError`."""

    def reset(self) -> None:
        """Forgets every sequence, encoder output and KV; the weights stay. After it the executor is as just opened.
        Asleep there is nothing to forget, and that is no error."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the device back. Sequences, encoder outputs and KV are forgotten; until `wake`, only `reset`, `memory`
        and `close` may be called.

        Args:
            keep_weights: park the weights in host memory, so that `wake` need not read the checkpoint again.

        Raises:
            ExceptionGroup: what the releases raised. It sleeps all the same, and gave back what it could.
            Exception: anything else, such as no room on the host: it is awake, and nothing has changed.
        """

    def wake(self) -> None:
        """Takes the device again. After it the executor is as just opened, and just as `open` has described it.

        When it raises, it has given back what it had taken, and sleeps: it can be tried again.

        Raises:
            DeviceOutOfMemory: somebody else has the memory now.
            CheckpointError: the weights were not kept, and the checkpoint is not what it was.
        """

    def memory(self) -> DeviceMemory:
        """Bytes held now, by owner; asleep, what is parked, and in which memory."""

    def close(self) -> None:
        """Gives everything back, in reverse order of taking; idempotent; works on an executor that is half open or
        asleep."""
