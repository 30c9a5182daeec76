"""`Executor`: the seam between the actors and the hardware."""

from __future__ import annotations

from typing import Protocol

from .model import ModelDescription
from .plan import DeviceMemory, StepPlan, StepResult
from .request import EncoderItem


class Executor(Protocol):
    """The seam between the runner actor and the hardware. Calls are synchronous, and one worker thread makes all of
    them.

    A call either does all of its work or raises. An error concerns only the items of that call.
    """

    def open(self) -> ModelDescription:
        """Loads the weights and allocates all memory. Raises `CheckpointError` or `UnsupportedModel`."""

    def give_up(self) -> None:
        """Makes an `open` or `wake` that waits for other engines end with `EngineClosed`. Has no other effect. May be
        called from any thread, and at any time."""

    def encode(self, jobs: tuple[EncoderItem, ...]) -> None:
        """Computes the encoder outputs of ``jobs`` in one batch, and keeps each as a copy of its own under its key."""

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one decoder step. Drops the records of ``plan.ended`` first: they are gone even if the step raises."""

    def load_adapter(self, folder: str) -> str:
        """Reads the adapter in ``folder`` into host memory, and returns its key, a hash of its content. It stays until
        `drop_adapter` has been called as often as this. May be called while asleep.

        Raises:
            CallerError: there is no adapter, or it does not fit the model.
        """

    def drop_adapter(self, key: str) -> None:
        """Takes one `load_adapter` back. May be called while asleep."""

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops encoder outputs. A key that is not resident is a bug of ours, and raises `AssertionError`."""

    def reset(self) -> None:
        """Forgets every sequence, every encoder output and all KV. The weights stay, and the executor is as just
        opened. An executor that is asleep does nothing."""

    def sleep(self, *, keep_weights: bool) -> None:
        """Gives the device back. Forgets sequences, encoder outputs and KV. Until `wake`, only `reset`, `memory` and
        `close` may be called.

        Args:
            keep_weights: True: park the weights in host memory, so that `wake` need not read the checkpoint again.

        Raises:
            ExceptionGroup: some releases failed. The executor sleeps nevertheless, and has given back what it could.
            Exception: another error, such as a lack of memory on the host. The executor is still awake, and nothing has
                changed.
        """

    def wake(self) -> None:
        """Takes the device again. Afterwards the executor is as just opened, and matches the description that `open`
        returned.

        If the call raises, the executor has given back what it had taken, and still sleeps. `wake` can be tried again.

        Raises:
            DeviceOutOfMemory: another process has the memory now.
            CheckpointError: the weights were not kept, and the checkpoint has changed.
        """

    def memory(self) -> DeviceMemory:
        """Returns the bytes held now, by owner. While asleep, returns the parked bytes and the memory that they are
        in."""

    def close(self) -> None:
        """Gives everything back, in the reverse order of allocation. Idempotent. May be called on an executor that is
        half open or asleep."""
