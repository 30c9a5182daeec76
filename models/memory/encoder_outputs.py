"""`EncoderOutputs`: the encoder outputs that an executor keeps, by content key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, evolve, field
from torch import Tensor

from ...core.errors import BorrowFailed
from ...core.plan import HostArray, LentOutput
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


def to_host(output: Tensor) -> HostArray:
    """Copies ``output`` to host memory bit for bit. Bytes are copied, since NumPy does not know all dtypes of torch."""
    copied = output.to("cpu", copy=True).contiguous()
    data = copied.view(-1).view(torch.uint8).numpy()
    return HostArray(shape=tuple(output.shape), dtype=_name(output.dtype), data=data)


def from_host(array: HostArray, device: torch.device) -> Tensor:
    """Returns the tensor that was passed to `to_host`, on ``device``. The tensor does not refer to ``array``."""
    dtype: torch.dtype = getattr(torch, array.dtype)
    output = torch.empty(array.shape, dtype=dtype, device=device)
    output.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.array(array.data)))
    return output


def check_lent(output: LentOutput, dtypes: Sequence[torch.dtype]) -> None:
    """Raises `BorrowFailed` unless ``output`` has arrays of ``dtypes`` and as many bytes as its ``size`` says."""
    had, wanted = [array.dtype for array in output.arrays], [_name(dtype) for dtype in dtypes]
    size = sum(len(array.data) for array in output.arrays)
    if had != wanted or size != output.size:
        raise BorrowFailed(
            f"the encoder output lent as {output.key} has {size} bytes of {', '.join(had)}; allowed: {output.size} "
            f"bytes of {', '.join(wanted)}; give lenders and borrowers the same model and settings"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
