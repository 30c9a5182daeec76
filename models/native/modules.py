"""Modules of torch whose matrices are in the native library's order. They replace modules of a loaded model, so that
its weights are held once.

Torch computes with them for comparisons, and wherever the library does not compute. They unpack their matrix part by
part, and return the same as the replaced module. They quantize no inputs, unlike the library, which does so if weights
are in int8.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .panels import Panels, quantized

_PART = 4096  # outputs that are unpacked at a time


class PackedLinear(nn.Module):
    """A replacement for an `nn.Linear`: ``outputs`` outputs of a matrix in panels, from output ``first`` on. The other
    outputs of the matrix belong to neighbours."""

    packed: Tensor
    bias: Tensor | None
    weight = None  # T5's layers ask for its dtype, to compute in that

    def __init__(self, panels: Panels, first: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("packed", panels.packed)
        self.register_buffer("bias", panels.bias)
        self.whole, self.in_features = panels.outputs, panels.inputs
        self.first, self.out_features = first, outputs

    def panels(self) -> Panels:
        """Returns the matrix, with the outputs of the neighbours."""
        return Panels(self.whole, self.in_features, self.packed, self.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        panels, end = self.panels(), self.first + self.out_features
        parts = []
        for start in range(self.first, end, _PART):
            stop = min(start + _PART, end)
            bias = None if self.bias is None else self.bias[start:stop]
            parts.append(functional.linear(inputs, panels.part(start, stop), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class PackedEmbedding(nn.Module):
    """A replacement for an `nn.Embedding`, which may share its matrix with the head."""

    weight: Tensor

    def __init__(self, panels: Panels, scale: float) -> None:
        super().__init__()
        self.register_buffer("weight", panels.packed)
        self.whole, self.inputs, self.scale = panels.outputs, panels.inputs, scale

    def panels(self) -> Panels:
        """Returns the matrix. Its tensors may have been moved since the last call."""
        return Panels(self.whole, self.inputs, self.weight, None)

    def forward(self, indices: Tensor) -> Tensor:
        rows = self.panels().rows(indices.reshape(-1)).view(*indices.shape, self.inputs)
        return rows if self.scale == 1.0 else rows * self.scale


def packed(modules: Sequence[Any], *, int8: bool) -> list[PackedLinear]:
    """Packs linear layers that read the same inputs as neighbours in one matrix. The matrix is in int8 if ``int8`` is
    true or the layers already are."""
    bias = _bias(modules)
    if hasattr(modules[0], "scales"):  # one for each output
        values = torch.cat([each.weight for each in modules])
        panels = Panels.of_int8(values, torch.cat([each.scales for each in modules])[:, None], bias)
    else:
        weights = [each.weight.detach() for each in modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        panels = Panels.of_int8(*quantized(weight), bias) if int8 else Panels.of(weight, bias)
    made, first = [], 0
    for each in modules:
        made.append(PackedLinear(panels, first, len(each.weight)))
        first += len(each.weight)
    return made


def _bias(modules: Sequence[Any]) -> Tensor | None:
    if all(each.bias is None for each in modules):
        return None
    zeros = [torch.zeros(len(each.weight), dtype=torch.float32) for each in modules]
    return torch.cat(
        [zero if each.bias is None else each.bias.detach() for zero, each in zip(zeros, modules, strict=True)]
    )
