"""`EncoderOutputs`: the encoder outputs that an executor keeps, by content key."""

from __future__ import annotations

from attrs import define, field
from torch import Tensor


@define(eq=False)
class EncoderOutputs:
    """Encoder outputs by key, each [embeddings, width] in storage of its own: freeing one frees its bytes, whatever
    became of the others of its batch."""

    _outputs: dict[str, Tensor] = field(init=False, factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self._outputs

    def add(self, outputs: dict[str, Tensor]) -> None:
        """Keeps ``outputs``."""
        self._outputs.update(outputs)

    def get(self, key: str) -> Tensor:
        """The output of ``key``, which must be resident."""
        assert key in self._outputs, f"encoder output {key!r} is read but not resident"
        return self._outputs[key]

    def free(self, keys: tuple[str, ...]) -> None:
        """Drops ``keys``, all of which must be resident: all or none."""
        missing = [key for key in keys if key not in self._outputs]
        assert not missing, f"encoder outputs {missing} are freed but not resident"
        for key in keys:
            del self._outputs[key]

    def tensors(self) -> tuple[Tensor, ...]:
        """All outputs."""
        return tuple(self._outputs.values())

    def release(self) -> None:
        """Drops everything."""
        self._outputs.clear()
