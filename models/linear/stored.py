"""Linear layers of checkpoints that other libraries quantized to int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .modules import QuantizedLinear

_PLAIN = frozenset({torch.float32, torch.float16, torch.bfloat16})


def adopt_quantized(module: nn.Module, dtype: torch.dtype) -> list[str]:
    """Puts `QuantizedLinear` in the places of the linear layers of ``module`` that compressed-tensors or torchao
    quantized to int8, each output by a scale of its own, symmetrically; ``dtype`` is what is computed in. Their weights
    are copied: they may be views of a mapped file.

    Returns:
        The names of the layers that are quantized in another way, and stay as they are.
    """
    others = list[str]()
    places = [(name, parent, own) for name, parent in module.named_modules() for own, _ in parent.named_children()]
    for name, parent, own in places:  # it holds no layer that was replaced
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
    if hook is not None:  # compressed-tensors': nothing is left to be decompressed
        hook.remove()
    return others


def _adopted(linear: Any, dtype: torch.dtype) -> QuantizedLinear | None:
    """The layer in the place of ``linear``; ``None``: it is quantized in another way."""
    weight: Any = getattr(linear, "weight", None)
    if hasattr(weight, "qdata"):  # of torchao
        if getattr(weight, "act_pre_scale", None) is not None:
            return None
        values, scales, zeros = weight.qdata, weight.scale, getattr(weight, "zero_point", None)
    else:  # of compressed-tensors
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
    """Unpacks int8 values: four bytes of a row are in one integer, the first one lowest, 128 added to each; ``None``:
    they are not bytes."""
    packed: Tensor | None = getattr(linear, "weight_packed", None)
    columns = linear.in_features
    if packed is None or packed.dtype != torch.int32 or packed.shape[1] != -(-columns // 4):
        return None
    return (packed.detach().contiguous().view(torch.uint8)[:, :columns] ^ 128).view(torch.int8)
