"""`EncoderOutputs`: the encoder outputs that an executor keeps, by content key."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve, field
from torch import Tensor

from ...core.request import EncoderItem


@define(eq=False)
class EncoderOutputs:
    """Encoder outputs by key, each [embeddings, width]. Each output has its own storage: freeing the output frees its
    bytes, even if other outputs of the same batch are still held."""

    _outputs: dict[str, Tensor] = field(init=False, factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def add(self, outputs: dict[str, Tensor]) -> None:
        """Adds ``outputs``."""
        self._outputs.update(outputs)

    def get(self, key: str) -> Tensor:
        """Returns the output of ``key``, which must be resident."""
        assert key in self._outputs, f"encoder output {key!r} is read but not resident"
        return self._outputs[key]

    def beside(self, jobs: Sequence[EncoderItem]) -> tuple[EncoderItem, ...]:
        """Returns ``jobs``. The payload of an item that follows a resident one gets the output of that one, "known"."""
        return tuple(
            evolve(job, payload={**job.payload, "known": self._outputs[job.follows]}) if job.follows in self else job
            for job in jobs
        )

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops the outputs of ``keys``. If one of them is not resident, none is dropped."""
        missing = [key for key in keys if key not in self._outputs]
        assert not missing, f"encoder outputs {missing} are freed but not resident"
        for key in keys:
            del self._outputs[key]

    def tensors(self) -> tuple[Tensor, ...]:
        """Returns all outputs."""
        return tuple(self._outputs.values())

    def release(self) -> None:
        """Drops everything."""
        self._outputs.clear()
