"""Linear layers of checkpoints that other libraries quantized to int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..checkpoints.quantized import QuantizedTensor
from .modules import QuantizedLinear


def adopt_quantized(module: nn.Module, dtype: torch.dtype) -> None:
    """Replaces linear layers of ``module`` by `QuantizedLinear`, if they were quantized to int8 symmetrically with one
    scale for each output.

    Args:
        dtype: the dtype of the computation.
    """
    places = [(parent, own) for parent in module.modules() for own, _ in parent.named_children()]
    for parent, own in places:  # the list holds no layers, so a replaced layer is freed at once
        child = getattr(parent, own)
        source: Any = getattr(getattr(child, "weight", None), "source", None)
        if not isinstance(source, QuantizedTensor) or not source.in_int8 or type(child) is not nn.Linear:
            continue
        values, scales = source.int8()
        bias = None if child.bias is None else child.bias.detach().to(dtype, copy=True)
        setattr(parent, own, QuantizedLinear(values, scales.to(dtype, copy=True), bias))
