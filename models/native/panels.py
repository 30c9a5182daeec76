"""`Panels`: a matrix in the order in which the native library reads it, in 16 bits where these hold every value."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import pointer
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .library import MatrixData

PANEL = 32  # outputs that lie side by side
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_PART = 1024  # outputs that are looked at together


@frozen(eq=False)
class Panels:
    """A matrix [outputs, inputs] as [outputs / 32, inputs, 32], filled up with zeros.

    Args:
        bias: float32 [panels * 32], or none.
    """

    outputs: int
    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Panels:
        """Packs ``weight`` [outputs, inputs] and ``bias`` [outputs].

        Args:
            dtype: that of the panels; by default 16 bits where they hold every value.
        """
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = torch.empty(panels, inputs, PANEL, dtype=dtype or narrowest(weight))
        whole = outputs // PANEL
        packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
        if whole < panels:
            rest = outputs - whole * PANEL
            packed[whole] = 0
            packed[whole, :, :rest] = weight[whole * PANEL :].T
        filled = None if bias is None else functional.pad(bias.float(), (0, panels * PANEL - outputs)).contiguous()
        return cls(outputs, packed, filled)

    @property
    def inputs(self) -> int:
        """How many values a row has that is multiplied."""
        return self.packed.shape[1]

    def rows(self, places: Tensor) -> Tensor:
        """Outputs' weights, float32 [places, inputs], as of an embedding."""
        return self.packed[places // PANEL, :, places % PANEL].float()

    def weight(self) -> Tensor:
        """The matrix as it was, float32 [outputs, inputs]."""
        return self.packed.transpose(1, 2).reshape(-1, self.inputs)[: self.outputs].float()

    def data(self) -> Any:
        """A pointer for the library, good as long as the tensors are."""
        bias = None if self.bias is None else self.bias.data_ptr()
        form, panels = FORMATS[self.packed.dtype], len(self.packed)
        return pointer(MatrixData(form, self.inputs, self.outputs, panels, self.packed.data_ptr(), bias))

    def tensors(self) -> tuple[Tensor, ...]:
        """The panels and the bias."""
        return (self.packed,) if self.bias is None else (self.packed, self.bias)


def narrowest(weight: Tensor) -> torch.dtype:
    """Of the dtypes that hold every value of ``weight``, one of the fewest bytes."""
    if weight.dtype in {torch.float16, torch.bfloat16}:
        return weight.dtype
    for dtype in (torch.bfloat16, torch.float16):
        if all(map(_holds, torch.split(weight, _PART), [dtype] * -(-len(weight) // _PART))):
            return dtype
    return torch.float32


def _holds(part: Tensor, dtype: torch.dtype) -> bool:
    return bool((part.to(dtype) == part).all())


def stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Panels:
    """Linear layers of the same inputs as one matrix, one behind the other."""
    bias = None
    if any(one is not None for one in biases):
        both = zip(weights, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if one is None else one for weight, one in both])
    return Panels.of(torch.cat(list(weights)), bias)
