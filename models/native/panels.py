"""`Panels`: a matrix in the order in which the native library reads it: in int8, or in 16 bits where these hold every
value, or in float32."""

from __future__ import annotations

from ctypes import pointer
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional

from .library import MatrixData

PANEL = 32  # outputs that lie side by side
GROUP = 32  # inputs whose values in int8 have one scale
BATCH = 48  # rows that are attended together where all rows are
FORMATS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.uint8: 3}
_SCALES = 4 * PANEL  # bytes before a group's values
_PART = 1024  # outputs that are looked at together


@frozen(eq=False)
class Panels:
    """A matrix [outputs, inputs], filled up with zeros.

    Args:
        packed: [outputs / 32, inputs, 32]. In int8: bytes [outputs / 32, inputs / 32, 128 + 1024], of each group of
            inputs the float32 scales [32], then the values [8, 32, 4], of which four inputs lie side by side.
        bias: float32 [panels * 32], or none.
    """

    outputs: int
    inputs: int
    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Panels:
        """Packs ``weight`` [outputs, inputs] and ``bias`` [outputs].

        Args:
            dtype: that of the panels, ``torch.int8`` included; by default 16 bits where they hold every value.
        """
        if dtype == torch.int8:
            return cls.of_int8(*quantized(weight), bias)
        outputs, inputs = weight.shape
        panels = -(-outputs // PANEL)
        packed = torch.empty(panels, inputs, PANEL, dtype=dtype or narrowest(weight))
        whole = outputs // PANEL
        packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
        if whole < panels:
            rest = outputs - whole * PANEL
            packed[whole] = 0
            packed[whole, :, :rest] = weight[whole * PANEL :].T
        return cls(outputs, inputs, packed, None if bias is None else filled(bias, panels))

    @classmethod
    def of_int8(cls, values: Tensor, scales: Tensor, bias: Tensor | None = None) -> Panels:
        """Packs int8 ``values`` [outputs, inputs] with ``scales`` [outputs, groups], or [outputs, 1] for all groups."""
        outputs, inputs = values.shape
        panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
        made = cls(
            outputs,
            inputs,
            torch.empty(panels, groups, _SCALES + GROUP * PANEL, dtype=torch.uint8),
            None if bias is None else filled(bias, panels),
        )
        rest = panels * PANEL - outputs
        own = functional.pad(values, (0, groups * GROUP - inputs, 0, rest)).view(panels, PANEL, groups, GROUP // 4, 4)
        made._values.copy_(own.permute(0, 2, 3, 1, 4))
        each = functional.pad(scales.float().expand(outputs, groups), (0, 0, 0, rest))
        made._scales.copy_(each.view(panels, PANEL, groups).transpose(1, 2))
        return made

    @property
    def in_int8(self) -> bool:
        """True if inputs are quantized, too, in groups."""
        return self.packed.dtype == torch.uint8

    @property
    def _scales(self) -> Tensor:
        """The scales, [panels, groups, 32]."""
        return self.packed[..., :_SCALES].view(torch.float32)

    @property
    def _values(self) -> Tensor:
        """The values, [panels, groups, 8, 32, 4]."""
        return self.packed[..., _SCALES:].view(torch.int8).view(*self.packed.shape[:2], GROUP // 4, PANEL, 4)

    def rows(self, places: Tensor) -> Tensor:
        """Outputs' weights, float32 [places, inputs], as of an embedding."""
        panels, outputs = places // PANEL, places % PANEL
        if not self.in_int8:
            return self.packed[panels, :, outputs].float()
        values = self._values[panels, :, :, outputs].flatten(2)  # [places, groups, 32]
        return (values * self._scales[panels, :, outputs][..., None]).flatten(1)[:, : self.inputs].contiguous()

    def part(self, start: int, stop: int) -> Tensor:
        """The weights of some outputs, float32 [stop - start, inputs]: as they were before they were packed, or as
        int8 tells them."""
        return self.rows(torch.arange(start, stop))

    def __call__(self, inputs: Tensor) -> Tensor:
        """The linear layer by torch, [..., inputs] to [..., outputs], both float32; inputs are not quantized."""
        bias = None if self.bias is None else self.bias[: self.outputs]
        return functional.linear(inputs, self.part(0, self.outputs), bias)

    def data(self) -> Any:
        """A pointer for the library, good as long as the tensors are."""
        bias = None if self.bias is None else self.bias.data_ptr()
        form, panels = FORMATS[self.packed.dtype], len(self.packed)
        return pointer(MatrixData(form, self.inputs, self.outputs, panels, self.packed.data_ptr(), bias))


def filled(bias: Tensor, panels: int) -> Tensor:
    """A bias as long as its panels, in float32."""
    return functional.pad(bias.float(), (0, panels * PANEL - len(bias))).contiguous()


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes as `in_groups` does, some rows at a time."""
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP)
    values, scales = torch.empty(outputs, inputs, dtype=torch.int8), torch.empty(outputs, groups)
    for start in range(0, outputs, _PART):
        part = slice(start, start + _PART)
        values[part], scales[part] = in_groups(weight[part])
    return values, scales


def in_groups(part: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values of ``part`` [rows, inputs], and the scales [rows, groups], as the library quantizes inputs."""
    rows, inputs = part.shape
    grouped = functional.pad(part.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)
    largest = grouped.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, 127.0 / largest, 0.0)  # of less it may be infinite
    values = (grouped * inverse).round_().to(torch.int8).view(rows, -1)[:, :inputs]
    return values, (largest / 127.0)[..., 0]


def narrowest(weight: Tensor) -> torch.dtype:
    """A dtype of the fewest bytes that holds every value of ``weight``."""
    if weight.dtype in {torch.float16, torch.bfloat16}:
        return weight.dtype
    for dtype in (torch.bfloat16, torch.float16):
        if all(bool((part.to(dtype) == part).all()) for part in torch.split(weight, _PART)):
            return dtype
    return torch.float32
