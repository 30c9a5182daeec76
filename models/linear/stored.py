"""Linear layers of checkpoints that other libraries quantized to int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .modules import QuantizedLinear

_PLAIN = frozenset({torch.float32, torch.float16, torch.bfloat16})


def adopt_quantized(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Replaces linear layers of ``module`` by `QuantizedLinear`, if compressed-tensors or torchao quantized them to
    int8 symmetrically with one scale for each output. Their weights are copied, since they may be views of a mapped
    file.

    Args:
        dtype: the dtype of the computation.

    Returns:
        The names of the layers that are quantized in another way. They are not replaced.
    """
    others = list[str]()
    places = [(name, parent, own) for name, parent in module.named_modules() for own, _ in parent.named_children()]
    for name, parent, own in places:  # the list holds no layers, so a replaced layer is freed at once
        child = getattr(parent, own)
        weight: Any = getattr(child, "weight", None)
        plain = type(weight) in {Tensor, nn.Parameter} and weight.dtype in _PLAIN
        if not isinstance(child, nn.Linear | nn.Embedding) or plain:
            continue
        found = _adopted(child, dtype) if isinstance(child, nn.Linear) else None
        if found is None:
            others.append(f"{name}.{own}".removeprefix("."))
        else:
            setattr(parent, own, found)
    hook = getattr(module, "ct_decompress_hook", None)
    if hook is not None:  # a hook of compressed-tensors, which has nothing left to decompress
        hook.remove()
    return others


def _adopted(linear: Any, dtype: torch.dtype) -> QuantizedLinear | None:
    """Returns the replacement for ``linear``; ``None``: the layer is quantized in another way."""
    weight: Any = getattr(linear, "weight", None)
    if hasattr(weight, "qdata"):  # from torchao
        if getattr(weight, "act_pre_scale", None) is not None:
            return None
        values, scales, zeros = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    else:  # from compressed-tensors
        values = _unpacked(linear) if weight is None else weight
        scales, zeros = getattr(linear, "weight_scale", None), getattr(linear, "weight_zero_point", None)
    rows = linear.out_features
    if values is None or values.dtype != torch.int8 or tuple(values.shape) != (rows, linear.in_features):
        return None
    if scales is None or tuple(scales.shape) not in {(rows,), (rows, 1)} or (zeros is not None and bool(zeros.any())):
        return None
    bias = None if linear.bias is None else linear.bias.detach().to(dtype, copy=True)
    return QuantizedLinear(values.detach().clone(), scales.detach().flatten().to(dtype, copy=True), bias)


def _unpacked(linear: Any) -> Tensor | None:
    """Unpacks the int8 values of compressed-tensors. One integer holds four values of a row, the first in its lowest
    byte, with 128 added to each. ``None``: the layer is packed in another way."""
    packed: Tensor | None = getattr(linear, "weight_packed", None)
    columns = linear.in_features
    if packed is None or packed.dtype != torch.int32 or packed.shape[1] != -(-columns // 4):
        return None
    return (packed.detach().contiguous().view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)
