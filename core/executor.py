"""`Executor`: the seam between the actors and the hardware."""

from __future__ import annotations

from typing import Protocol

from .model import ModelDescription
from .plan import DeviceMemory, LentOutput, StepPlan, StepResult
from .request import EncoderItem


class Executor(Protocol):
    """The seam between the runner actor and the hardware. Synchronous; one worker thread makes every call.

    A call either does all of its work or raises. An error concerns the items of that call alone.
    """

    def open(self) -> ModelDescription:
        """Loads the weights and takes all memory. Raises `CheckpointError` or `UnsupportedModel`."""

    def encode(self, jobs: tuple[EncoderItem, ...]) -> None:
        """Computes the encoder outputs of ``jobs`` in one batch and keeps each as its own copy under its key."""

    def take_out(self, key: str) -> LentOutput:
        """A copy of the encoder output of ``key``, which stays. A key that is not resident is our bug."""

    def put_in(self, output: LentOutput) -> None:
        """Keeps, under its key, an encoder output that another executor has computed. A key that is resident is our
        bug.

        Raises:
            BorrowFailed: it is not what this executor would have computed: of another dtype, say.
        """

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step. Drops the records of ``plan.ended`` first, so also where the step raises."""

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs. A key that is not resident is our bug: `AssertionError`."""

    def reset(self) -> None:
        """Forgets every sequence, encoder output and KV; the weights stay. After it the executor is as just opened. An
        executor that is asleep forgets nothing, without error."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the device back. Forgets sequences, encoder outputs and KV. Until `wake`, only `reset`, `memory` and
        `close` may be called.

        Args:
            keep_weights: park the weights in host memory, so that `wake` need not read the checkpoint again.

        Raises:
            ExceptionGroup: the releases' errors. The executor sleeps all the same, and gave back what it could.
            Exception: anything else, such as no room on the host. The executor is awake, and nothing has changed.
        """

    def wake(self) -> None:
        """Takes the device again. After it the executor is as just opened, and fits the description that `open` gave.

        Where the call raises, the executor has given back what it had taken, and sleeps: `wake` can be tried again.

        Raises:
            DeviceOutOfMemory: another process has the memory now.
            CheckpointError: the weights were not kept, and the checkpoint has changed.
        """

    def memory(self) -> DeviceMemory:
        """Bytes held now, by owner; asleep, the parked bytes, and in which memory."""

    def close(self) -> None:
        """Gives everything back, in reverse order of taking. Idempotent. Works on an executor that is half open or
        asleep."""
