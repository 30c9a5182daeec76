"""Ways to compute a linear layer on a CPU. All of them read the weights as they are held, so one layer may be computed
in another way for each number of rows, and no weight is held twice.

torch's own `linear` is MKL's for float32: right for many rows, on some machines several times too slow for a few.
What is fastest differs from machine to machine, see `choice`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

FloatKernel = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Inputs [rows, inputs], weight [outputs, inputs] of the same dtype and bias [outputs] or ``None``; [rows, outputs]."""

Int8Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""The same, of weights in int8 and their scales [outputs], in the dtype of the inputs."""

WHOLE = 32
"""Inputs that `weight_only` reads at once: of another number it reads behind the end of the weights, and may crash."""

_BLOCK = 128  # outputs of a block: with a few rows its weights stay in the first caches


def stock(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own."""
    return functional.linear(inputs, weight, bias)


def weight_first(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product the other way round, the large matrix first."""
    if bias is None:
        return (weight @ inputs.T).T.contiguous()
    return torch.addmm(bias[:, None], weight, inputs.T).T.contiguous()


def blocked(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Blocks of outputs as a batch of small products."""
    outputs, width = weight.shape
    whole = outputs - outputs % _BLOCK
    blocks = torch.matmul(inputs, weight[:whole].view(-1, _BLOCK, width).transpose(1, 2))  # [blocks, rows, _BLOCK]
    found = inputs.new_empty(len(inputs), outputs)
    found[:, :whole].view(len(inputs), whole // _BLOCK, _BLOCK).copy_(blocks.transpose(0, 1))
    if whole < outputs:
        torch.mm(inputs, weight[whole:].T, out=found[:, whole:])
    return found if bias is None else found.add_(bias)


def onednn(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's, which reorders the weights on the way."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return found


def int8(inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """int8 by int8: the inputs are quantized too, each row by its largest value, so that a row's result does not
    depend on its batch."""
    wide = inputs.float()
    largest = wide.abs().amax(-1, keepdim=True)
    # a row of zeros makes NaN here, which the product with its largest value, 0, turns into 0 again
    quantized = (wide * (127.0 / largest)).nan_to_num_(0.0).round_().to(torch.int8)
    found = torch._int_mm(quantized, weight.T) * scales.float()
    found.mul_(largest.div_(127.0))
    if bias is not None:
        found.add_(bias)
    return found.to(inputs.dtype)


def weight_only(inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Products of the inputs as they are: the weights are converted in registers. For a multiple of `WHOLE` inputs."""
    assert inputs.shape[1] % WHOLE == 0, f"{inputs.shape[1]} inputs are no multiple of {WHOLE}"
    found = torch._weight_int8pack_mm(inputs, weight, scales)
    return found if bias is None else found.add_(bias)


def dequantized(inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Converts the weights first, which pays for many rows."""
    return functional.linear(inputs, weight.to(inputs.dtype).mul_(scales[:, None]), bias)


@cache
def multiplies_int8() -> bool:
    """Whether this CPU multiplies int8 fast and exactly. Without VNNI oneDNN adds pairs of products up in 16 bits and
    cuts off what they do not hold, or torch multiplies one by one: on an AMD EPYC without it a window of whisper-base
    takes 17 s instead of 1."""
    largest = torch.full((4, 64), 127, dtype=torch.int8)
    return torch.cpu._is_vnni_supported() and bool((torch._int_mm(largest, largest.T) == 127 * 127 * 64).all())


FLOAT: Mapping[str, FloatKernel] = MappingProxyType(
    {"stock": stock, "weight_first": weight_first, "blocked": blocked, "onednn": onednn}
)
"""The ways to compute weights as they are. The first is taken where nothing was measured."""

INT8: Mapping[str, Int8Kernel] = MappingProxyType(
    {"int8": int8, "weight_only": weight_only, "dequantized": dequantized}
)
"""The ways to compute weights in int8. Which of them a model has is told by `layers.Int8Linear.candidates`."""
