"""Linear layers of checkpoints that other libraries quantized to int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.quantized import QuantizedTensor
from .modules import QuantizedLinear

_PLAIN = frozenset({torch.float32, torch.float16, torch.bfloat16})


def adopt_quantized(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Replaces linear layers of ``module`` by `QuantizedLinear`, if compressed-tensors or torchao quantized them to
    int8 symmetrically with one scale for each output. Their weights are copied, since they may be views of a mapped
    file.

    Args:
        dtype: the dtype of the computation.

    Returns:
        The names of the layers that torchao quantized in another way. They are not replaced.
    """
    others = list[str]()
    places = [(name, parent, own) for name, parent in module.named_modules() for own, _ in parent.named_children()]
    for name, parent, own in places:  # the list holds no layers, so a replaced layer is freed at once
        child = getattr(parent, own)
        weight: Any = getattr(child, "weight", None)
        source: Any = getattr(weight, "source", None)
        if isinstance(source, QuantizedTensor) and source.in_int8 and type(child) is nn.Linear:
            found: tuple[Tensor, Tensor] | None = source.int8()
        elif not isinstance(child, nn.Linear | nn.Embedding) or _is_plain(weight):
            continue
        else:
            found = _of_torchao(child) if isinstance(child, nn.Linear) else None
        if found is None:
            others.append(f"{name}.{own}".removeprefix("."))
            continue
        bias = None if child.bias is None else child.bias.detach().to(dtype, copy=True)
        setattr(parent, own, QuantizedLinear(found[0], found[1].to(dtype, copy=True), bias))
    return others


def _is_plain(weight: Any) -> bool:
    return not hasattr(weight, "qdata") and getattr(weight, "dtype", None) in _PLAIN


def _of_torchao(linear: Any) -> tuple[Tensor, Tensor] | None:
    """Returns values and scales; ``None``: the layer is quantized in another way."""
    weight, rows = linear.weight, linear.out_features
    if getattr(weight, "qdata", None) is None or getattr(weight, "act_pre_scale", None) is not None:
        return None
    values, scales, zeros = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    if values.dtype != torch.int8 or tuple(values.shape) != (rows, linear.in_features):
        return None
    if tuple(scales.shape) not in {(rows,), (rows, 1)} or (zeros is not None and bool(zeros.any())):
        return None
    return values.detach().clone(), scales.detach().flatten()
